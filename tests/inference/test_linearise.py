"""First-order rows and members against finite differences of the weights."""

import copy
import threading
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from ase.build import molecule
from torch import Tensor, nn

import blips
from blips import keys
from blips.backbones import Adapter, PaiNN
from blips.data.graph import AtomGraph
from blips.errors import ConversionError
from blips.inference.linearise import Linearised, LinearModel
from blips.inference.maps import ChosenMaps, watched
from blips.inference.rows import components, force_rows, random_sums
from helpers import TINY, quartz
from inference.models import (
    boxed_ammonia,
    central,
    chosen,
    normal,
    periodic,
    small,
    with_frozen_noise,
    with_linear_weights,
)
from studies.baselines.last_layer import inputs_of

# The packages behind CHGNet and ORB.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
STEP = 1e-5
OF_PAIRS = ("model.*_embedding", "model.bond_weights_*", "model.*.twoBody_*")  # and of angles
CASES = [
    ("painn", "readout", None),
    ("painn", "all", None),
    ("painn", "all", 40),
    ("schnet", "readout", None),
    ("schnet", "all", None),
    ("chgnet", "readout", None),
    ("chgnet", OF_PAIRS, None),
    ("sevennet", "readout", None),
    ("sevennet", "all", None),
    ("orb", "readout", None),
    ("orb-direct", "readout", None),
    ("orb-direct", "all", 60),
]
NAMES = [
    " ".join([name, maps if isinstance(maps, str) else "pairs", *([str(size)] if size else [])])
    for name, maps, size in CASES
]


class Case(NamedTuple):
    """A model on two structures, and its derivative along v by finite differences."""

    potential: blips.BayesianPotential
    graph: AtomGraph
    maps: ChosenMaps
    linearised: Linearised
    v: Tensor
    difference: dict[str, Tensor]


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-7) -> None:
    assert expected.abs().max() > 0
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance * scale)


def case_of(name: str, maps: str | tuple[str, ...], dimension: int | None) -> Case:
    potential = small(name)
    graph = potential.backbone.graph(periodic())
    which = chosen(potential, maps, dimension or 10**6)
    v = normal(which.sketch.size)
    if name == "sevennet":  # its maps are no nn.Linear
        moved = [
            with_frozen_noise(potential, which, graph, v, step, stress=True)
            for step in (STEP, -STEP)
        ]
    else:
        moved = [
            with_linear_weights(potential, which, v, step)(graph, stress=True)
            for step in (STEP, -STEP)
        ]
    linearised = LinearModel(potential.backbone, which)(graph, stress=True, depth="rows")
    return Case(potential, graph, which, linearised, v, central(*moved, STEP))


@pytest.fixture(scope="module", params=CASES, ids=NAMES)
def case(request) -> Case:
    return case_of(*request.param)


@pytest.fixture(scope="module")
def painn() -> blips.BayesianPotential:
    return small("painn")


def along(quantity: Tensor, direction: Tensor, graph: AtomGraph) -> Tensor:
    """u . y summed over each structure, [S]."""
    if len(direction) == graph.num_nodes:
        return graph.sum_over_structures((quantity * direction).sum(1))
    return (quantity * direction).sum((1, 2))


# ---- rows and members ----


def test_rows_of_energies_are_the_slopes(case: Case):
    rows = case.linearised.energy_rows()
    assert rows.shape == (2, case.maps.sketch.size)
    close(rows.double() @ case.v, case.difference[keys.ENERGY])


@pytest.mark.parametrize("quantity", [keys.FORCES, keys.STRESS])
def test_rows_of_forces_and_stress_are_the_slopes(case: Case, quantity: str):
    difference = case.difference[quantity]
    directions = [normal(*difference.shape, seed=seed) for seed in (1, 2)]
    rows = list(case.linearised.rows_along(quantity, directions))
    for direction, row in zip(directions, rows, strict=True):
        close(row.double() @ case.v, along(difference, direction, case.graph))


@pytest.mark.parametrize("quantity", [keys.ENERGY, keys.FORCES, keys.STRESS])
def test_members_are_the_slopes(case: Case, quantity: str):
    v = torch.stack([normal(len(case.v), seed=9), case.v])
    found = case.linearised.members(v)[quantity]
    close(found[1].double(), case.difference[quantity])
    assert not torch.allclose(found[0], found[1])


def test_energies_of_atoms_are_the_slopes_where_the_readout_has_them(case: Case):
    found = case.linearised.members(case.v[None])
    nodes = set(case.maps.roles.values()) == {keys.NODE}
    assert (keys.ENERGIES in found) == (case.maps.last and nodes)
    if keys.ENERGIES in found:
        close(found[keys.ENERGIES][0], case.difference[keys.ENERGIES])


