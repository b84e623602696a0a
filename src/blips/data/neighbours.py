"""Find the neighbours of atoms, anew or from a list kept between the steps of a simulation.

Letters: N atoms, E directed edges (pairs within the cutoff). Edges are sorted by receiver, sender
and cell shift, so that a structure has one list, however it was found: energies computed with a
kept list equal those with a fresh one bit for bit.
"""

from typing import Any, NamedTuple

import numpy as np
from ase import Atoms
from vesin import NeighborList

from blips.errors import InputError, refuse_below

SKIN = 1.0  # A; graphs cost a quarter of fresh ones, see benchmarks/neighbours.py
LARGEST_EXTENT = 2e4  # A, of atoms without periodicity and of cells
MOST_PAIRS = 1e9  # of atoms and images to look at


def check_geometry(atoms: Atoms, cutoff: float) -> None:
    """Raise for a structure whose neighbours within `cutoff` (A) cannot be searched.

    The search divides space into cells. Atoms or lattice vectors that are absurdly far apart
    overflow their number, which ends the process instead of raising an error; a lattice that is
    absurdly thin has more periodic images than memory. Both come out of damaged files and
    exploded dynamics.
    """
    positions, cell, pbc = atoms.positions, atoms.cell.array, atoms.pbc
    for name, values in (("positions", positions), ("cell vectors", cell)):
        if not np.isfinite(values).all():
            raise InputError(f"{name} hold NaN or infinity; check how the structure was made")
    if pbc.any() and np.linalg.matrix_rank(cell[pbc]) < pbc.sum():
        raise InputError(
            f"periodic along {pbc.tolist()}, but those lattice vectors are not independent: "
            f"{cell.tolist()}; set a cell with a volume, or pbc=False for a molecule"
        )
    lattice = cell[pbc]  # [P, 3]
    spread = np.ptp(positions, axis=0).max() if len(positions) else 0.0
    extent = float(np.linalg.norm(lattice, axis=1).max(initial=spread))
    if extent > LARGEST_EXTENT:
        raise InputError(
            f"atoms, or ends of a lattice vector, are {extent:.3g} A apart, more than "
            f"{LARGEST_EXTENT:.0g}; is the file damaged, or did the dynamics explode?"
        )
    if not len(lattice):
        return
    thickness = 1.0 / np.linalg.norm(np.linalg.pinv(lattice), axis=0)  # between planes, A, [P]
    images = float(np.prod(2.0 * np.ceil(cutoff / thickness) + 1.0))
    if images * len(positions) ** 2 > MOST_PAIRS and images > 1e5:
        raise InputError(
            f"the cell is only {float(thickness.min()):.3g} A thin, so that {images:.1g} images of "
            f"it are within {cutoff:g} A; check the cell"
        )


class Neighbours(NamedTuple):
    """All pairs within a cutoff, sorted; the vector of a pair is r_j + shift @ cell - r_i."""

    edges: np.ndarray  # [2, E] int64, receivers i and senders j
    shift: np.ndarray  # [E, 3] int32, whole numbers of lattice vectors


class NeighbourCache:
    """Keep the neighbours of one moving structure (Verlet list with a skin).

    A list with cutoff + skin holds every pair within the cutoff as long as no atom has moved by
    more than skin / 2. It is built again when one has, or when cell, periodicity, elements or
    cutoff change; in between, pairs beyond the cutoff are dropped from it, which is cheaper than a
    search. A skin (A) of 0 searches every time.
    """

    def __init__(self, skin: float = SKIN) -> None:
        refuse_below(0, skin=skin)
        self.skin = skin
        self.searches = 0
        self._built_for: tuple[Atoms, float] | None = None

    def find(self, atoms: Atoms, cutoff: float) -> Neighbours:
        """Find all pairs with distance < `cutoff` (A), as `find_neighbours` does."""
        if self.skin == 0:
            return find_neighbours(atoms, cutoff)
        if not self._holds(atoms, cutoff):
            self._built_for = None  # stays so where the structure is refused
            self._near = find_neighbours(atoms, cutoff + self.skin)
            self._offset = self._near.shift @ atoms.cell.array  # [E, 3] A
            self._built_for = atoms.copy(), cutoff
            self.searches += 1
        edges, shift = self._near
        vector = atoms.positions.take(edges[1], 0) - atoms.positions.take(edges[0], 0)
        vector += self._offset
        squared = np.einsum("ec,ec->e", vector, vector)  # [E] A^2
        _refuse_coinciding(edges, squared)
        inside = np.flatnonzero(squared < cutoff**2)
        return Neighbours(edges.take(inside, 1), shift.take(inside, 0))

    def _holds(self, atoms: Atoms, cutoff: float) -> bool:
        """Return whether the kept list has all pairs within the cutoff."""
        if self._built_for is None or self._built_for[1] != cutoff:
            return False
        old = self._built_for[0]
        if not (
            np.array_equal(old.numbers, atoms.numbers)
            and np.array_equal(old.cell.array, atoms.cell.array)
            and np.array_equal(old.pbc, atoms.pbc)
        ):
            return False
        moved = atoms.positions - old.positions
        return bool(np.einsum("nc,nc->n", moved, moved).max() <= (0.5 * self.skin) ** 2)


def find_neighbours(atoms: Atoms, cutoff: float) -> Neighbours:
    """Find all pairs of atoms and periodic images with distance < `cutoff` (A)."""
    if len(atoms) == 0:
        raise InputError("a structure without atoms has no energy; remove the empty frame")
    if not (np.isfinite(cutoff) and cutoff > 0):
        raise InputError(f"the cutoff must be a positive length in A, got {cutoff}")
    receiver, sender, shift, distance = search(atoms, cutoff, "ijSd")
    edges = np.stack([receiver, sender]).astype(np.int64)
    _refuse_coinciding(edges, distance)
    order = _order(edges, shift, len(atoms))
    return Neighbours(edges.take(order, 1), shift.take(order, 0))


def search(atoms: Atoms, cutoff: float, quantities: str) -> Any:
    """Search all directed pairs within `cutoff` (A), in no order; quantities are those of vesin.

    These are "i", "j" (atoms), "S" (cell shift), "D" (vector) and "d" (distance), A.
    """
    check_geometry(atoms, cutoff)
    return NeighborList(cutoff=cutoff, full_list=True, sorted=False).compute(
        points=atoms.positions, box=atoms.cell.array, periodic=atoms.pbc, quantities=quantities
    )


def _order(edges: np.ndarray, shift: np.ndarray, n_atoms: int) -> np.ndarray:
    """Return the order by receiver, then sender, then shift, [E]."""
    least, most = shift.min(axis=0, initial=0), shift.max(axis=0, initial=0)
    sizes = (n_atoms, n_atoms, *(most - least + 1))
    return np.argsort(np.ravel_multi_index((*edges, *(shift - least).T), sizes))


def _refuse_coinciding(edges: np.ndarray, distance: np.ndarray) -> None:
    """Raise where atoms are at one place; distances [E] may be squared."""
    if (distance == 0).any():
        first, second = edges[:, int((distance == 0).argmax())]
        raise InputError(
            f"atoms {first} and {second} are at the same place; "
            "remove duplicated atoms (also those that coincide through the periodic cell)"
        )
