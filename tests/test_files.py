import os
import subprocess
import sys
import time
from pathlib import Path

import ase.io
import pytest
import yaml
from typer.testing import CliRunner

from blips.cli import app
from blips.errors import BlipsError
from blips.files import locked, write_atomically, writing
from helpers import TINY, morse_ammonia

BLIPS = [sys.executable, "-c", "from blips.cli import main; main()"]


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        assert path.read_bytes() == b"old"  # nothing has touched it while the new one is written
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_lock_is_free_again_after_the_block_and_leaves_nothing(tmp_path):
    ours = f"process {os.getpid()} works in"
    with (
        locked(tmp_path / "a.lock"),
        pytest.raises(BlipsError, match=ours),
        locked(tmp_path / "a.lock"),
    ):
        pass
    with locked(tmp_path / "a.lock"):
        pass
    assert not list(tmp_path.iterdir())


def test_an_output_inside_a_run_waits_for_that_run(tmp_path):
    with (
        locked(tmp_path / "run.lock"),
        pytest.raises(BlipsError, match="already"),
        writing(tmp_path / "best"),
    ):
        pass
    with (
        writing(tmp_path / "best"),
        pytest.raises(BlipsError, match="already"),
        writing(tmp_path / "best"),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.fixture
def config(tmp_path) -> Path:
    for name, count in (("train", 12), ("valid", 6)):
        ase.io.write(tmp_path / f"{name}.extxyz", morse_ammonia(count, seed=count))
    content = {
        "model": {"hyperparameters": TINY},
        "data": {name: str(tmp_path / f"{name}.extxyz") for name in ("train", "valid")},
        "training": {"epochs": 100_000, "tensorboard": False, "threads": 1},
        "folder": str(tmp_path / "run"),
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(*arguments: object) -> tuple[int, str]:
    """Exit code and output of a command in this process."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return (
        (2, str(done.exception))
        if isinstance(done.exception, BlipsError)
        else (done.exit_code, done.output)
    )


def test_a_second_process_in_the_folder_of_a_run_is_refused(tmp_path, config):
    first = subprocess.Popen([*BLIPS, "train", str(config)], stdout=subprocess.DEVNULL)
    try:
        best = tmp_path / "run" / "best.safetensors"
        while first.poll() is None and not best.exists():
            time.sleep(0.1)
        valid = ["--valid", tmp_path / "valid.extxyz"]
        for second in (
            ["train", config],
            ["train", config, "--resume"],
            ["condition", best, tmp_path / "train.extxyz", *valid, "--output", best],
        ):
            code, message = run(*second)
            assert code == 2, message
            assert message.startswith(f"process {first.pid} works in")
            assert "\n" not in message
    finally:
        first.kill()
        first.wait()
    code, message = run("train", config, "training.epochs=1", "--resume")
    assert code == 0, message  # the dead hold no lock
