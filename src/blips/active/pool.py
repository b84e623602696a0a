"""Candidates of a round, in chunks of fixed numbers: trajectories' frames, or a pool that streams.

A pool is never in memory as a whole: an xyz file is read frame by frame by its offsets (8 bytes
each), other formats one frame after the other.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ase import Atoms

from blips.active.store import CampaignStore
from blips.data.structures import XYZ_SUFFIXES, iter_structures, read_xyz_frame, xyz_frame_offsets
from blips.errors import InputError

Candidate = tuple[int, Atoms, dict[str, Any]]  # number, structure, origin


class Candidates(Protocol):
    """Numbered candidates."""

    def chunks(self, size: int, skip: set[int]) -> Iterator[tuple[int, list[Candidate]]]:
        """Chunks with their numbers, but for those to skip."""
        ...

    def fetch(self, numbers: Sequence[int]) -> list[Candidate]:
        """Candidates with these numbers, in this order."""
        ...


class FrameCandidates:
    """Frames of the trajectories of a round."""

    def __init__(self, store: CampaignStore, round: int) -> None:
        self.store, self.round = store, round

    def chunks(self, size: int, skip: set[int]) -> Iterator[tuple[int, list[Candidate]]]:
        """Chunks with their numbers, but for those to skip."""
        frames = list(self.store.frames(self.round))
        for chunk, first in enumerate(range(0, len(frames), size)):
            if chunk not in skip:
                part = enumerate(frames[first : first + size], start=first)
                yield chunk, [(number, atoms, origin) for number, (atoms, origin) in part]

    def fetch(self, numbers: Sequence[int]) -> list[Candidate]:
        """Candidates with these numbers, in this order."""
        frames = list(self.store.frames(self.round))
        return [(number, *frames[number]) for number in numbers]


class PoolCandidates:
    """Structures of a file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offsets: Any = None
        if self.path.suffix.lower() in XYZ_SUFFIXES:
            self._offsets = xyz_frame_offsets(self.path)

    def chunks(self, size: int, skip: set[int]) -> Iterator[tuple[int, list[Candidate]]]:
        """Chunks with their numbers, but for those to skip."""
        if self._offsets is None:
            structures = iter_structures(self.path)
            chunk = 0
            while part := list(islice(structures, size)):
                if chunk not in skip:
                    numbered = enumerate(part, start=chunk * size)
                    yield chunk, [(n, atoms, self._origin(n)) for n, atoms in numbered]
                chunk += 1
            return
        total = len(self._offsets) - 1
        for chunk, first in enumerate(range(0, total, size)):
            if chunk not in skip:
                yield chunk, self.fetch(range(first, min(first + size, total)))

    def fetch(self, numbers: Sequence[int]) -> list[Candidate]:
        """Candidates with these numbers, in this order."""
        if self._offsets is not None:
            with self.path.open("rb") as file:
                read = [read_xyz_frame(file, self.path, n, self._offsets) for n in numbers]
            return [(n, atoms, self._origin(n)) for n, atoms in zip(numbers, read, strict=True)]
        wanted, found = set(numbers), {}
        for number, atoms in enumerate(iter_structures(self.path)):
            if number in wanted:
                found[number] = atoms
        if missing := wanted - found.keys():
            raise InputError(f"{self.path} lost frames {sorted(missing)}; did it change?")
        return [(n, found[n], self._origin(n)) for n in numbers]

    def _origin(self, number: int) -> dict[str, Any]:
        return {"pool": self.path.name, "frame": number}
