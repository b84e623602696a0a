"""Save frames of simulations for labelling: with their std, not too often, no two alike.

Two frames of the same atoms are near-duplicates if no distance of an atom to one of its nearest
neighbours differs by more than `distinct` (A), which no rotation or translation changes.
"""

import io
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms

from blips.data.neighbours import search
from blips.errors import refuse_below
from blips.sim.calculator import snapshot
from blips.sim.guard import SEARCH_RADIUS, Finding

NEAREST = 6  # neighbours of an atom whose distances are compared


class FrameSaver:
    """Keep the frames that a guard found worth a label in `frames`, and in an extxyz file if given.

    Saved frames of one walker are `every` steps apart at least; `distinct` (A) is explained above,
    and 0 keeps near-duplicates.
    """

    def __init__(
        self, file: str | Path | None = None, *, every: int = 1, distinct: float = 0.1
    ) -> None:
        refuse_below(1, every=every)
        refuse_below(0, distinct=distinct)
        self.file, self.every, self.distinct = file, every, distinct
        self.frames: list[Atoms] = []
        self._last: dict[int, int] = {}  # walker -> step of its last saved frame
        self._seen: dict[bytes, list[np.ndarray]] = {}  # atomic numbers -> distances of frames

    def offer(
        self,
        atoms: Atoms,
        step: int,
        findings: list[Finding],
        *,
        walker: int = 0,
        last: bool = False,
    ) -> bool:
        """Save a frame with its results and findings, if it is due and new; say whether it was.

        `walker` is the number of one of several simulations; its `last` frame is always saved.
        """
        due = step - self._last.get(walker, step - self.every) >= self.every
        if not last and not (due and self._is_new(atoms)):
            return False
        frame = snapshot(atoms)
        frame.info |= {"step": step, "guard": "; ".join(finding.text for finding in findings)}
        self.frames.append(frame)
        self._last[walker] = step
        if np.isfinite(atoms.positions).all():
            self._seen.setdefault(atoms.numbers.tobytes(), []).append(nearest_distances(atoms))
        if self.file is not None:
            append_frame(self.file, frame)
        return True

    def _is_new(self, atoms: Atoms) -> bool:
        seen = self._seen.get(atoms.numbers.tobytes())
        if not seen or self.distinct == 0:
            return True
        differences = np.abs(np.stack(seen) - nearest_distances(atoms))  # [frames, N, 6]
        return bool(differences.max(axis=(1, 2)).min() > self.distinct)


def nearest_distances(atoms: Atoms) -> np.ndarray:
    """Return the distances of each atom to its nearest neighbours, in order, [N, 6] A.

    Places without a neighbour within 6 A hold 6 A.
    """
    first, distance = search(atoms, SEARCH_RADIUS, "id")
    order = np.lexsort((distance, first))
    first, distance = first[order].astype(int), distance[order]
    place = np.arange(len(first)) - np.searchsorted(first, first)  # within its atom
    near = place < NEAREST
    found = np.full((len(atoms), NEAREST), SEARCH_RADIUS)
    found[first[near], place[near]] = distance[near]
    return found


def append_frame(file: str | Path, frame: Atoms) -> None:
    """Append a structure to an extxyz file in one piece, which a kill cannot cut in two."""
    text = io.StringIO()
    ase.io.write(text, frame, format="extxyz")
    with Path(file).open("a") as opened:
        opened.write(text.getvalue())
