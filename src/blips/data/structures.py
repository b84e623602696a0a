"""Structures in and out of files: reading, checking and writing.

Frames count from 0, as in ASE. Every complaint names the file and the frame.
"""

import io
import lzma
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import ase.io
import numpy as np
from ase import Atoms
from ase.data import chemical_symbols
from ase.io.formats import get_compression, open_with_compression
from ase.utils import string2index

from blips.data.labels import Labels, available, extract, found_as_mace
from blips.data.neighbours import search
from blips.errors import InputError

MINIMUM_DISTANCE = 0.1  # A
BATCH_ATOMS = 512  # of a batch that is predicted
MOST_DIGITS = 15  # of the number of atoms in an xyz file
XYZ_SUFFIXES = (".xyz", ".extxyz")
LONGEST_LINE = 2**24  # bytes
SEARCH_CUTOFF = 3.0  # A; a neighbour search within MINIMUM_DISTANCE would make needless cells
MAX_PROBLEMS = 10
MOST_NAMED = 20  # elements

Structures = str | Path | Atoms | Iterable[Atoms]  # a file, one, or many


def batches_of(structures: Iterable[Atoms], most_atoms: int = BATCH_ATOMS) -> Iterator[list[Atoms]]:
    """Yield batches of at most so many atoms together, or single structures."""
    batch: list[Atoms] = []
    size = 0  # atoms
    for atoms in structures:
        if batch and size + len(atoms) > most_atoms:
            yield batch
            batch, size = [], 0
        batch.append(atoms)
        size += len(atoms)
    if batch:
        yield batch


def iter_given(structures: Structures) -> Iterable[Atoms]:
    """Return structures as they are; those of a file are read and checked one by one."""
    if isinstance(structures, str | Path):
        return iter_checked(iter_structures(structures), structures)
    return [structures] if isinstance(structures, Atoms) else structures


def read_structures(path: str | Path, index: str | int | slice = ":") -> list[Atoms]:
    """Read the structures of any file that ASE reads (extxyz, traj, db, OUTCAR, ...).

    `index` says which frames, as in ASE: ":" (all), "::10", -1, ...
    """
    structures = list(iter_structures(path, index))
    if not structures:
        raise InputError(f"{path}: no structures at index {index!r}; expected at least one")
    return structures


def iter_structures(path: str | Path, index: str | int | slice = ":") -> Iterator[Atoms]:
    """Yield structures as `read_structures` does, one frame at a time."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if path.is_dir() and path.suffix != ".bundle":
        raise InputError(f"{path} is a folder; give a file of structures in it")
    if path.is_file() and path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty; expected structures")
    wanted = string2index(index) if isinstance(index, str) else index
    if not isinstance(wanted, int | slice):
        raise InputError(f"{path}: index {index!r} is not a number or a slice such as '::10'")
    unpacked, _ = get_compression(str(path))
    xyz = Path(unpacked).suffix.lower() in XYZ_SUFFIXES
    yield from _iter_xyz(path, wanted) if xyz else _iter_any(path, wanted)


def _iter_xyz(path: Path, index: int | slice) -> Iterator[Atoms]:
    """Yield frames by their offsets, so that a damaged one is known by its number."""
    offsets = xyz_frame_offsets(path)
    frames = range(len(offsets) - 1)
    if isinstance(index, int) and not -len(frames) <= index < len(frames):
        raise InputError(f"{path}: no frame {index}; it has {len(frames)}")
    with open_with_compression(str(path), "rb") as file:
        for frame in frames[index] if isinstance(index, slice) else [frames[index]]:
            yield read_xyz_frame(file, path, frame, offsets)


def _iter_any(path: Path, index: int | slice) -> Iterator[Atoms]:
    """Yield frames of any format; those before a damaged one are counted."""
    frame = index.start or 0 if isinstance(index, slice) else index
    try:
        for atoms in ase.io.iread(path, index=index, do_not_split_by_at_sign=True):
            yield atoms  # type: ignore[misc]
            frame += (isinstance(index, slice) and index.step) or 1
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path}, frame {frame}: cannot be read ({reason}); "
            "expected a complete file of a format that ASE knows"
        ) from error


def check_structures(
    structures: Iterable[Atoms],
    source: str | Path = "structures",
    **options: Any,
) -> list[Atoms]:
    """Return the structures, or raise one error with ten problems; options of `iter_checked`."""
    return list(iter_checked(structures, source, **options))


def iter_checked(
    structures: Iterable[Atoms],
    source: str | Path = "structures",
    *,
    elements: Collection[int] | None = None,
    labels: Labels | None = None,
) -> Iterator[Atoms]:
    """Check structures one at a time; raise problems after the last good structure.

    `source` is the file, for messages; `elements` are the atomic numbers that a model knows (None
    allows all). Labels are checked where they are.
    """
    problems: list[str] = []
    frame = -1
    for frame, atoms in enumerate(structures):
        found = _problems(atoms, elements, labels)
        problems += [f"{source}, frame {frame}: {problem}" for problem in found]
        if len(problems) >= MAX_PROBLEMS:
            problems = [*problems[:MAX_PROBLEMS], "... and perhaps more; not checked further"]
            break
        if frame == 0 and (names := found_as_mace(atoms, labels)):
            text = f"{source}: labels are read from {', '.join(names)}, as MACE names them"
            warnings.warn(text, stacklevel=3)
        yield atoms
    if problems:
        raise InputError("unusable structures:\n  " + "\n  ".join(problems))
    if frame < 0:
        raise InputError(f"{source}: no structures; expected at least one")


def _problems(
    atoms: Atoms, elements: Collection[int] | None, labels: Labels | None
) -> Iterator[str]:
    if len(atoms) == 0:
        yield "no atoms"
        return
    allowed = range(1, len(chemical_symbols)) if elements is None else elements
    if unknown := set(atoms.numbers.tolist()).difference(allowed):
        known = "" if elements is None else f"; the model was trained on {_symbols(elements)}"
        yield f"unknown elements {_symbols(unknown)}{known}"
    for check in (lambda: extract(atoms, available(atoms, labels), labels), lambda: _apart(atoms)):
        try:
            check()
        except InputError as error:
            yield str(error)


def _symbols(numbers: Collection[int]) -> str:
    known = range(len(chemical_symbols))
    names = [chemical_symbols[z] if z in known else f"of number {z}" for z in sorted(numbers)]
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} elements"


def _apart(atoms: Atoms) -> None:
    """Raise for atoms that are much too close."""
    first, second, distance = search(atoms, SEARCH_CUTOFF, "ijd")
    if len(distance) and distance.min() < MINIMUM_DISTANCE:
        pair = int(distance.argmin())
        one, other = sorted((first[pair], second[pair]))
        raise InputError(
            f"atoms {one} and {other} are {distance[pair]:.3g} A apart "
            f"(periodic images included), less than {MINIMUM_DISTANCE} A"
        )


def xyz_frame_offsets(path: Path) -> np.ndarray:
    """Return the bytes at which the frames of an xyz file begin, and the last ends, [F + 1]."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with open_with_compression(str(path), "rb") as file:
            offsets = list(_frame_starts(file, path))
    except (EOFError, OSError, lzma.LZMAError) as error:
        raise InputError(f"{path}: damaged ({error}); copy or compress the file again") from None
    if len(offsets) == 1:
        raise InputError(f"{path}: no frames; expected an xyz file with at least one")
    return np.array(offsets)


