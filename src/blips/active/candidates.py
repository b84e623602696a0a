"""Candidates of a round by number: trajectories' frames, or a pool.

A pool in an xyz file is never in memory as a whole: it is read frame by frame by its offsets (8
bytes each). Other formats are read at once.
"""

from pathlib import Path
from typing import Any

from ase import Atoms

from blips.data.structures import XYZ_SUFFIXES, XyzFrames, read_structures

Candidate = tuple[Atoms, dict[str, Any]]  # structure, origin


class Pool:
    """The structures of a file, with their places in it."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.name = path.name
        xyz = path.suffix.lower() in XYZ_SUFFIXES
        self.structures = XyzFrames(path) if xyz else read_structures(path)

    def __len__(self) -> int:
        return len(self.structures)

    def __getitem__(self, number: int) -> Candidate:
        return self.structures[number], {"pool": self.name, "frame": number}


Candidates = list[Candidate] | Pool
