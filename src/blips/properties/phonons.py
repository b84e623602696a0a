r"""Phonons with error bars: bands, density of states, heat capacity, free energy (phonopy).

Force constants come from finite displacements in a supercell. Forces of members are linear in
their noise, and so are their force constants at one geometry. To first order

    dPhi_k = d/du ( d(b . v_k)/dr )  +  (dPhi/dw) w_k,       w_k = -(d(b . v_k)/dw) / (d2E/dw2)

with displacements u and the isotropic strain w: all members' forces on the plain model's displaced
supercells, and the shift of their volumes, which changes frequencies through anharmonicity.
Shifts of the cell's shape and of ions within it are left to "members", who relax before they are
displaced. Frequencies and thermal properties are taken to first order in the force constants.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from ase import Atoms

from blips.errors import InputError, MissingPackageError
from blips.potential import BayesianPotential
from blips.properties.eos import isotropic
from blips.properties.relax import FMAX, STEPS, relaxed
from blips.properties.result import (
    Properties,
    PropertyError,
    Values,
    check_method,
    first_order,
    gathered,
)
from blips.properties.surfaces import (
    Progress,
    Surface,
    by_members,
    energy_changes,
    force_changes,
    plain_surface,
    quiet,
)

Array = np.ndarray
UNITS = {
    "bands": "THz",
    "dos": "states/THz",
    "heat_capacity": "J/K/mol",
    "free_energy": "kJ/mol",
    "entropy": "J/K/mol",
}
THERMAL = ("heat_capacity", "free_energy", "entropy")
IMAGINARY = -0.1  # THz, below which a mode counts as imaginary; above it is numerical noise
NO_MODE = 0.01  # THz, below which a mode is a translation
MESH = 30.0  # A, length of the mesh of wave vectors
DOS_POINTS = 120
STRAIN = 0.005  # of the volume's shift


def phonons(
    potential: BayesianPotential,
    atoms: Atoms,
    *,
    method: str = "linear",
    members: int = 16,
    seed: int = 0,
    temperatures: Sequence[float] = (100.0, 200.0, 300.0, 400.0, 500.0),
    length: float = 8.0,
    displacement: float = 0.02,
    fmax: float = FMAX,
    steps: int = STEPS,
    progress: Progress = quiet,
) -> Properties:
    """Compute harmonic phonons of a relaxed crystal, thermal properties per mole of cells.

    Args:
        potential: with a posterior.
        atoms: the crystal, whose cell is relaxed first.
        method: "linear", or "members": each relaxes and is displaced by itself.
        members: K.
        seed: of the draws.
        temperatures: K, [T].
        length: least edge of the supercell, A.
        displacement: of an atom, A.
        fmax: largest force after relaxation, eV/A.
        steps: of each relaxation at most.
        progress: is told what is being done.

    Returns:
        Quantities of `UNITS`: bands [q, modes], density of states [f], the others [T]. `details`
        has wave vectors, frequencies, temperatures. Imaginary modes of the plain model are a
        note; members with them are among the failures of "members".
    """
    check_method(method, members)
    if not atoms.pbc.all():
        raise InputError("phonons are those of a crystal: periodic in three directions")
    surface = plain_surface(potential)
    progress("relaxing the mean")
    (mean,) = relaxed(surface, [atoms], cell=True, fmax=fmax, steps=steps)
    progress("displacing the mean")
    lattice = _Lattice(mean, length, displacement, temperatures)
    constants = lattice.force_constants(lattice.forces(surface))
    lowest = lattice.lowest_frequency(constants)
    lattice.choose_frequencies()
    value = lattice.values(constants)
    details = lattice.details | {"lowest_frequency": lowest}
    if lowest < IMAGINARY:
        details["notes"] = [
            f"imaginary modes, the lowest at {lowest:.2f} THz: the crystal is not stable in this "
            "structure, and thermal properties leave them out"
        ]
    if method == "linear":
        progress("linearising")
        shifts = force_changes(potential, lattice.supercells, members, seed)
        changes = np.stack(shifts[1:], axis=1) - shifts[0][:, None]  # [K, displacements, N, 3]
        constant_changes = np.array([lattice.force_constants(change) for change in changes])
        expansion, frames = _expansion(potential, surface, mean, members, seed, fmax, steps)
        strained = [
            _Lattice(frame, length, displacement, temperatures, like=lattice) for frame in frames
        ]
        up, down = (one.force_constants(one.forces(surface)) for one in strained)
        along = (up - down) / (2 * STRAIN)
        constant_changes += expansion[:, None, None, None, None] * along
        found = first_order(lattice.values, constants, constant_changes)
        for one, change in zip(found, constant_changes, strict=True):
            one["dos"] = lattice.dos(constants + change)  # peaks that move have no first order
        return gathered("phonons", method, UNITS, value, found, details=details)

    def of_member(surface: Surface) -> Values:
        (own,) = relaxed(surface, [mean], cell=True, fmax=fmax, steps=steps)
        moved = _Lattice(own, length, displacement, temperatures, like=lattice)
        found = moved.force_constants(moved.forces(surface))
        if (lowest := moved.lowest_frequency(found)) < IMAGINARY <= details["lowest_frequency"]:
            raise PropertyError(f"imaginary modes, the lowest at {lowest:.2f} THz")
        return moved.values(found)

    values, failures = by_members(potential, members, seed, of_member, progress)
    return gathered("phonons", method, UNITS, value, values, failures, details)


def _expansion(
    potential: BayesianPotential,
    surface: Surface,
    mean: Atoms,
    members: int,
    seed: int,
    fmax: float,
    steps: int,
) -> tuple[Array, list[Atoms]]:
    """Compute isotropic strains w_k of the members' equilibria, [K], and crystals at +-STRAIN."""
    frames = [isotropic(mean, (1 + w) ** 3) for w in (STRAIN, -STRAIN)]
    frames = relaxed(surface, frames, fmax=fmax, steps=steps)
    stress = surface(frames, stress=True).array("stress")  # [2, 3, 3]
    up, down = (
        frame.cell.volume * np.trace(one) / (1 + w)
        for frame, one, w in zip(frames, stress, (STRAIN, -STRAIN), strict=True)
    )
    if (stiffness := (up - down) / (2 * STRAIN)) <= 0:
        raise PropertyError("the crystal is not stable: it expands by itself")
    changes = energy_changes(potential, frames, members, seed)  # [K, 2]
    return -(changes[:, 0] - changes[:, 1]) / (2 * STRAIN) / stiffness, frames


