"""Predict a file of any length into another, as it is read; what is interrupted can go on.

Frames are appended, batch by batch and synchronised with the disk, to OUTPUT.part, which takes the
place of OUTPUT when it is complete. Batches depend on the structures alone, so a prediction that
goes on after its last whole batch ends with the bytes of one that was never interrupted.
"""

import io
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import ase.io

from blips.data.labels import Labels, available
from blips.data.structures import XYZ_SUFFIXES, batches_of, iter_checked, iter_structures
from blips.errors import InputError
from blips.files import writing
from blips.prediction import Model, Prediction, read_back
from blips.progress import track


@dataclass
class Done:
    """What a prediction of a file was: the first batch, and numbers of structures."""

    example: Prediction
    structures: int
    kept: int  # from the run that was interrupted
    labelled: int


def predict_file(
    potential: Model,
    source: Path,
    output: Path,
    *,
    resume: bool = False,
    labels: Labels | None = None,
    **options: Any,
) -> Done:
    """Predict the structures of one file into another (extxyz); memory does not grow with them.

    Labels of the structures stay in it. To resume is to keep the whole batches of a run that was
    interrupted. The other options are those of `potential.predict`.
    """
    part = _part_of(output, source, resume)
    elements = getattr(potential.backbone, "trained_numbers", None)
    checked = iter_checked(iter_structures(source), source, elements=elements, labels=labels)
    sizes, labelled = list[tuple[int, int]](), 0  # structures and lines of the batches
    for batch in batches_of(track(checked, "reading")):
        sizes.append((len(batch), sum(len(atoms) + 2 for atoms in batch)))
        labelled += sum(bool(available(atoms, labels)) for atoms in batch)
    total, last = sum(count for count, _ in sizes), 0
    done: Done | None = None
    with writing(output):
        kept = _cut_to_whole_batches(part, sizes) if part.exists() else 0
        for batch in track(batches_of(iter_structures(source)), "predicting", total, len):
            last += len(batch)
            if last <= kept and done is not None:
                continue
            prediction = potential.predict(batch, **options)
            frames, text = prediction.to_atoms(batch, beside=labels or Labels()), io.StringIO()
            ase.io.write(text, frames, format="extxyz")
            new = text.getvalue().encode()
            with part.open("a+b") as file:
                file.seek(0)
                if last > kept:
                    file.write(new)  # at the end, wherever the file was read
                    file.flush()
                    os.fsync(file.fileno())
                elif file.read(len(new)) != new:
                    raise InputError(
                        f"{part} was made with another model, other structures, settings or "
                        "another machine; give the same ones, or remove it to start anew"
                    )
            done = done or Done(prediction, total, kept, labelled)
        if done is None:
            raise InputError(f"{source} has no structures; expected at least one")
        os.replace(part, output)
    return done


def summary_of(path: Path) -> dict[str, list[float | bool]]:
    """Summarise each structure of a predicted file, as `Prediction.summary` does."""
    found: dict[str, list[float | bool]] = {}
    for atoms in iter_structures(path):
        for name, values in read_back(atoms).summary().items():
            found.setdefault(name, []).extend(values)
    return found


def _part_of(output: Path, source: Path, resume: bool) -> Path:
    """Return the partial output file, after making sure that it can be written."""
    if output.suffix not in ("", *XYZ_SUFFIXES):
        raise InputError(f"{output}: what is written is extended xyz; name it .extxyz or .xyz")
    if output.exists() and source.exists() and output.samefile(source):
        raise InputError(f"{output} holds the structures to predict; give another file to write")
    if not output.parent.is_dir():
        raise InputError(f"{output}: the folder {output.parent} does not exist; create it first")
    part = output.with_name(f"{output.name}.part")
    if part.exists() and not resume:
        raise InputError(
            f"{part} is of a prediction that was interrupted; continue it with --resume, or remove "
            "it to start anew"
        )
    return part


def _cut_to_whole_batches(part: Path, sizes: list[tuple[int, int]]) -> int:
    """Cut what was written to batches of these sizes; return the number of structures left."""
    kept = end = 0
    with part.open("rb+") as file:
        for structures, lines in sizes:
            written = list(islice(file, lines))
            if len(written) < lines or not written[-1].endswith(b"\n"):
                break
            kept, end = kept + structures, file.tell()
        file.truncate(end)
    return kept
