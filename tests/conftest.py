"""Settings shared by all tests."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from environment import COMMAND_ENVIRONMENT, REPOSITORY

# A suite that is started in the background ignores Ctrl-C, and so would the processes it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)
settings.register_profile("blips", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("blips")


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """Folder with public DFT data, $BLIPS_DATA or shared/data beside the repository."""
    default = REPOSITORY.parent / "shared" / "data"
    folder = Path(os.environ.get("BLIPS_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no reference data: {folder} is not a folder (set BLIPS_DATA)")
    return folder


@pytest.fixture
def float64():
    """Double precision by default within a test."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def command():
    """(arguments) -> the finished process of the real command."""

    def run(*arguments, timeout=120, cwd=None):
        return subprocess.run(
            [sys.executable, "-m", "blips", *map(str, arguments)],
            capture_output=True, text=True, timeout=timeout, cwd=cwd, env=COMMAND_ENVIRONMENT,
        )  # fmt: skip

    return run
