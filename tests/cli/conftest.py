"""The real command in real processes, on files that are made once."""

import os
import subprocess
import sys
from pathlib import Path

import ase.io
import pytest
import torch

import blips
from blips.backbones import PaiNN
from helpers import TINY, morse_ammonia

SOURCE = str(Path(blips.__file__).parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


@pytest.fixture(scope="session")
def examples(tmp_path_factory) -> Path:
    """A conditioned model, a plain one, and labelled structures; not to be changed."""
    folder = tmp_path_factory.mktemp("examples")
    torch.manual_seed(0)
    frames = morse_ammonia(12, seed=0)
    model = blips.bayesianize(PaiNN(**TINY))
    model.backbone.reference.set({1: 0.0, 7: -1.0})
    blips.save(model.to_base(), folder / "plain.safetensors")
    model.condition(frames[:8], valid=frames[8:])
    blips.save(model, folder / "model.safetensors")
    ase.io.write(folder / "data.extxyz", frames)
    return folder


@pytest.fixture
def folder(examples, tmp_path, monkeypatch) -> Path:
    """A folder of the test's own with these files, in which it works."""
    for path in examples.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def command():
    """(arguments) -> the finished process."""

    def run(*arguments, timeout=120, cwd=None, **options):
        return subprocess.run(
            [sys.executable, "-m", "blips", *map(str, arguments)],
            capture_output=True, text=True, timeout=timeout, cwd=cwd, env=ENVIRONMENT, **options,
        )  # fmt: skip

    return run