def _frame_starts(file: IO[bytes], path: Path) -> Iterator[int]:
    """Yield the byte at which each frame begins, before it is read, and that of the end."""
    frame = 0

    def line() -> bytes:
        found = file.readline(LONGEST_LINE)
        if len(found) == LONGEST_LINE:
            raise InputError(
                f"{path}, frame {frame}: a line of more than {LONGEST_LINE // 2**20} MB; "
                "expected an xyz file, one atom a line"
            )
        return found

    start = file.tell()
    while header := line():
        count = header.strip()
        if count and not (frame and count.startswith(b"VEC")):
            yield start
            if not count.isdigit() or len(count) > MOST_DIGITS:
                raise InputError(
                    f"{path}, frame {frame}: expected the number of atoms, found "
                    f"{count[:60].decode(errors='replace')!r}; the file is not "
                    "xyz, or the frame before has more lines than it says"
                )
            num_atoms = int(count)
            line()  # the comment
            for atom in range(num_atoms):
                if not (found := line()) or (atom == num_atoms - 1 and not found.strip()):
                    raise InputError(
                        f"{path}, frame {frame}: ends after {atom} of {num_atoms} atoms; the file "
                        "was cut off (remove the frame or write the file again)"
                    )
            frame += 1
        start = file.tell()
    yield start


def read_xyz_frame(file: IO[bytes], path: Path, frame: int, offsets: np.ndarray) -> Atoms:
    """Read frame `frame` of an open xyz file."""
    file.seek(int(offsets[frame]))
    content = file.read(int(offsets[frame + 1] - offsets[frame]))
    comment = content.split(b"\n", 2)[1] if b"\n" in content else b""
    names = re.findall(rb"(?:^|\s)([^\s=]+)=", re.sub(rb'"[^"]*"', b"", comment))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1).decode(errors="replace")
        raise InputError(f"{path}, frame {frame}: {twice} is there twice; remove one")
    columns = re.findall(rb":[A-Za-z]:\s*(\d+)", content)
    if any(len(count) > 4 for count in columns):  # ASE would make room for all of them
        raise InputError(f"{path}, frame {frame}: Properties has absurdly many columns")
    try:
        return ase.io.read(io.StringIO(content.decode()), format="extxyz", index=0)  # type: ignore[return-value]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{path}, frame {frame}: cannot be read ({reason})") from error


class XyzFrames:
    """The structures of an xyz file, scanned once for their beginnings, read when asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if get_compression(str(path))[1]:
            raise InputError(f"{path}: compressed files cannot be streamed; unpack it first")
        self._offsets = xyz_frame_offsets(self.path)
        self._stamp = self._file_stamp()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Atoms:
        if self._file_stamp() != self._stamp:
            raise InputError(f"{self.path}: changed while it was in use; start again")
        with self.path.open("rb") as file:
            return read_xyz_frame(file, self.path, index, self._offsets)

    def _file_stamp(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns
