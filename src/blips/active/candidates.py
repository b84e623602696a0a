"""Candidates of a round by number: trajectories' frames, or a pool.

A pool in an xyz file is never in memory as a whole: it is read frame by frame by its offsets (8
bytes each). Other formats are read at once.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ase import Atoms

from blips.active.store import CampaignStore
from blips.data.structures import XYZ_SUFFIXES, XyzFrames, read_structures

Candidate = tuple[int, Atoms, dict[str, Any]]  # number, structure, origin


class Candidates:
    """Numbered candidates; `read` gives structures and origins of some numbers, in their order."""

    def __init__(
        self, total: int, read: Callable[[Sequence[int]], list[tuple[Atoms, dict[str, Any]]]]
    ) -> None:
        self.total, self._read = total, read

    @classmethod
    def of_round(cls, store: CampaignStore, round: int) -> "Candidates":
        """Return the frames of the trajectories of a round."""
        frames = store.frames(round)
        return cls(len(frames), lambda numbers: [frames[n] for n in numbers])

    @classmethod
    def of_file(cls, path: str | Path) -> "Candidates":
        """Return the structures of a file."""
        path = Path(path)
        xyz = path.suffix.lower() in XYZ_SUFFIXES
        structures = XyzFrames(path) if xyz else read_structures(path)

        def read(numbers: Sequence[int]) -> list[tuple[Atoms, dict[str, Any]]]:
            return [(structures[n], {"pool": path.name, "frame": n}) for n in numbers]

        return cls(len(structures), read)

    def chunks(self, size: int, skip: set[int]) -> Iterator[tuple[int, list[Candidate]]]:
        """Yield the chunks with their numbers, except those to skip."""
        for chunk, first in enumerate(range(0, self.total, size)):
            if chunk not in skip:
                yield chunk, self.fetch(range(first, min(first + size, self.total)))

    def fetch(self, numbers: Sequence[int]) -> list[Candidate]:
        """Return the candidates with these numbers, in this order."""
        found = self._read(numbers)
        return [(n, atoms, origin) for n, (atoms, origin) in zip(numbers, found, strict=True)]
