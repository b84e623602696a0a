"""The shipped NH3 data set, and the DFT labels behind it."""

import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from blips.data.ammonia import MINIMUM_ENERGY, load_ammonia
from blips.errors import InputError, MissingPackageError
from blips.sim.pyscf import PySCF
from blips.units import KCAL_PER_MOL

SIZES = {"train": 78, "valid": 14, "test_ood": 129}


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Atoms]]:
    return {name: load_ammonia(name) for name in SIZES}  # pyright: ignore[reportArgumentType]


def energies(frames: list[Atoms]) -> np.ndarray:
    """Energies above the minimum in kcal/mol."""
    return np.array([atoms.get_potential_energy() for atoms in frames]) / KCAL_PER_MOL


def label(atoms: Atoms) -> Atoms:
    """A copy with labels computed anew, energies above the minimum."""
    calculator, copy = PySCF(), atoms.copy()
    energy = calculator.get_potential_energy(atoms) - MINIMUM_ENERGY
    copy.calc = SinglePointCalculator(copy, energy=energy, forces=calculator.get_forces(atoms))
    return copy


def fingerprint(atoms: Atoms) -> np.ndarray:
    distances = atoms.get_all_distances()
    return np.concatenate([np.sort(distances[0, 1:]), np.sort(distances[[1, 1, 2], [2, 3, 3]])])


def test_every_frame_is_a_labelled_isolated_ammonia(splits):
    for name, size in SIZES.items():
        assert len(splits[name]) == size
        for atoms in splits[name]:
            assert atoms.get_chemical_symbols() == ["N", "H", "H", "H"]
            assert not atoms.pbc.any()
            assert atoms.get_forces().shape == (4, 3)
            assert atoms.info["kind"] in {"thermal", "stretch", "bend", "inversion", "random"}


def test_energies_cover_the_promised_ranges(splits):
    for name in ("train", "valid"):
        assert energies(splits[name]).min() >= 0
        assert energies(splits[name]).max() <= 5
        assert {atoms.info["kind"] for atoms in splits[name]} == {"thermal"}
    ood = energies(splits["test_ood"])
    counts, _ = np.histogram(ood, bins=np.linspace(5, 70, 6))  # 13 kcal/mol wide
    assert counts.sum() == SIZES["test_ood"]
    assert counts.min() >= 20
    kinds = [atoms.info["kind"] for atoms in splits["test_ood"]]
    assert min(kinds.count(kind) for kind in ("stretch", "bend", "inversion", "random")) >= 15


def test_no_geometry_appears_twice(splits):
    prints = np.array([fingerprint(atoms) for frames in splits.values() for atoms in frames])
    differences = np.abs(prints[:, None] - prints[None]).max(axis=-1)
    np.fill_diagonal(differences, np.inf)
    assert differences.min() > 0.9e-2  # Angstrom


def test_net_force_and_torque_vanish(splits):
    for frames in splits.values():
        for atoms in frames:
            forces = atoms.get_forces()
            np.testing.assert_allclose(forces.sum(axis=0), 0.0, atol=1e-6)
            torque = np.cross(atoms.positions, forces).sum(axis=0)
            np.testing.assert_allclose(torque, 0.0, atol=5e-4)


def test_forces_are_the_slope_of_the_energies(splits):
    """E(b) - E(a) = -(F_a + F_b)/2 . (x_b - x_a) + third order, between close geometries a, b."""
    frames = splits["train"]
    expected, found = [], []
    for index, a in enumerate(frames):
        for b in frames[index + 1 :]:
            step = b.positions - a.positions
            if np.linalg.norm(step) < 0.12:  # Angstrom
                expected.append(b.get_potential_energy() - a.get_potential_energy())
                found.append(-0.5 * np.sum((a.get_forces() + b.get_forces()) * step))
    expected, found = np.array(expected), np.array(found)
    assert len(expected) > 20
    assert np.corrcoef(expected, found)[0, 1] > 0.99
    assert np.polyfit(found, expected, 1)[0] == pytest.approx(1.0, abs=0.05)


def test_unknown_split_is_refused():
    with pytest.raises(InputError, match="train, valid, test_ood"):
        load_ammonia("test")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("package", ["pyscf", "dftd3"])
def test_missing_packages_are_named(package: str, splits, monkeypatch):
    if package == "dftd3":
        monkeypatch.setattr(PySCF, "_kohn_sham", lambda self, atoms: (0.0, 0.0))
    monkeypatch.setitem(sys.modules, {"dftd3": "dftd3.ase"}.get(package, package), None)
    with pytest.raises(MissingPackageError, match=rf"{package}.*pip install 'blips-mlip\[dft\]'"):
        label(splits["train"][0])


@pytest.mark.slow
def test_labels_repeat(splits):
    pytest.importorskip("pyscf")
    pytest.importorskip("dftd3")
    for name in SIZES:
        shipped = splits[name][0]
        again = label(shipped)
        assert again.info == shipped.info
        np.testing.assert_allclose(energies([again]), energies([shipped]), atol=1e-3)
        np.testing.assert_allclose(again.get_forces(), shipped.get_forces(), atol=1e-4)


@pytest.mark.slow
def test_labels_agree_with_the_public_set(reference_data: Path):
    """The public labels (ORCA, BP86-D3/def2-SVP) of near-equilibrium and distorted geometries."""
    pytest.importorskip("pyscf")
    pytest.importorskip("dftd3")
    frames = [
        atoms
        for name in ("train_78", "attack_30a")
        for atoms in ase.io.read(reference_data / "ammonia" / f"{name}.extxyz", index="::9")
    ]
    ours = [label(atoms) for atoms in frames]
    # Both energies are relative to the minimum, so no offset is taken out.
    np.testing.assert_allclose(energies(ours), energies(frames), rtol=0, atol=0.01)  # kcal/mol
    errors = [a.get_forces() - b.get_forces() for a, b in zip(ours, frames, strict=True)]
    assert np.abs(errors).max() / KCAL_PER_MOL < 0.05  # kcal/mol/A
