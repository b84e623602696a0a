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

from blips.errors import require
from blips.potential import BayesianPotential
from blips.properties.calculation import Calculation, Surface
from blips.properties.eos import isotropic
from blips.properties.result import Properties, PropertyError, Values, propagated

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
    temperatures: Sequence[float] = (100.0, 200.0, 300.0, 400.0, 500.0),
    length: float = 8.0,
    displacement: float = 0.02,
    **options: Any,
) -> Properties:
    """Compute harmonic phonons of a relaxed crystal, thermal properties per mole of cells.

    Temperatures are in K; `length` (A) is the least edge of the supercell, `displacement` (A) that
    of an atom. Options are those of `Calculation`.

    Returns:
        Quantities of `UNITS`: bands [q, modes], density of states [f], the others [T]. `details`
        has wave vectors, frequencies, temperatures. Imaginary modes of the plain model are a
        note; members with them are among the failures of "members".
    """
    run = Calculation(potential, **options)
    mean = run.relaxed_crystal(atoms, "phonons")
    heights = 1.0 / np.linalg.norm(mean.cell.reciprocal().array, axis=1)  # between faces, A
    multiples = np.ceil(length / heights - 1e-6).astype(int).clip(1)

    def displaced(crystal: Atoms) -> _Lattice:
        return _Lattice(crystal, multiples, displacement)

    lattice = displaced(mean)
    constants = lattice.constants_of(run.plain)
    mesh = lattice.mesh(constants)
    lowest = float(mesh.min())
    frequencies = np.linspace(0.0, 1.1 * float(mesh.max()), DOS_POINTS)
    path = mean.cell.bandpath(npoints=60)
    axis, marks, labels = path.get_linear_kpoint_axis()

    def smooth(lattice: _Lattice, constants: Array) -> Values:
        return lattice.smooth(constants, path.kpts, list(temperatures))

    def values(lattice: _Lattice, constants: Array) -> Values:
        return {**smooth(lattice, constants), "dos": lattice.dos(constants, frequencies)}

    def first_order() -> list[Values]:
        forces = run.force_changes(lattice.supercells)
        shifts = np.stack(forces[1:], axis=1) - forces[0][:, None]  # [K, displacements, N, 3]
        changes = np.array([lattice.force_constants(shift) for shift in shifts])
        expansion, frames = _expansion(run, mean)
        up, down = (displaced(frame).constants_of(run.plain) for frame in frames)
        changes += expansion[:, None, None, None, None] * ((up - down) / (2 * STRAIN))
        found = propagated(lambda moved: smooth(lattice, moved), constants, changes)
        for one, change in zip(found, changes, strict=True):  # peaks move: they have no first order
            one["dos"] = lattice.dos(constants + change, frequencies)
        return found

    def of_member(surface: Surface) -> Values:
        own = displaced(run.relaxed(surface, [mean], cell=True)[0])
        own_constants = own.constants_of(surface)
        if (own_lowest := own.mesh(own_constants).min()) < IMAGINARY <= lowest:
            raise PropertyError(f"imaginary modes, the lowest at {own_lowest:.2f} THz")
        return values(own, own_constants)

    details = {
        "wave_vectors": path.kpts,
        "band_axis": axis,
        "band_marks": marks,
        "band_labels": list(labels),
        "temperatures": np.array(temperatures),
        "frequencies": frequencies,
        "lowest_frequency": lowest,
    }
    if lowest < IMAGINARY:
        details["notes"] = [
            f"imaginary modes, the lowest at {lowest:.2f} THz: the crystal is not stable in this "
            "structure, and thermal properties leave them out"
        ]
    value = values(lattice, constants)
    return run.finished("phonons", UNITS, value, first_order, of_member, details)


def _expansion(run: Calculation, mean: Atoms) -> tuple[Array, list[Atoms]]:
    """Compute isotropic strains w_k of the members' equilibria, [K], and crystals at +-STRAIN."""
    strains = (STRAIN, -STRAIN)
    frames = run.relaxed(run.plain, [isotropic(mean, (1 + w) ** 3) for w in strains])
    stress = run.plain(frames, stress=True).array("stress")  # [2, 3, 3]
    up, down = (
        frame.cell.volume * np.trace(one) / (1 + w)
        for frame, one, w in zip(frames, stress, strains, strict=True)
    )
    if (stiffness := (up - down) / (2 * STRAIN)) <= 0:
        raise PropertyError("the crystal is not stable: it expands by itself")
    changes = run.energy_changes(frames)  # [K, 2]
    return -(changes[:, 0] - changes[:, 1]) / (2 * STRAIN) / stiffness, frames


class _Lattice:
    """phonopy on one crystal: from forces on displaced supercells to phonons."""

    def __init__(self, atoms: Atoms, multiples: Array, displacement: float) -> None:
        phonopy: Any = require("phonopy", "pip install 'blips-mlip[properties]'")
        cell = phonopy.structure.atoms.PhonopyAtoms(
            symbols=list(atoms.symbols),
            cell=atoms.cell.array,
            scaled_positions=atoms.get_scaled_positions(),
            masses=atoms.get_masses() if atoms.has("masses") else None,  # isotopes
        )
        self._phonopy = phonopy.Phonopy(
            cell, np.diag(multiples), primitive_matrix=np.eye(3), symprec=1e-3
        )
        self._phonopy.generate_displacements(distance=displacement)
        self.supercells = [
            Atoms(one.symbols, scaled_positions=one.scaled_positions, cell=one.cell, pbc=True)
            for one in (self._phonopy.supercell, *self._phonopy.supercells_with_displacements)
        ]

    def constants_of(self, surface: Surface) -> Array:
        """Compute the force constants of a surface, [N, N, 3, 3] eV/A^2."""
        forces = np.array([surface([one]).array("forces") for one in self.supercells])
        return self.force_constants(forces[1:] - forces[0])

    def force_constants(self, forces: Array) -> Array:
        """Compute force constants of forces on displaced supercells, or changes of them."""
        self._phonopy.forces = forces
        self._phonopy.produce_force_constants(show_drift=False)
        self._phonopy.symmetrize_force_constants(show_drift=False)
        return np.array(self._phonopy.force_constants)

    def mesh(self, constants: Array) -> Array:
        """Compute frequencies on the mesh, THz; imaginary ones are negative."""
        self._phonopy.force_constants = constants
        return self._phonopy.run_mesh(MESH).frequencies

    def smooth(self, constants: Array, wave_vectors: Array, temperatures: list[float]) -> Values:
        """Compute bands [q, modes] in THz, and thermal properties by the mesh, [T] each."""
        self.mesh(constants)
        found = self._phonopy.run_thermal_properties(
            temperatures=temperatures, cutoff_frequency=NO_MODE
        )
        thermal: Values = {name: np.array(getattr(found, name)) for name in THERMAL}
        return {"bands": np.array(self._phonopy.run_qpoints(wave_vectors).frequencies), **thermal}

    def dos(self, constants: Array, grid: Array) -> Array:
        """Compute the density of states of the mesh at frequencies in THz, [f]."""
        self.mesh(constants)
        found = self._phonopy.run_total_dos(
            freq_min=0.0,
            freq_max=grid[-1],
            freq_pitch=grid[1],
            sigma=2 * grid[1],
            use_tetrahedron_method=False,
        )
        return np.interp(grid, found.frequency_points, np.asarray(found.dos))