def test_members_are_exactly_linear(case: Case):
    v = torch.stack([case.v, normal(len(case.v), seed=5)])
    one, other, both, none = (
        case.linearised.members(x[None])
        for x in (v[0], v[1], 300.0 * v[0] - 2.0 * v[1], torch.zeros_like(v[0]))
    )
    for name, value in both.items():
        close(value, 300.0 * one[name] - 2.0 * other[name], 1e-12)
        assert not none[name].any()


def test_outputs_are_those_of_the_plain_model(case: Case):
    expected = case.potential(case.graph, stress=True)
    for name in (keys.ENERGY, keys.FORCES):
        assert torch.equal(case.linearised.outputs[name], expected[name])
    close(case.linearised.outputs[keys.STRESS], expected[keys.STRESS], 1e-14)


def test_rows_of_a_batch_are_those_of_its_structures(case: Case):
    """One structure has a way of its own through the sums."""
    u = normal(case.graph.num_nodes, 3)
    (whole,) = case.linearised.rows_along(keys.FORCES, [u])
    parts = u.split([9, 4])
    for s, atoms in enumerate(periodic()):
        graph = case.potential.backbone.graph(atoms)
        alone = LinearModel(case.potential.backbone, case.maps)(graph, depth="rows")
        close(case.linearised.energy_rows()[s], alone.energy_rows()[0], 1e-11)
        (row,) = alone.rows_along(keys.FORCES, [parts[s]])
        close(whole[s], row[0], 1e-11)


def test_the_order_of_edges_does_not_matter(painn):
    graph, maps = painn.backbone.graph(periodic()), chosen(painn, "all")
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0))
    edge_index, edge_shift = graph.edge_index[:, order], graph.edge_shift[order]
    mixed = replace(graph, edge_index=edge_index, edge_shift=edge_shift)
    one, other = (LinearModel(painn.backbone, maps)(g, depth="rows") for g in (graph, mixed))
    close(other.energy_rows(), one.energy_rows(), 1e-11)
    v = normal(1, maps.sketch.size)
    close(other.members(v)[keys.FORCES], one.members(v)[keys.FORCES], 1e-11)


# ---- sketches ----


def test_a_sketch_of_rows_is_the_sketch_of_all_weights_rows(painn):
    graph, u = painn.backbone.graph(periodic()), normal(13, 3)
    whole, sketched = (chosen(painn, "all", dimension) for dimension in (10**6, 50))
    p = {name: sketched.sketch.gather(torch.eye(50).double())[name] for name in whole.sketch.shapes}
    p = torch.cat([value.flatten(1) for value in p.values()], dim=1)  # [50, weights]
    rows, expected = (
        LinearModel(painn.backbone, maps)(graph, depth="rows") for maps in (sketched, whole)
    )
    close(rows.energy_rows(), expected.energy_rows() @ p.T, 1e-12)
    (found,), (all_weights,) = (list(one.rows_along(keys.FORCES, [u])) for one in (rows, expected))
    close(found, all_weights @ p.T, 1e-12)


def test_chosen_maps_alone_have_noise(painn):
    both, first = chosen(painn, "readout"), chosen(painn, "readout.0")
    graph = painn.backbone.graph(periodic())
    rows, own = (LinearModel(painn.backbone, maps)(graph).energy_rows() for maps in (both, first))
    assert list(first.roles) == ["readout.0"]
    assert torch.equal(own, rows[:, : own.shape[1]])
    assert own.shape[1] < rows.shape[1]


# ---- directions ----


def test_random_sums_stand_for_all_components_on_average(painn):
    """sum_q u u^T has ones on its diagonal; of other entries the mean over seeds is zero."""
    graph = painn.backbone.graph(boxed_ammonia())
    total = torch.zeros(12, 12)
    for seed in range(200):
        directions = random_sums(graph, 5, [torch.Generator().manual_seed(seed)])
        u = torch.stack([one.flatten() for one in directions])
        assert u.shape == (5, 12)
        total += u.T @ u / 200
    torch.testing.assert_close(total.diagonal(), torch.ones(12))
    off = total - total.diag().diag()
    assert off.abs().max() < 5 * (1 / 5 / 200) ** 0.5


def test_random_sums_of_a_structure_do_not_depend_on_its_batch(painn):
    def generators(count: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(k) for k in range(count)]

    whole = random_sums(painn.backbone.graph(periodic()), 3, generators(2))
    alone = random_sums(painn.backbone.graph(periodic()[0]), 3, generators(1))
    for one, other in zip(whole, alone, strict=True):
        assert torch.equal(one[:9], other)