class _Lattice:
    """phonopy on one crystal: from forces on displaced supercells to phonons."""

    def __init__(
        self,
        atoms: Atoms,
        length: float,
        displacement: float,
        temperatures: Sequence[float],
        like: "_Lattice | None" = None,
    ) -> None:
        try:
            from phonopy import Phonopy
            from phonopy.structure.atoms import PhonopyAtoms
        except ImportError as error:
            raise MissingPackageError(
                "phonons need phonopy; install it with: pip install 'blips[properties]'"
            ) from error
        cell = PhonopyAtoms(
            symbols=list(atoms.symbols),
            cell=atoms.cell.array,
            scaled_positions=atoms.get_scaled_positions(),
        )
        heights = atoms.cell.volume / np.linalg.norm(
            np.cross(atoms.cell.array[[1, 2, 0]], atoms.cell.array[[2, 0, 1]]), axis=1
        )
        multiples = np.ceil(length / heights - 1e-6).astype(int).clip(1)
        self._multiples = multiples if like is None else like._multiples
        self._phonopy = Phonopy(
            cell, np.diag(self._multiples), primitive_matrix=np.eye(3), symprec=1e-3
        )
        self._phonopy.generate_displacements(distance=displacement)
        displaced = self._phonopy.supercells_with_displacements or []
        whole = (self._phonopy.supercell, *displaced)
        self.supercells = [_atoms(one) for one in whole if one is not None]
        self._temperatures = list(temperatures)
        path = atoms.cell.bandpath(npoints=60) if like is None else None
        self._vectors: Array = like._vectors if path is None else path.kpts  # type: ignore[union-attr]
        self._frequencies = None if like is None else like._frequencies
        self.details: dict[str, Any] = {"wave_vectors": self._vectors} if path else {}
        if path is not None:
            x, marks, labels = path.get_linear_kpoint_axis()
            self.details |= {"band_axis": x, "band_marks": marks, "band_labels": list(labels)}
            self.details |= {"temperatures": np.array(self._temperatures)}

    def forces(self, surface: Surface) -> Array:
        """Compute the forces that displacements make, [displacements, N, 3] eV/A."""
        forces = np.array([surface([one]).array("forces") for one in self.supercells])
        return forces[1:] - forces[0]

    def force_constants(self, forces: Array) -> Array:
        """Compute force constants of such forces, or changes of them, [N, N, 3, 3] eV/A^2."""
        self._phonopy.forces = forces
        self._phonopy.produce_force_constants(show_drift=False)
        self._phonopy.symmetrize_force_constants(show_drift=False)
        found = self._phonopy.force_constants
        if found is None:
            raise PropertyError("phonopy made no force constants of these forces")
        return np.array(found)

    def lowest_frequency(self, constants: Array) -> float:
        """Return the lowest frequency of the mesh, THz; imaginary ones are negative."""
        self._phonopy.force_constants = constants
        return float(self._phonopy.run_mesh(MESH).frequencies.min())

    def choose_frequencies(self) -> None:
        """Choose the frequencies of the density of states from those of the mesh, THz."""
        top = 1.1 * float(self._phonopy.run_mesh(MESH).frequencies.max())
        self._frequencies = np.linspace(0.0, top, DOS_POINTS)
        self.details["frequencies"] = self._frequencies

    def values(self, constants: Array) -> Values:
        """Compute bands, density of states and thermal properties."""
        phonopy = self._phonopy
        phonopy.force_constants = constants
        found: Values = {"bands": np.array(phonopy.run_qpoints(self._vectors).frequencies)}
        found["dos"] = self.dos(constants)
        thermal = phonopy.run_thermal_properties(
            temperatures=self._temperatures, cutoff_frequency=NO_MODE
        )
        return found | {name: np.array(getattr(thermal, name)) for name in THERMAL}

    def dos(self, constants: Array) -> Array:
        """Compute the density of states of the mesh at the chosen frequencies, [f]."""
        grid = self._frequencies
        if grid is None:
            raise PropertyError("the frequencies of the density of states are not chosen yet")
        self._phonopy.force_constants = constants
        self._phonopy.run_mesh(MESH)
        found = self._phonopy.run_total_dos(
            freq_min=0.0,
            freq_max=grid[-1],
            freq_pitch=grid[1],
            sigma=2 * grid[1],
            use_tetrahedron_method=False,
        )
        return np.interp(grid, found.frequency_points, np.asarray(found.dos))


def _atoms(cell: Any) -> Atoms:
    return Atoms(cell.symbols, scaled_positions=cell.scaled_positions, cell=cell.cell, pbc=True)
