"""Rows that a model gathered, multiplied on its nodes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import blips
from blips.bayes import gathered
from blips.bayes.gathered import WatchedGathers, linear_of_parts, parts_of, watched_where_it_pays
from helpers import quartz, small_orb

WIDE = gathered.LEAST_CHANNELS
NODES = 5


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def edges_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(NODES, (2, count), generator=torch.Generator().manual_seed(seed))


GATHERS = {
    "brackets": lambda x, index: x[index],
    "index_select": lambda x, index: x.index_select(0, index),
    "torch.index_select": lambda x, index: torch.index_select(x, 0, index),
    "with names": lambda x, index: torch.index_select(input=x, dim=0, index=index),
}


@pytest.mark.parametrize("gather", GATHERS.values(), ids=GATHERS)
@pytest.mark.parametrize("dim", [1, -1])
def test_a_model_is_seen_to_gather_and_concatenate(gather, dim):
    nodes, pair, (first, second) = normal(NODES, WIDE), normal(12, 3), edges_of(12)
    with WatchedGathers():
        h = torch.cat([pair, gather(nodes, first), gather(nodes, second)], dim=dim)
    found = parts_of(h)
    assert [part.index is None for part in found] == [True, False, False]
    assert found[1].rows is nodes
    assert torch.equal(found[2].index, second)


@settings(max_examples=30, deadline=None)
@given(
    order=st.permutations(["first", "second", "pair"]),
    count=st.integers(2 * NODES, 30),
    seed=st.integers(0, 99),
    has_bias=st.booleans(),
)
def test_products_and_gradients_are_those_of_the_rows(order, count, seed, has_bias):
    weight = normal(7, 2 * WIDE + 3, seed=seed + 1)
    bias = normal(7, seed=seed + 2) if has_bias else None
    first, second = edges_of(count, seed)
    results = []
    for is_watched in (True, False):
        nodes = normal(NODES, WIDE, seed=seed).requires_grad_()
        pair = normal(count, 3, seed=seed + 3).requires_grad_()
        with WatchedGathers():
            parts = {"first": nodes[first], "second": nodes[second], "pair": pair}
            h = torch.cat([parts[name] for name in order], dim=1)
        if is_watched:
            assert len(parts_of(h)) == 3
            z = linear_of_parts(parts_of(h), weight, bias)
        else:
            z = F.linear(h, weight, bias)
        results.append((z.detach(), *torch.autograd.grad(z.sin().sum(), [nodes, pair])))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_indices_may_count_from_the_end():
    nodes, index = normal(NODES, WIDE), edges_of(12)[0] - NODES
    with WatchedGathers():
        h = nodes[index]
    weight = normal(4, WIDE, seed=1)
    torch.testing.assert_close(linear_of_parts(parts_of(h), weight), F.linear(nodes[index], weight))


def test_squares_are_those_of_the_rows():
    nodes, (first, _) = normal(NODES, WIDE), edges_of(12)
    with WatchedGathers():
        h = nodes[first]
    weight = normal(4, WIDE, seed=1)
    (part,) = parts_of(h)
    assert part.index is not None
    found = linear_of_parts([part.squared()], weight.square())
    torch.testing.assert_close(found, F.linear(h.square(), weight.square()))


@pytest.mark.parametrize("changed", ["nodes", "gathered", "rows"])
def test_what_was_changed_in_place_is_taken_as_it_is(changed):
    nodes, pair, (first, second) = normal(NODES, WIDE), normal(12, 3), edges_of(12)
    with WatchedGathers():
        sent = nodes[first]
        if changed == "gathered":
            sent.mul_(2.0)
        h = torch.cat([sent, nodes[second], pair], dim=1)
        if changed == "rows":
            h[:, 0] = 0.0
        if changed == "nodes":
            nodes.mul_(3.0)
    weight = normal(4, h.shape[1], seed=1)
    torch.testing.assert_close(linear_of_parts(parts_of(h), weight), F.linear(h, weight))
    if changed == "gathered":
        assert [part.index is None for part in parts_of(h)] == [True, False, True]


@pytest.mark.parametrize(
    ("channels", "rows"), [(WIDE - 1, 12), (WIDE, 2 * NODES - 1)], ids=["narrow", "few"]
)
def test_gathers_that_do_not_pay_are_left_alone(channels, rows):
    nodes = normal(NODES, channels)
    with WatchedGathers():
        h = nodes[edges_of(rows)[0]]
    assert [part.rows is h for part in parts_of(h)] == [True]


def test_other_ways_to_index_are_left_alone():
    nodes = normal(NODES, WIDE)
    with WatchedGathers():
        others = [nodes[1:3], nodes[0], nodes[nodes > 0], nodes[None], nodes[:, [0, 1]]]
        others += [nodes.index_select(1, torch.arange(20) % 3), torch.cat([nodes, nodes])]
        others += [nodes[torch.zeros(2, 9, dtype=torch.long)], nodes[torch.ones(5, dtype=bool)]]
    assert all(part.rows is x for x in others for part in parts_of(x))


def test_it_is_watched_where_it_pays():
    wide, narrow = nn.Linear(2 * WIDE + 1, 4), nn.Linear(2 * WIDE, 4)
    many = gathered.LEAST_ROWS
    for layers, rows, expected in (
        ([narrow, wide], many, True),
        ([wide], many - 1, False),
        ([narrow], many, False),
        ([], many, False),
    ):
        found = watched_where_it_pays(layers, rows)
        assert isinstance(found, WatchedGathers) == expected


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", ["orb-direct", "orb"])
def test_one_pass_of_a_foreign_model_is_the_same(name, monkeypatch):
    pytest.importorskip("orb_models")
    potential = blips.bayesianize(small_orb(name, latent_dim=WIDE))
    atoms = quartz(0.1).repeat((2, 2, 1))
    found = potential.one_pass(atoms)
    maps = [record.map_name for record in found.records if len(parts_of(record.h)) == 3]
    assert len(maps) == 2  # one in each step of message passing
    monkeypatch.setattr(gathered, "LEAST_ROWS", 10**9)
    expected = potential.one_pass(atoms)
    assert all(len(parts_of(record.h)) == 1 for record in expected.records)
    for key in ("energy", "forces"):
        torch.testing.assert_close(found.outputs[key], expected.outputs[key], rtol=1e-4, atol=1e-4)
    var, expected_var = found.attribution(), expected.attribution()
    torch.testing.assert_close(var.energy_var, expected_var.energy_var, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(var.atom_var, expected_var.atom_var, rtol=1e-3, atol=0.0)
