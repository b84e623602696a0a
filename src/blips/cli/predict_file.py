"""Predict a file of any length into another, as it is read; what is interrupted can go on.

Frames are appended, batch by batch and synchronised with the disk, to OUTPUT.part, which takes the
place of OUTPUT when it is complete. Batches depend on the structures alone, so a prediction that
goes on after its last whole batch ends with the bytes of one that was never interrupted.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ase.io
import numpy as np
from ase import Atoms

from blips.cli.app import known_elements
from blips.data.labels import Labels, available
from blips.data.structures import (
    XYZ_SUFFIXES,
    batches_of,
    iter_checked,
    iter_structures,
    whole_xyz_frames,
)
from blips.errors import InputError
from blips.files import writing
from blips.prediction import Model, Prediction, read_back
from blips.progress import track


@dataclass
class Done:
    """What a prediction of a file was: numbers of structures, and the first batch."""

    example: Prediction
    structures: int = 0
    kept: int = 0  # from the run that was interrupted
    labelled: int = 0


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
    elements = known_elements(potential.backbone)
    checked = iter_checked(iter_structures(source), source, elements=elements, labels=labels)
    total = sum(1 for _ in track(checked, "reading"))
    offsets = whole_xyz_frames(part) if part.exists() else np.zeros(1, dtype=int)
    batches = batches_of(iter_structures(source))
    done: Done | None = None
    first = position = 0  # structures done, and bytes that are theirs
    with writing(output), _opened(part) as file:
        for batch in track(batches, "predicting", total, len):
            last = first + len(batch)
            there = last < len(offsets)
            if done is None or not there:
                prediction = potential.predict(batch, **options)
                done = done or Done(prediction)
                text = _text(prediction.to_atoms(batch, beside=labels or Labels()))
                if there:
                    _check_same(file, text, part)
                else:
                    _write(file, position, text)
            done.kept += len(batch) if there else 0
            done.labelled += sum(bool(available(atoms, labels)) for atoms in batch)
            first, position = last, int(offsets[last]) if there else file.tell()
        file.truncate(position)
    if done is None:
        raise InputError(f"{source} has no structures; expected at least one")
    os.replace(part, output)
    done.structures = first
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


@contextmanager
def _opened(part: Path) -> Iterator[BinaryIO]:
    """Open a partial file, and remove it again if nothing is in it."""
    with part.open("r+b" if part.exists() else "wb") as file:
        try:
            yield file
        finally:
            if file.seek(0, os.SEEK_END) == 0:
                part.unlink()


def _text(frames: list[Atoms]) -> bytes:
    text = io.StringIO()
    ase.io.write(text, frames, format="extxyz")
    return text.getvalue().encode()


def _check_same(file: BinaryIO, text: bytes, part: Path) -> None:
    """Refuse to go on where the first batch does not come out as it did before."""
    file.seek(0)
    if file.read(len(text)) != text:
        raise InputError(
            f"{part} was made with another model, other structures, settings or another machine; "
            "give the same ones, or remove it to start anew"
        )


def _write(file: BinaryIO, position: int, text: bytes) -> None:
    """Append whole frames and flush them to disk."""
    file.seek(position)
    file.truncate()
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
