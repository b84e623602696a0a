"""What a report is about: a model, its training run, and structures, labelled or not.

| given | model | structures, unless others are given |
|---|---|---|
| a folder of `blips train` | the calibrated, conditioned or best one | those it validated on |
| a model file | itself | those of the run that it lies in, if any |
| a file that `blips predict` wrote | none: the predictions are in the file | its own |
"""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ase import Atoms

from blips.config import RunConfig, load_config
from blips.data.splits import Split
from blips.data.structures import check_structures, read_structures
from blips.errors import InputError
from blips.prediction import Prediction, read_back
from blips.train.released import is_released_name

MODELS = ("calibrated.safetensors", "conditioned.safetensors", "best.safetensors")


@dataclass(frozen=True)
class Sources:
    """What there is to report on."""

    title: str
    model: Path | None  # None where predictions are read
    structures: dict[str, list[Atoms]]  # by the name of their set; may be empty
    predictions: Mapping[str, Prediction] = field(default_factory=dict)  # where there is no model
    config: str = ""  # text of the run's config.yaml, empty where there is none
    environment: Mapping[str, Any] = field(default_factory=dict)  # versions, platform, command
    history: Sequence[Mapping[str, float]] = ()  # one row per epoch
    note: str = ""  # what is missing, for the reader


def find_sources(target: str | Path, structures: Sequence[str | Path] = ()) -> Sources:
    """Find everything that a report needs; `structures` are in place of the target's own."""
    target = Path(target)
    given = {Path(path).stem: _read(Path(path)) for path in structures}
    if is_released_name(str(target)):
        note = "A released model; --structures test.extxyz adds predictions."
        return Sources(f"Model {target}", target, given, note="" if given else note)
    if not target.exists():
        raise InputError(
            f"{target} is not there; give a run's folder (runs/blips), a model (best.safetensors, "
            "chgnet) or a file that blips predict wrote (predicted.extxyz)"
        )
    if target.is_file() and target.suffix != ".safetensors":
        return _of_predictions(target, given)
    folder, model = (target, _model_in(target)) if target.is_dir() else (target.parent, target)
    file = folder / "config.yaml"
    config = load_config(file) if file.is_file() else None
    valid, note = (given, "") if given else _validation(folder, config)
    return Sources(
        title=f"Run {folder.resolve().name}" if target.is_dir() else f"Model {target.name}",
        model=model,
        structures=valid,
        config="" if config is None else file.read_text(),
        environment=_recorded(folder / "environment.json", lambda text: dict(json.loads(text)), {}),
        history=_recorded(folder / "metrics.csv", _history, []),
        note=note,
    )


def _model_in(folder: Path) -> Path:
    for name in MODELS:
        if (folder / name).is_file():
            return folder / name
    raise InputError(
        f"{folder} has no {MODELS[-1]}; is it the folder of a blips run, "
        "and has the run finished an epoch?"
    )


def _of_predictions(file: Path, given: dict[str, list[Atoms]]) -> Sources:
    """Take predictions from a file, and labels from it or from another with the same structures."""
    frames = _read(file)
    try:
        read = [read_back(atoms) for atoms in frames]
    except (ValueError, TypeError) as error:
        raise InputError(f"{file}: no file that blips predict wrote ({error})") from None
    needed = ("energy", "energy_std", "forces", "forces_std")
    if any(getattr(one, name) is None for one in read for name in needed):
        raise InputError(
            f"{file} has structures with no forces_uncertainty, no energy_uncertainty or nothing "
            "predicted; give a model (best.safetensors), a run's folder, or a file that blips "
            "predict wrote"
        )
    labelled = next(iter(given.values())) if given else [_labels_alone(atoms) for atoms in frames]
    if [a.numbers.tolist() for a in labelled] != [a.numbers.tolist() for a in frames]:
        raise InputError(f"the labelled structures are not those of {file}, in this order")
    return Sources(
        title=f"Predictions {file.name}",
        model=None,
        structures={file.stem: labelled},
        predictions={file.stem: Prediction.join(read)},
    )


def _labels_alone(atoms: Atoms) -> Atoms:
    """Copy a predicted structure with its labels, which lie beside `predicted_*`, if any."""
    copy, results = atoms.copy(), getattr(atoms.calc, "results", {})
    for name, place in (("energy", copy.info), ("forces", copy.arrays)):
        if name in results and f"predicted_{name}" in place:
            place[name] = results[name]
    return copy


def _validation(folder: Path, config: RunConfig | None) -> tuple[dict[str, list[Atoms]], str]:
    """Return the structures that a run validated on, where its configuration says which."""
    if config is None or config.data.train is None:
        return {}, (
            "There is no run that says which structures to predict; --structures test.extxyz adds "
            "predictions."
        )
    valid = config.data.valid
    file = Path(valid if isinstance(valid, str) else config.data.train)
    if not file.exists():
        return {}, f"The run's structures, {file}, are not there any more."
    structures = _read(file)
    if not isinstance(valid, str):
        split = Split.load(folder / "split.json")
        if split.count != len(structures):
            return {}, f"{file} is not the file of the run any more: its length has changed."
        structures = [structures[index] for index in split.valid]
    return {"validation": structures}, (
        "These structures chose the checkpoint; a test set (--structures) is a fairer judge."
    )


def _read(path: Path) -> list[Atoms]:
    return check_structures(read_structures(path), path)


def _recorded(path: Path, parse: Callable[[str], Any], otherwise: Any) -> Any:
    """Parse a file that a run has written, if it is there."""
    try:
        return parse(path.read_text()) if path.is_file() else otherwise
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path}: not what a run has written ({error}); restore or remove it"
        ) from None


def _history(text: str) -> list[dict[str, float]]:
    rows = csv.DictReader(text.splitlines())
    return [{key: float(value) for key, value in row.items() if value} for row in rows]
