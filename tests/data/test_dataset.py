from dataclasses import fields

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from hypothesis import given
from hypothesis import strategies as st

from blips import keys
from blips.data.dataset import Batch, StructureData
from blips.data.graph import AtomGraph
from blips.data.labels import Labels
from blips.data.structures import XyzFrames
from blips.errors import InputError

CUTOFF = 3.0
ALL = ("energy", "forces", "stress")


def crystals(count: int = 6) -> list[Atoms]:
    rng = np.random.default_rng(0)
    frames = []
    for number in range(count):
        atoms = bulk("Cu").repeat((1, 1, number % 3 + 1))
        atoms.rattle(0.05, rng=rng)
        atoms.positions = atoms.positions.round(8)
        forces = rng.normal(size=(len(atoms), 3)).round(8)
        stress = rng.normal(size=6)
        atoms.calc = SinglePointCalculator(atoms, energy=rng.normal(), forces=forces, stress=stress)
        frames.append(atoms)
    return frames


def assert_same(one: Batch, two: Batch) -> None:
    assert type(one.graph) is type(two.graph)
    for field in fields(one.graph):
        a, b = getattr(one.graph, field.name), getattr(two.graph, field.name)
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert one.targets.keys() == two.targets.keys()
    for name, target in one.targets.items():
        torch.testing.assert_close(target, two.targets[name], rtol=0, atol=0)
    assert one.indices == two.indices


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_batch_is_the_graph_and_the_labels_of_its_structures(indices):
    frames = crystals()
    batch = StructureData(frames, CUTOFF, quantities=ALL).batch(indices)
    chosen = [frames[i] for i in indices]
    expected = AtomGraph.batch([AtomGraph.from_atoms(one, CUTOFF) for one in chosen])
    assert isinstance(batch.graph, AtomGraph)
    torch.testing.assert_close(batch.graph.vectors(), expected.vectors())
    torch.testing.assert_close(batch.graph.edge_index, expected.edge_index)
    targets = {name: value.numpy() for name, value in batch.targets.items()}
    energies = [atoms.get_potential_energy() for atoms in chosen]
    np.testing.assert_allclose(targets[keys.ENERGY], energies, rtol=1e-6)
    forces = np.concatenate([atoms.get_forces() for atoms in chosen])
    np.testing.assert_allclose(targets[keys.FORCES], forces, rtol=1e-6)
    stress = np.stack([atoms.get_stress(voigt=False) for atoms in chosen])
    np.testing.assert_allclose(targets[keys.STRESS], stress, rtol=1e-6)
    assert batch.indices == tuple(indices)


def test_graphs_are_built_once_and_at_first_use(monkeypatch):
    built = []
    original = AtomGraph.from_atoms

    def counted(atoms, *rest):
        built.append(atoms)
        return original(atoms, *rest)

    monkeypatch.setattr(AtomGraph, "from_atoms", counted)
    data = StructureData(crystals(), CUTOFF)
    assert not built
    data.batch([0, 2])
    data.batch([2, 0, 2])
    assert len(built) == 2


def test_batch_moves_to_another_dtype():
    batch = StructureData(crystals(), CUTOFF, quantities=ALL).batch([0, 1]).to(dtype=torch.float64)
    assert batch.graph.positions.dtype == torch.float64
    assert {target.dtype for target in batch.targets.values()} == {torch.float64}
    assert batch.graph.edge_index.dtype == torch.int64


def test_large_total_energies_keep_their_digits():
    atoms = molecule("H2O")
    atoms.info["energy"] = -93910.123456789
    data = StructureData([atoms], CUTOFF, quantities=("energy",), dtype=torch.float32)
    batch = data.batch([0]).to(dtype=torch.float32)
    assert batch.targets[keys.ENERGY].item() == -93910.123456789
    assert batch.graph.positions.dtype == torch.float32


def test_labels_are_checked_before_training():
    frames = [*crystals(2), bulk("Cu")]
    with pytest.raises(InputError, match=r"train\.xyz, frame 2: no energy"):
        StructureData(frames, CUTOFF, source="train.xyz")
    unit = StructureData(crystals(2), CUTOFF, labels=Labels(energy_unit="meV")).batch([0])
    ev = StructureData(crystals(2), CUTOFF).batch([0])
    torch.testing.assert_close(unit.targets["forces"], ev.targets["forces"] / 1000)


def test_bad_geometry_is_named():
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 0]])
    atoms.info["energy"] = 0.0
    data = StructureData([atoms], CUTOFF, quantities=("energy",), source="bad.xyz")
    with pytest.raises(InputError, match=r"bad\.xyz, frame 0: .*same place"):
        data.batch([0])


def test_streamed_batches_are_those_in_memory(tmp_path):
    path = tmp_path / "crystals.extxyz"
    ase.io.write(path, crystals())
    frames = ase.io.read(path, index=":")
    memory = StructureData(frames, CUTOFF, quantities=ALL, dtype=torch.float64, source=path)
    stream = StructureData(
        XyzFrames(path), CUTOFF, quantities=ALL, dtype=torch.float64, source=path
    )
    assert len(stream) == len(memory)
    for indices in ([0], [5, 1, 1, 3], [2, 0, 4, 5], [5, 1]):
        assert_same(stream.batch(indices), memory.batch(indices))
    assert stream.name_of(3) == memory.name_of(3)


def test_streamed_file_must_be_sound_and_stay_so(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        XyzFrames(tmp_path / "none.xyz")
    path = tmp_path / "crystals.extxyz"
    ase.io.write(path, [*crystals(2), bulk("Cu")])
    stream = StructureData(XyzFrames(path), CUTOFF, source=path)
    with pytest.raises(InputError, match="frame 2: no energy"):
        stream.batch([0, 2])
    ase.io.write(path, crystals(4))
    with pytest.raises(InputError, match="changed while it was in use"):
        stream.batch([1])


def test_a_compressed_file_cannot_be_streamed(tmp_path):
    path = tmp_path / "few.xyz.gz"
    ase.io.write(path, molecule("H2O"), format="extxyz")
    with pytest.raises(InputError, match="unpack it first"):
        XyzFrames(path)
