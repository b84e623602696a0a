"""A small, fast campaign for tests."""

import os
import sys
from pathlib import Path

import ase.io
from ase.build import molecule

HERE = Path(__file__).parent


def tiny_campaign(folder: Path, **changes) -> dict:
    """NH3 with EMT, a tiny PaiNN, two rounds; `changes` replace keys of sections."""
    folder.mkdir(parents=True, exist_ok=True)
    ase.io.write(folder / "start.extxyz", molecule("NH3"))
    config = {
        "folder": str(folder / "campaign"),
        "initial": {"structures": str(folder / "start.extxyz"), "count": 6, "displacement": 0.05},
        "model": {
            "hyperparameters": {"cutoff": 4.0, "features": 8, "blocks": 1, "num_basis": 4},
        },
        "training": {"epochs": 3, "batch_size": 4, "threads": 1, "tensorboard": False},
        "explore": {"walkers": 2, "steps": 10, "every": 5, "potential": "member"},
        "select": {"batch": 3, "samples": 4, "chunk": 2},
        "label": {"calculator": "emt"},
        "stop": {"rounds": 2},
        "executor": {"kind": "inline"},
    }
    for section, values in changes.items():
        config[section] = {**config[section], **values} if isinstance(values, dict) else values
    return config


def importable() -> None:
    """Let labellers, which are processes of their own, import the calculators of the tests."""
    before = os.environ.get("PYTHONPATH", "")
    if str(HERE) not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), before]))
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
