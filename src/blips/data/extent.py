"""Structures that no neighbour search should be asked about.

The search divides space into cells. Atoms or lattice vectors that are absurdly far apart overflow
their number, which ends the process instead of raising an error; a lattice that is absurdly thin
has more periodic images than memory. Both come out of damaged files and exploded dynamics.
"""

import numpy as np

from blips.errors import InputError

LARGEST_EXTENT = 2e4  # A, of atoms without periodicity and of cells
MOST_PAIRS = 1e9  # of atoms and images to look at


def check_extent(positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float) -> None:
    """Raise for a structure whose neighbours cannot be searched.

    Args:
        positions: [N, 3] A, finite.
        cell: [3, 3] A, finite, with a volume along the periodic directions.
        pbc: [3].
        cutoff: A.
    """
    extent = float(np.ptp(positions, axis=0).max()) if len(positions) else 0.0
    if extent > LARGEST_EXTENT:
        raise InputError(
            f"atoms are {extent:.3g} A apart, more than {LARGEST_EXTENT:.0g}; is the file damaged, "
            "or did the dynamics explode?"
        )
    lattice = cell[pbc]  # [P, 3]
    if not len(lattice):
        return
    longest = float(np.linalg.norm(lattice, axis=1).max())
    if longest > LARGEST_EXTENT:
        raise InputError(
            f"a periodic lattice vector is {longest:.3g} A long, more than {LARGEST_EXTENT:.0g}; "
            "check the cell"
        )
    thickness = 1.0 / np.linalg.norm(np.linalg.pinv(lattice), axis=0)  # between planes, A, [P]
    images = float(np.prod(2.0 * np.ceil(cutoff / thickness) + 1.0))
    if images * len(positions) ** 2 > MOST_PAIRS and images > 1e5:
        raise InputError(
            f"the cell is only {float(thickness.min()):.3g} A thin, so that {images:.1g} images of "
            f"it are within {cutoff:g} A; check the cell"
        )
