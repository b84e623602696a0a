"""What all backbones stand on."""

import pytest
from ase import Atoms
from torch import nn

from blips.backbones import build
from blips.backbones.base import first_parameter, graph_batches
from blips.data.structures import BATCH_ATOMS, batches_of
from blips.errors import InputError


@pytest.mark.parametrize("name", ["painn", "schnet"])
def test_the_first_parameter_is_that_of_torch(name: str):
    model = build(name)
    assert first_parameter(model) is next(model.parameters())


def test_a_first_parameter_may_be_deep_and_beside_nothing():
    deep = nn.Sequential(
        nn.SiLU(), nn.Sequential(nn.Identity(), nn.LayerNorm(2, elementwise_affine=False))
    )
    with pytest.raises(InputError, match="no parameters"):
        first_parameter(deep)
    deep.append(nn.Linear(2, 2))
    deep[0].register_parameter("missing", None)
    deep.register_module("gone", None)
    assert first_parameter(deep) is deep[2].weight


def test_batches_go_by_atoms_and_keep_the_order():
    rows = [Atoms(f"H{n}", [[2.0 * k, 0, 0] for k in range(n)]) for n in (300, 200, 30, 600, 1, 2)]
    graphs = list(graph_batches(build("painn", features=4, blocks=1), rows))
    assert [graph.node_counts().tolist() for graph in graphs] == [[300, 200], [30], [600], [1, 2]]
    assert BATCH_ATOMS == 512
    by_number = graph_batches(build("painn", features=4, blocks=1), rows[-3:], 2)
    assert [graph.num_structures for graph in by_number] == [2, 1]
    assert [len(batch) for batch in batches_of(iter(rows), most_atoms=2)] == [1] * 6
