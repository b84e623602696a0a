"""Released models with the error bars that are shipped for them."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk

import blips
from blips.errors import CheckpointError, ConfigError
from blips.train import released

SHIPPED = ("chgnet", "mattersim-1m", "sevennet-0")


@pytest.fixture(scope="module", params=SHIPPED)
def potential(request):
    pytest.importorskip(
        {"chgnet": "chgnet", "mattersim-1m": "mattersim"}.get(request.param, "sevenn")
    )
    if released.provenance(request.param) is None:
        pytest.skip(f"no error bars are shipped for {request.param}")
    return blips.load(request.param)


def crystal() -> Atoms:
    atoms = bulk("NaCl", "rocksalt", a=5.69, cubic=True)
    atoms.rattle(0.02, seed=1)
    return atoms


def changed(kind: str) -> Atoms:
    atoms = crystal()
    if kind == "rattled":
        atoms.rattle(0.4, seed=0)
    elif kind == "compressed":
        atoms.set_cell(0.8 * atoms.cell.array, scale_atoms=True)
    else:
        atoms.set_cell(1.3 * atoms.cell.array, scale_atoms=True)
        atoms.rattle(0.3, seed=0)
    return atoms


@pytest.mark.parametrize("kind", ["rattled", "compressed"])
def test_error_bars_of_forces_grow_with_the_disorder(potential, kind: str):
    found = potential.predict([crystal(), changed(kind)])
    assert found.method == "conditioned"
    ideal, strange = (found[k].forces_std for k in range(2))  # without the floor
    assert np.sqrt((strange**2).mean()) > 2 * np.sqrt((ideal**2).mean())


def lone(crystal: Atoms) -> Atoms:
    return Atoms(crystal.symbols[0], positions=[[7.5] * 3], cell=[15.0] * 3, pbc=True)


IDEAL = [bulk("NaCl", "rocksalt", a=5.69, cubic=True), bulk("Si", cubic=True)]


@pytest.mark.parametrize("ideal", IDEAL, ids=["NaCl", "Si"])
def test_strange_structures_have_larger_error_bars_than_the_ideal_crystal(potential, ideal: Atoms):
    """Forces on perfect lattices vanish by symmetry, so that both crystals are shaken a little."""
    ideal = ideal.copy()
    ideal.rattle(0.02, seed=0)
    stretched, compressed, rattled = (ideal.copy() for _ in range(3))
    stretched.set_cell(1.5 * ideal.cell.array, scale_atoms=True)
    compressed.set_cell(0.8 * ideal.cell.array, scale_atoms=True)
    rattled.rattle(0.3, seed=0)
    found = potential.predict([ideal, stretched, compressed, lone(ideal), rattled])
    of_atoms = found.energy_std / found.n_atoms
    assert (of_atoms[1:4] > of_atoms[0]).all()
    assert (found.largest_force_std[1:] > 1.2 * found.largest_force_std[0]).all()
    assert found.structure_in_domain.tolist()[:4] == [True, False, True, False]


@pytest.mark.parametrize("ideal", IDEAL, ids=["NaCl", "Si"])
def test_a_perfect_lattice_that_is_torn_apart_is_less_certain_too(potential, ideal: Atoms):
    stretched = ideal.copy()
    stretched.set_cell(1.5 * ideal.cell.array, scale_atoms=True)
    found = potential.predict([ideal, stretched, lone(ideal)])
    assert (found.largest_force_std[1:] > 10 * found.largest_force_std[0]).all()


def test_means_are_those_of_the_released_model(potential):
    plain = potential.predict(changed("rattled"), method="map")
    found = potential.predict(changed("rattled"))
    np.testing.assert_array_equal(found.energy, plain.energy)
    np.testing.assert_array_equal(found.forces, plain.forces)


def test_members_can_be_drawn_and_run(potential):
    first, second = potential.draw(2)
    atoms = changed("rattled")
    forces = [one.predict(atoms).forces for one in (first, second)]
    assert np.abs(forces[0] - forces[1]).max() > 1e-3
    assert np.abs(forces[0].sum(axis=0)).max() < 1e-3


def test_where_they_come_from_is_told():
    told = released.provenance("chgnet")
    assert told is not None
    assert "MPtrj" in told["data"]
    assert released.provenance("mace") is None


def test_error_bars_of_other_weights_are_refused(monkeypatch):
    pytest.importorskip("chgnet")
    backbone = blips.backbones.load("chgnet")
    with torch.no_grad():
        backbone.model.mlp.layers[0].weight.mul_(1.01)
    monkeypatch.setattr(released, "load_backbone", lambda name: backbone)
    with pytest.raises(CheckpointError, match="other weights"):
        blips.load("chgnet")


def test_names_and_options_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="neither a file nor a released model; did you mean 'ch"):
        blips.load("chgnt")
    with pytest.raises(ConfigError, match="no released model"):
        blips.load(tmp_path / "model.safetensors", weights="x")
