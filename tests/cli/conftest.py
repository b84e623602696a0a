"""Files that are made once for the tests of the command."""

from pathlib import Path

import ase.io
import pytest
import torch

import blips
from blips.backbones import PaiNN
from helpers import TINY, morse_ammonia


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
