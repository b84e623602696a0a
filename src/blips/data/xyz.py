"""Frames of (extended) xyz files by their place in the file."""

import io
import re
from itertools import islice
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms

from blips.errors import InputError

MOST_DIGITS = 15  # of the number of atoms
XYZ_SUFFIXES = (".xyz", ".extxyz")


def xyz_frame_offsets(path: Path) -> np.ndarray:
    """Bytes at which the frames of an (extended) xyz file begin, and the last ends, [F + 1]."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    offsets, position = [], 0
    with path.open("rb") as file:
        for header in file:
            if not header.strip() or (offsets and header.lstrip().startswith(b"VEC")):
                position += len(header)
                continue
            where = f"{path}, frame {len(offsets)}"
            if not header.strip().isdigit() or len(header.strip()) > MOST_DIGITS:
                found = header[:60].decode(errors="replace").strip()
                raise InputError(
                    f"{where}: expected the number of atoms, found {found!r}; the file is not "
                    "xyz, or the frame before has more lines than it says"
                )
            num_atoms = int(header)
            lines = list(islice(file, num_atoms + 1))  # the comment and the atoms
            if len(lines) < num_atoms + 1 or not (num_atoms == 0 or lines[-1].strip()):
                atoms = sum(bool(line.strip()) for line in lines[1:])
                raise InputError(
                    f"{where}: ends after {atoms} of {num_atoms} atoms; the file was cut off "
                    "(remove the frame or write the file again)"
                )
            offsets.append(position)
            position += len(header) + sum(map(len, lines))
    if not offsets:
        raise InputError(f"{path}: no frames; expected an xyz file with at least one")
    return np.array([*offsets, position])


def read_xyz_frame(file: io.BufferedReader, path: Path, frame: int, offsets: np.ndarray) -> Atoms:
    """Frame `frame` of an open xyz file."""
    file.seek(int(offsets[frame]))
    content = file.read(int(offsets[frame + 1] - offsets[frame]))
    columns = re.findall(rb":[A-Za-z]:\s*(\d+)", content)
    if any(len(count) > 4 for count in columns):  # ASE would make room for all of them
        raise InputError(f"{path}, frame {frame}: Properties has absurdly many columns")
    try:
        return ase.io.read(io.StringIO(content.decode()), format="extxyz", index=0)  # type: ignore[return-value]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{path}, frame {frame}: cannot be read ({reason})") from error
