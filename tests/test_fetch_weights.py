"""Checkpoints out of a wheel, with a wheel of our own in place of the public one."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from blips.errors import CheckpointError, InputError
from recipes import fetch_weights as fetch
from recipes.fetch_weights import CHECKPOINTS, Checkpoint

CONTENT = b"weights"


@pytest.fixture
def downloads(monkeypatch, tmp_path) -> list[list[str]]:
    """What pip was asked for; a small wheel is what it gives."""
    monkeypatch.setenv("BLIPS_CACHE", str(tmp_path / "cache"))
    for name, checkpoint in list(CHECKPOINTS.items()):
        digest = hashlib.sha256(CONTENT).hexdigest()
        ours = Checkpoint(checkpoint.path, digest, checkpoint.licence)
        monkeypatch.setitem(CHECKPOINTS, name, ours)
    asked: list[list[str]] = []

    def run(line: list[str], **_):
        asked.append(line)
        with zipfile.ZipFile(Path(line[line.index("-d") + 1]) / "some.whl", "w") as wheel:
            for checkpoint in CHECKPOINTS.values():
                wheel.writestr(checkpoint.path, CONTENT)
        return subprocess.CompletedProcess(line, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_files_are_unpacked_into_the_cache_and_downloaded_once(downloads, tmp_path):
    assert fetch.find("mattersim-1m") is None
    paths = fetch.fetch("mattersim-1m", "mace-omat-0-small")
    folder = tmp_path / "cache" / "checkpoints"
    assert paths == [folder / "mattersim-v1.0.0-1M.pth", folder / "mace-omat-0-small.model"]
    assert [path.read_bytes() for path in paths] == [CONTENT] * 2
    assert sorted(folder.iterdir()) == sorted(paths)
    assert fetch.fetch("mattersim-1m") == paths[:1]
    (line,) = downloads
    assert line[1:5] == ["-m", "pip", "download", "--no-deps"]
    assert line[-1] == "macer==0.1.15"


@pytest.mark.usefixtures("downloads")
def test_a_file_with_another_content_is_not_kept(monkeypatch):
    monkeypatch.setitem(CHECKPOINTS, "mattersim-1m", Checkpoint("macer/mlff-model/x", "0", ""))
    monkeypatch.setattr("zipfile.ZipFile.read", lambda *_: b"something else")
    with pytest.raises(CheckpointError, match="not the released file"):
        fetch.fetch("mattersim-1m")
    assert fetch.find("mattersim-1m") is None


@pytest.mark.usefixtures("downloads")
def test_a_damaged_file_is_found():
    (path,) = fetch.fetch("mattersim-1m")
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        fetch.find("mattersim-1m")


@pytest.mark.usefixtures("downloads")
def test_a_failed_download_says_what_pip_said(monkeypatch):
    def run(line: list[str], **_):
        return subprocess.CompletedProcess(line, 1, "", "No matching distribution")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CheckpointError, match="No matching distribution"):
        fetch.fetch("mattersim-1m")


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="known: mattersim-1m, mace-omat-0-small"):
        fetch.fetch("mace-omat-0-large")


@pytest.mark.usefixtures("downloads")
def test_the_command_names_files_and_licences(capsys):
    fetch.main(["mattersim-1m", "mace-omat-0-small"])
    first, second = capsys.readouterr().out.splitlines()
    assert "mattersim-v1.0.0-1M.pth (MIT" in first
    assert "ASL" in second
    assert "not redistributed" in second
