"""The folder of a training run, and what is recorded in it.

config.yaml          the resolved configuration
environment.json     versions, platform, command
split.json           which structures were trained on, where the run made the split
replay.json          energy per element (eV) that was taken from the second set, if there is one
metrics.csv          one row per epoch
tensorboard/         the same, for TensorBoard
last.safetensors     resumable state
best.safetensors     the model with the least validation loss
"""

import csv
import io
import math
import os
import platform
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blips import __version__
from blips.config import RunConfig, different_settings, dump_config, load_config
from blips.errors import ConfigError
from blips.files import RUN_LOCK, locked, write_atomically, write_json

REQUIRED = ("torch", "numpy", "ase", "vesin", "lightning-fabric")


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.last = self.path / "last.safetensors"
        self.best = self.path / "best.safetensors"

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from this folder; those of one distributed run share the lock."""
        ranks = (os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
        return locked(self.path / RUN_LOCK) if set(ranks) == {"0"} else nullcontext()

    def start(self, config: RunConfig, *, resume: bool) -> None:
        """Create the folder, or check that `config` is the one that the run began with."""
        if resume and self.config_file.exists():
            before = load_config(self.config_file).model_dump(mode="json")
            changed = different_settings(before, config.model_dump(mode="json"))
            places = {"accelerator", "devices", "nodes", "strategy", "tensorboard"}
            allowed = {"folder", "training.epochs", *(f"training.{name}" for name in places)}
            if changed - allowed:
                raise ConfigError(
                    f"cannot resume {self.path}: {', '.join(sorted(changed - allowed))} differ "
                    "from the run's config.yaml; use the same settings or a new folder"
                )
        elif self.last.exists() and not resume:
            raise ConfigError(
                f"{self.path} holds a run already; continue it with resume (--resume), "
                "or choose another folder"
            )
        write_atomically(self.config_file, dump_config(config).encode())
        write_json(self.path / "environment.json", environment())

    def write_history(self, history: list[dict[str, float]]) -> None:
        """Write metrics.csv anew: one row per epoch, whatever was there before."""
        columns = dict.fromkeys(name for row in history for name in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
        write_atomically(self.path / "metrics.csv", text.getvalue().encode())


def environment() -> dict[str, Any]:
    """Record versions, platform and command; the home folder is ~ in it."""
    home = f"{Path.home()}/"
    return {
        "versions": {"blips-mlip": __version__, **{name: version(name) for name in REQUIRED}},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": [Path(sys.argv[0]).name, *(a.replace(home, "~/") for a in sys.argv[1:])],
    }


@dataclass
class Progress:
    """Where a run is: finished epochs, best validation loss, one row per epoch."""

    epoch: int = 0
    best_loss: float = math.inf
    best_epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the best loss, and the mean absolute errors on the validation structures then."""
        row = self.history[self.best_epoch - 1]
        units = {"valid_mae_energy": "meV/atom", "valid_mae_forces": "meV/Å"}
        errors = [f"{row[name]:.3g} {unit}" for name, unit in units.items() if name in row]
        return f"{self.best_loss:.6g}" + f" (MAE {', '.join(errors)})" * bool(errors)
