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


IDEAL = [bulk("NaCl", "rocksalt", a=5.69, cubic=True), bulk("Si", cubic=True)]


@pytest.mark.parametrize("ideal", IDEAL, ids=["NaCl", "Si"])
def test_strange_structures_have_larger_error_bars_than_the_ideal_crystal(potential, ideal: Atoms):
    """Forces on perfect lattices and lone atoms vanish by symmetry: there, energies tell."""
    stretched, compressed, rattled = (ideal.copy() for _ in range(3))
    stretched.set_cell(1.5 * ideal.cell.array, scale_atoms=True)
    compressed.set_cell(0.8 * ideal.cell.array, scale_atoms=True)
    rattled.rattle(0.3, seed=0)
    lone = Atoms(ideal.symbols[0], positions=[[7.5] * 3], cell=[15.0] * 3, pbc=True)
    found = potential.predict([ideal, stretched, compressed, lone, rattled])
    of_atoms = found.energy_std / found.n_atoms
    assert (of_atoms[1:4] > of_atoms[0]).all()
    assert found.largest_force_std[4] > 10 * found.largest_force_std[0]


@pytest.mark.parametrize("ideal", IDEAL, ids=["NaCl", "Si"])
def test_forces_of_a_stretched_crystal_are_less_certain_for_their_size(potential, ideal: Atoms):
    """Bonds weaken, and forces with them: their std may fall, but not as fast as they do."""
    near = ideal.copy()
    near.rattle(0.05, seed=0)
    stretched = near.copy()
    stretched.set_cell(1.5 * near.cell.array, scale_atoms=True)
    relative = []
    for one in potential.predict([near, stretched]):
        relative.append(one.largest_force_std[0] / np.linalg.norm(one.forces, axis=1).max())
    assert relative[1] > 1.2 * relative[0]


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