@pytest.mark.parametrize("seed", [None, 0])
def test_components_are_each_taken_once(painn, seed: int | None):
    graph = painn.backbone.graph(periodic())  # 27 and 12 components
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    found = list(components(graph, 100, generator))
    assert len(found) == 27
    assert torch.equal(sum(found), torch.ones(13, 3).double())
    for k, u in enumerate(found):
        assert u[:9].sum() == 1
        assert u[9:].sum() == float(k < 12)


def test_rows_are_of_the_structures_that_have_a_direction(painn):
    graph = painn.backbone.graph(periodic())
    linearised = LinearModel(painn.backbone, chosen(painn, "all"))(graph, depth="rows")
    for k, (u, present, rows) in enumerate(force_rows(linearised, components(graph, 14))):
        assert present.tolist() == [True, k < 12]
        assert torch.equal(rows, next(linearised.rows_along(keys.FORCES, [u]))[present])


def test_few_components_are_spread_over_the_structure(painn):
    graph = painn.backbone.graph(quartz())
    few = sum(components(graph, 6, torch.Generator().manual_seed(0)))
    assert few.sum() == 6
    assert few[2:].any()


# ---- what is left behind, and errors ----


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) for part in model.modules())


def test_nothing_of_the_model_is_changed(painn):
    before = copy.deepcopy(painn.state_dict())
    maps = chosen(painn, "all")
    LinearModel(painn.backbone, maps)(painn.backbone.graph(periodic())).members(
        normal(1, maps.sketch.size)
    )
    assert all(torch.equal(value, before[name]) for name, value in painn.state_dict().items())
    assert all(parameter.grad is None for parameter in painn.parameters())
    assert hooks(painn) == 0


class InPlace(nn.Module):
    """An embedding, messages, and a readout whose activation works in place."""

    def __init__(self, inplace: bool, breaks: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.readout = nn.Sequential(nn.Linear(6, 5), nn.SiLU(inplace=inplace), nn.Linear(5, 1))
        self.idle = nn.Linear(1, 1)
        self.breaks = breaks

    def forward(self, graph: AtomGraph) -> Tensor:
        receiver, sender = graph.edge_index
        weight = torch.exp(-graph.vectors().norm(dim=1, keepdim=True))
        h = self.embedding(graph.numbers)
        h = h.index_add(0, receiver, weight * h[sender])
        energies = self.readout(h).squeeze(1)
        if self.breaks:
            raise KeyError("broken")
        return energies


def foreign(module: nn.Module) -> blips.BayesianPotential:
    return blips.bayesianize(Adapter(module, lambda model, graph: model(graph), 3.0)).double()


def test_outputs_that_are_changed_in_place_are_refused():
    potential = foreign(InPlace(inplace=True))
    graph = potential.backbone.graph(boxed_ammonia())
    with pytest.raises(ConversionError, match=r"'model.readout.0' is changed in place"):
        LinearModel(potential.backbone, chosen(potential, "all"))(graph)
    last = chosen(potential, "*readout.2")
    LinearModel(potential.backbone, last)(graph).energy_rows()  # nothing follows this one


def test_maps_that_do_not_run_are_refused():
    potential = foreign(InPlace(inplace=False))
    graph = potential.backbone.graph(boxed_ammonia())
    maps = chosen(potential, "*readout.2")
    idle = ChosenMaps({"model.idle": keys.NODE}, maps.sketch, maps.last)
    with pytest.raises(ConversionError, match="none of the chosen maps ran"):
        LinearModel(potential.backbone, idle)(graph)


def test_a_model_that_fails_is_left_without_hooks():
    potential = foreign(InPlace(inplace=False))
    graph, maps = potential.backbone.graph(boxed_ammonia()), chosen(potential, "all")
    potential.backbone.get_submodule("model").breaks = True
    with pytest.raises(KeyError):
        LinearModel(potential.backbone, maps)(graph)
    assert hooks(potential) == 0


def test_a_watched_model_may_run_in_another_thread():
    backbone = PaiNN(**TINY)
    graph = backbone.graph([molecule("NH3")])
    layer = next(name for name, m in backbone.named_modules() if isinstance(m, nn.Linear))
    readout = backbone.get_submodule(layer)
    with watched(backbone, [layer]) as calls, inputs_of(readout) as inputs:
        other = threading.Thread(target=backbone, args=(graph,))
        other.start()
        other.join()
        assert calls == inputs == []
        backbone(graph)
    assert len(calls) == len(inputs) > 0
