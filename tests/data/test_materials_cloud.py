import json
import pickle

import ase.io
import numpy as np
import pytest
import torch
from ase import units
from ase.build import molecule

from blips.data.materials_cloud import read_materials_cloud
from blips.errors import InputError

KCAL = units.kcal / units.mol


def table(count: int = 3, lattice: bool = False) -> dict:
    """A NeuralForceField table of ammonia, in kcal/mol."""
    rng = np.random.default_rng(0)
    atoms = molecule("NH3")
    rows = [
        np.column_stack([atoms.numbers, atoms.positions + rng.normal(0, 0.05, (4, 3))])
        for _ in range(count)
    ]
    content = {
        "nxyz": rows,
        "energy": rng.normal(size=count),
        "energy_grad": [rng.normal(size=(4, 3)) for _ in range(count)],
    }
    return content | ({"lattice": [8 * np.eye(3)] * count} if lattice else {})


def assert_matches(structures, content):
    assert len(structures) == len(content["energy"])
    for number, atoms in enumerate(structures):
        np.testing.assert_array_equal(atoms.numbers, content["nxyz"][number][:, 0])
        np.testing.assert_allclose(atoms.positions, content["nxyz"][number][:, 1:], atol=1e-8)
        assert atoms.get_potential_energy() == pytest.approx(KCAL * content["energy"][number])
        np.testing.assert_allclose(
            atoms.get_forces(), -KCAL * content["energy_grad"][number], atol=1e-8
        )


@pytest.mark.parametrize("key", ["forces", "energy_grad"])
def test_extended_xyz(tmp_path, key):
    content = table()
    frames = []
    for nxyz, energy, gradient in zip(*(content[name] for name in content), strict=True):
        atoms = molecule("NH3")
        atoms.positions = nxyz[:, 1:]
        atoms.info["energy"] = energy
        atoms.arrays[key] = gradient if key == "energy_grad" else -gradient
        frames.append(atoms)
    path = tmp_path / "ammonia.xyz"
    ase.io.write(path, frames, format="extxyz", write_results=False)
    structures = read_materials_cloud(path)
    assert_matches(structures, content)
    assert "energy_grad" not in structures[0].arrays


@pytest.mark.parametrize("lattice", [False, True])
def test_stacked_arrays(tmp_path, lattice):
    content = table(lattice=lattice)
    np.savez(tmp_path / "set.npz", **{name: np.stack(rows) for name, rows in content.items()})
    structures = read_materials_cloud(tmp_path / "set.npz")
    assert_matches(structures, content)
    assert all(atoms.pbc.all() == lattice for atoms in structures)
    assert structures[0].get_volume() == pytest.approx(512) if lattice else True


def test_joined_arrays_of_many_sizes(tmp_path):
    content = table()
    content["nxyz"][1] = content["nxyz"][1][:3]
    content["energy_grad"][1] = content["energy_grad"][1][:3]
    np.savez(
        tmp_path / "set.npz",
        nxyz=np.concatenate(content["nxyz"]),
        num_atoms=[4, 3, 4],
        energy=content["energy"],
        energy_grad=np.concatenate(content["energy_grad"]),
    )
    assert_matches(read_materials_cloud(tmp_path / "set.npz"), content)


def test_json(tmp_path):
    content = table()
    path = tmp_path / "set.json"
    path.write_text(
        json.dumps({name: [np.asarray(row).tolist() for row in content[name]] for name in content})
    )
    assert_matches(read_materials_cloud(path), content)


def test_names_of_rmd17(tmp_path):
    content = table()
    rows = np.stack(content["nxyz"])
    np.savez(
        tmp_path / "rmd17.npz",
        nuclear_charges=rows[0, :, 0],
        coords=rows[..., 1:],
        energies=content["energy"],
        forces=-np.stack(content["energy_grad"]),
    )
    assert_matches(read_materials_cloud(tmp_path / "rmd17.npz"), content)


def test_other_units(tmp_path):
    content = table()
    np.savez(tmp_path / "set.npz", **{name: np.stack(rows) for name, rows in content.items()})
    structures = read_materials_cloud(tmp_path / "set.npz", energy_unit="eV")
    assert structures[0].get_potential_energy() == pytest.approx(content["energy"][0])


class Trap:
    """A pickle of this raises when it is opened."""

    def __reduce__(self):
        return eval, ("1 / 0",)


@pytest.mark.parametrize("name", ["set.pth.tar", "set.npz", "set.json", "set.xyz"])
@pytest.mark.parametrize("form", ["pickle", "torch", "old torch"])
def test_pickles_are_refused_unopened(tmp_path, name, form):
    path = tmp_path / name
    if form == "pickle":
        path.write_bytes(pickle.dumps(Trap()))
    else:
        torch.save(Trap(), path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(InputError, match=r"a pickle.*np\.savez"):
        read_materials_cloud(path)


def test_arrays_of_objects_are_refused(tmp_path):
    np.savez(tmp_path / "set.npz", nxyz=np.array([Trap()], dtype=object))
    with pytest.raises(InputError, match="without running code"):
        read_materials_cloud(tmp_path / "set.npz")


def test_incomplete_tables_are_refused(tmp_path):
    path = tmp_path / "set.npz"
    content = {name: np.stack(rows) for name, rows in table().items()}
    np.savez(path, nxyz=content["nxyz"], energy=content["energy"])
    with pytest.raises(InputError, match="no energy_grad; it has nxyz, energy"):
        read_materials_cloud(path)
    np.savez(path, **content | {"energy": content["energy"][1:]})
    with pytest.raises(InputError, match="rows"):
        read_materials_cloud(path)
    np.savez(path, **content | {"energy_grad": content["energy_grad"][:, 1:]})
    with pytest.raises(InputError, match=r"row 0: forces.*\(3, 3\)"):
        read_materials_cloud(path)
    np.savez(path, **content | {"nxyz": content["nxyz"][..., 1:]})
    with pytest.raises(InputError, match=r"row 0: nxyz has shape \(4, 3\)"):
        read_materials_cloud(path)


def test_unknown_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_materials_cloud(tmp_path / "set.npz")
    path = tmp_path / "set.csv"
    path.write_text("1,2")
    with pytest.raises(InputError, match=r"expected a file \.xyz"):
        read_materials_cloud(path)
    path = tmp_path / "set.json"
    path.write_text("[1, 2]")
    with pytest.raises(InputError, match="JSON object of properties"):
        read_materials_cloud(path)
