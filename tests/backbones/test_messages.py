"""Compiled messages of PaiNN, against the formula."""

import pytest
import torch
from ase.build import bulk, molecule
from hypothesis import given
from hypothesis import strategies as st

from blips import keys
from blips.backbones import PaiNN, _fast
from blips.backbones.derivatives import energy_and_derivatives, first_only
from blips.backbones.painn import summed_messages

pytestmark = pytest.mark.skipif(
    _fast._library() is None, reason="blips was installed without a C compiler"
)


def inputs(edges: int, atoms: int, width: int, carries: bool, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    carried = normal(atoms, 3, width) if carries else None
    index = torch.randint(atoms, (2, edges), generator=generator)
    parts = 3 if carries else 2
    return normal(edges, parts * width), normal(atoms, 2 * width), carried, normal(edges, 3), index


def both_ways(given_inputs):
    """Sums and gradients by the formula and by compiled code."""
    outcomes = []
    leaves = [x for x in given_inputs if x is not None and x.requires_grad]
    for function in (summed_messages, _fast.CompiledMessages.apply):
        sums = function(*given_inputs)
        upstream = [torch.linspace(-1, 1, x.numel()).view_as(x) for x in sums]
        outcomes.append((sums, torch.autograd.grad(sums, leaves, upstream)))
    return outcomes


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 70), st.booleans())
def test_same_sums_to_the_last_bit_and_the_same_gradients(edges, atoms, width, carries):
    (plain, plain_grads), (quick, quick_grads) = both_ways(inputs(edges, atoms, width, carries))
    for a, b in zip(quick, plain, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(quick_grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_edges_may_have_any_layout_in_memory():
    *others, edges = inputs(20, 5, 8, True)
    for found in both_ways([*others, edges.T.contiguous().T]):
        for a, b in zip(found[0], summed_messages(*others, edges), strict=True):
            assert torch.equal(a, b)


def test_forces_and_stress_are_the_same_and_training_takes_the_formula():
    torch.manual_seed(0)
    model = PaiNN(cutoff=4.0, features=32, blocks=3, num_basis=8)
    used: list[bool] = []

    def energies(graph):
        used.append(first_only.get())
        return model(graph)[keys.ENERGIES]

    graph = model.graph([bulk("Si", cubic=True), bulk("NaCl", "rocksalt", a=5.6)])
    quick = energy_and_derivatives(energies, graph, stress=True)
    plain = energy_and_derivatives(energies, graph, stress=True, create_graph=True)
    assert used == [True, False]
    assert torch.equal(quick["energy"], plain["energy"])
    for name in ("forces", "stress"):
        torch.testing.assert_close(quick[name], plain[name].detach(), rtol=1e-4, atol=1e-5)
    plain["forces"].square().sum().backward()
    assert model.readout[0].weight.grad is not None
    assert not first_only.get()


def test_double_precision_and_many_threads_take_the_formula(monkeypatch):
    def refuse(*_):
        raise AssertionError("compiled code was called")

    monkeypatch.setattr(_fast, "_call", refuse)
    model = PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4)
    double = PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4).double()

    def forces(backbone):
        graph = backbone.graph(molecule("H2O"))
        return energy_and_derivatives(lambda g: backbone(g)[keys.ENERGIES], graph)["forces"]

    assert forces(double).shape == (3, 3)
    with pytest.raises(AssertionError, match="compiled code"):
        forces(model)
    monkeypatch.setattr("blips.backbones.painn.is_for_compiled", lambda _: False)
    assert forces(model).shape == (3, 3)
