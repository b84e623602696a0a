"""What a report is about: the model, its training run, and labelled structures.

A folder of `blips train` has them in its configuration: the validation structures, unless others
are given. Any other folder can say what is where in a file `report.json`,

    {"title": "...", "model": "model.safetensors", "run": "training",
     "labelled": {"test": "test.extxyz"}}

with paths relative to the folder; `blips demo` writes one.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ase import Atoms

from blips.config import RunConfig, load_config
from blips.data.labels import Labels
from blips.data.splits import Split
from blips.data.structures import check_structures, read_structures
from blips.errors import InputError
from blips.files import write_atomically
from blips.train.run import RunFolder

MANIFEST = "report.json"


@dataclass(frozen=True)
class Sources:
    """What there is to report on.

    Attributes:
        title: of the report.
        model: file of the model.
        labelled: structures by the name of their set; may be empty.
        labels: names and units of their labels.
        config: text of the run's config.yaml, empty where there is none.
        environment: versions, platform and command of the run.
        history: one row per epoch.
        notes: what is missing, for the reader.
    """

    title: str
    model: Path
    labelled: dict[str, list[Atoms]]
    labels: Labels = field(default_factory=Labels)
    config: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, float]] = ()
    notes: tuple[str, ...] = ()


def write_manifest(
    folder: str | Path, title: str, model: str, run: str, labelled: Mapping[str, str]
) -> Path:
    """Say what a report on this folder is about; paths relative to it."""
    path = Path(folder) / MANIFEST
    content = {"title": title, "model": model, "run": run, "labelled": dict(labelled)}
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def find_sources(folder: str | Path, structures: Sequence[str | Path] = ()) -> Sources:
    """Everything that a report on a folder needs.

    Args:
        folder: of a training run, or one with a `report.json`.
        structures: files of labelled structures, instead of those that the folder names.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the folder of a run, such as runs/blips")
    named = _manifest(folder) if (folder / MANIFEST).is_file() else None
    run = RunFolder(folder / named["run"] if named else folder)
    config = load_config(run.config_file) if run.config_file.is_file() else None
    model = folder / named["model"] if named else run.best
    if not model.is_file():
        raise InputError(
            f"{folder} has neither {MANIFEST} nor {model.name}; is it the folder of a blips run, "
            "and has the run finished an epoch?"
        )
    labels = Labels() if config is None else Labels(**config.data.labels.model_dump())
    notes: tuple[str, ...] = ()
    if structures:
        labelled = {Path(path).stem: _read(Path(path)) for path in structures}
    elif named:
        labelled = {name: _read(folder / path) for name, path in named["labelled"].items()}
        labels = Labels()
    else:
        labelled, notes = _validation(run, config)
    return Sources(
        title=named["title"] if named else f"Run {folder.resolve().name}",
        model=model,
        labelled=labelled,
        labels=labels,
        config=run.config_file.read_text() if config is not None else "",
        environment=_json(run.path / "environment.json"),
        history=_history(run.path / "metrics.csv"),
        notes=notes,
    )


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    content = _json(path)
    labelled = content.get("labelled")
    strings = [content.get(key) for key in ("title", "model", "run")]
    strings += list(labelled.values()) if isinstance(labelled, dict) else [None]
    if not all(isinstance(text, str) for text in strings):
        raise InputError(
            f'{path}: expected {{"title": ..., "model": ..., "run": ..., "labelled": '
            "{name: file, ...}}"
        )
    return dict(content)


def _validation(
    run: RunFolder, config: RunConfig | None
) -> tuple[dict[str, list[Atoms]], tuple[str, ...]]:
    """The structures that the run validated on, where its configuration says which."""
    missing = (
        "The run was not given files, so its validation structures are not known; "
        "blips report RUN --structures test.extxyz adds predictions.",
    )
    if config is None or config.data.train is None:
        return {}, missing
    valid = config.data.valid
    file = Path(valid if isinstance(valid, str) else config.data.train)
    if not file.exists():
        return {}, (f"The run's structures, {file}, are not there any more.",)
    structures = _read(file)
    if not isinstance(valid, str):
        split = Split.load(run.path / "split.json")
        if split.count != len(structures):
            return {}, (f"{file} is not the file of the run any more: its length has changed.",)
        structures = [structures[index] for index in split.valid]
    return {"validation": structures}, (
        "These structures chose the checkpoint; a test set (--structures) is a fairer judge.",
    )


def _read(path: Path) -> list[Atoms]:
    return check_structures(read_structures(path), path)


def _json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(
            f"{path}: cannot be read as JSON ({error}); restore or remove it"
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object; restore or remove it")
    return content


def _history(path: Path) -> list[dict[str, float]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        return [{key: float(value) for key, value in row.items() if value} for row in rows]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path}: not the metrics of a run ({error})") from None
