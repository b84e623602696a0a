"""The data sets of a training run, from what `fit` is given: files, structures or data sets."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.data import chemical_symbols

from blips.backbones.base import Backbone, atomistic
from blips.backbones.foreign import ForeignBackbone
from blips.config import RunConfig
from blips.data.dataset import StructureData, TrainingData
from blips.data.labels import QUANTITIES, Labels
from blips.data.sanity import warn_of_labels
from blips.data.splits import Split, group_split, random_split
from blips.data.structures import XyzFrames, check_structures, read_structures
from blips.errors import ConfigError, InputError
from blips.files import write_json
from blips.train.checkpoint import DTYPES
from blips.train.references import moved, set_reference_energies, unexplained_energies
from blips.train.run import RunFolder

Data = str | Path | Sequence[Atoms] | TrainingData


class DataSets:
    """Makes the data sets of a run, and gives its model their labels and reference energies."""

    def __init__(
        self, backbone: Backbone, settings: RunConfig, run: RunFolder, *, resume: bool
    ) -> None:
        self.backbone, self.settings, self.run, self.resume = backbone, settings, run, resume
        self.labels = Labels(**settings.data.labels.model_dump())
        weights = settings.training.weights
        self.quantities = tuple(name for name in QUANTITIES if getattr(weights, name) > 0)

    def main(
        self, train: Data | None, valid: Data | float | None
    ) -> tuple[TrainingData, TrainingData]:
        """Return training and validation sets.

        Data sets are taken as they are; their model keeps the reference energies that it has.
        """
        given = self.settings.data
        train = given.train if train is None else train
        valid = given.valid if valid is None else valid
        if train is None:
            raise ConfigError("no training data; give fit(..., train=...), or data.train")
        if isinstance(train, TrainingData) and isinstance(valid, TrainingData):
            if isinstance(train, StructureData):
                self.backbone.labels = train.labels
            return train, valid
        if isinstance(train, TrainingData) or isinstance(valid, TrainingData):
            raise InputError("training and validation data are two data sets, or neither is one")
        backbone = atomistic(self.backbone)
        backbone.labels = self.labels
        if not given.stream:
            sets = self._in_memory(train, valid)
        elif isinstance(train, str | Path) and isinstance(valid, str | Path):
            sets = self._data(XyzFrames(train), train), self._data(XyzFrames(valid), valid)
        else:
            raise ConfigError("data.stream needs files in data.train and data.valid")
        warn_of_labels(sets[0].structures, backbone.labels)
        set_reference_energies(backbone, sets[0], self.settings)
        return sets

    def replay(self, replay: Data | None) -> TrainingData | None:
        """Return the replay set; its energies are shifted to those of a released model.

        The folder keeps by how much: at a resumption the model is no longer that of the start.
        """
        replay = self.settings.data.replay if replay is None else replay
        if replay is None or isinstance(replay, TrainingData):
            return replay
        structures, name = self._read(replay, "replay")
        fits = self.settings.data.reference_energies == "fit" and "energy" in self.quantities
        if not (fits and isinstance(self.backbone, ForeignBackbone)):
            return self._data(structures, name)
        path = self.run.path / "replay.json"
        if self.resume and path.exists():
            shift = json.loads(path.read_text())
        else:
            fitted = unexplained_energies(self.backbone, structures, self.labels).by_number()
            shift = {chemical_symbols[number]: energy for number, energy in fitted.items()}
            write_json(path, shift)
        structures = moved(structures, shift, self.quantities, self.labels)
        return self._data(structures, name, labels=Labels())

    def _in_memory(self, train: Any, valid: Any) -> tuple[StructureData, StructureData]:
        """Read training and validation structures, or set a fraction of the former aside."""
        structures, name = self._read(train, "training")
        if not isinstance(valid, float):
            return self._data(structures, name), self._data(*self._read(valid, "validation"))
        split, path = self._split(structures, valid), self.run.path / "split.json"
        if self.resume and path.exists() and Split.load(path) != split:
            raise ConfigError(
                f"cannot resume {self.run.path}: the structures are not those that it began with, "
                "and would be split in another way; use the same ones or a new folder"
            )
        split.save(path)
        first, second = (
            self._data([structures[k] for k in frames], name, frames=frames)
            for frames in (split.train, split.valid)
        )
        return first, second

    def _read(self, data: Any, kind: str) -> tuple[list[Atoms], str]:
        """Return checked structures, and their name in messages."""
        if isinstance(data, str | Path):
            return check_structures(read_structures(data), data, labels=self.labels), str(data)
        return check_structures(data, labels=self.labels), f"{kind} structures"

    def _data(self, structures: Any, source: str | Path, **options: Any) -> StructureData:
        options = {"quantities": self.quantities, "labels": self.labels, **options}
        graph_of, dtype = atomistic(self.backbone).graph_of, DTYPES[self.settings.training.dtype]
        return StructureData(structures, graph_of, source=source, dtype=dtype, **options)

    def _split(self, structures: Sequence[Atoms], fraction: float) -> Split:
        """Set a fraction aside, at random or by whole groups."""
        key, seed = self.settings.data.group_key, self.settings.seed
        if key is None:
            split = random_split(len(structures), fraction, seed)
        else:
            for frame, atoms in enumerate(structures):
                if key not in atoms.info:
                    raise InputError(f"frame {frame} has no {key!r} in its info (data.group_key)")
            split = group_split([str(atoms.info[key]) for atoms in structures], fraction, seed)
        if not split.valid:
            raise ConfigError(
                f"data.valid={fraction:g} sets none of {len(structures)} structures aside to "
                "validate on; give a larger fraction, or other structures"
            )
        return split
