"""Coordinates of weights: the weights themselves, or a signed hash of them."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blips.bayes.sketch import Sketch, _folded
from blips.errors import InputError

SHAPES = {"first": (2, 3), "second": (5,), "third[0]": (4, 1, 2)}  # 6 + 5 + 8 = 19 weights
MASK = 2**64 - 1


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def matrix(sketch: Sketch) -> Tensor:
    """P, [weights, d], column by column."""
    unit = torch.eye(sketch.size, dtype=torch.float64)
    return torch.cat([sketch.gather(unit)[name].flatten(1) for name in sketch.shapes], dim=1).T


def split_mix(x: int) -> int:
    """The finaliser of SplitMix64 as Steele et al. (2014) print it."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


# ---- few weights: the identity ----


@pytest.mark.parametrize("dimension", [19, 20, 1000])
def test_few_weights_are_their_own_coordinates(dimension):
    sketch = Sketch(SHAPES, dimension, seed=3)
    assert sketch.size == sketch.num_weights == 19
    assert torch.equal(matrix(sketch), torch.eye(19, dtype=torch.float64))


def test_coordinates_follow_the_order_of_the_matrices():
    sketch, v = Sketch(SHAPES, 19), normal(2, 19)
    assert torch.equal(sketch.gather(v)["second"], v[:, 6:11])
    assert torch.equal(sketch.gather(v)["third[0]"], v[:, 11:].view(2, 4, 1, 2))


def test_one_weight_more_than_the_dimension_is_hashed():
    sketch = Sketch(SHAPES, 18)
    assert sketch.size == 18
    assert not torch.equal(matrix(sketch)[:18], torch.eye(18, dtype=torch.float64))


# ---- gather and scatter ----


@given(dimension=st.integers(1, 25), seed=st.integers(0, 99), count=st.integers(1, 3))
def test_scatter_is_the_transpose_of_gather(dimension, seed, count):
    sketch = Sketch(SHAPES, dimension, seed)
    v = normal(count, sketch.size, seed=seed)
    a = {name: normal(count, *shape, seed=seed + 1) for name, shape in SHAPES.items()}
    there = sum((sketch.gather(v)[name] * a[name]).flatten(1).sum(1) for name in SHAPES)
    torch.testing.assert_close((v * sketch.scatter(a)).sum(1), there, rtol=1e-12, atol=1e-12)


def test_each_weight_has_one_bucket_and_a_sign():
    p = matrix(Sketch(SHAPES, 7, seed=1))
    assert torch.equal(p.abs().sum(1), torch.ones(19, dtype=torch.float64))
    assert set(p.flatten().tolist()) == {-1.0, 0.0, 1.0}


def test_matrices_that_were_not_applied_count_as_zero():
    sketch, value = Sketch(SHAPES, 7), normal(2, 5)
    zeros = {name: torch.zeros(2, *shape).double() for name, shape in SHAPES.items()}
    whole = sketch.scatter({**zeros, "second": value})
    assert torch.equal(sketch.scatter({"second": value}), whole)


def test_scatter_can_be_differentiated():
    sketch = Sketch(SHAPES, 7)
    value, along = normal(1, 5).requires_grad_(), normal(1, 7, seed=1)
    (slope,) = torch.autograd.grad((sketch.scatter({"second": value}) * along).sum(), value)
    assert torch.equal(slope, sketch.gather(along)["second"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_precision_stays(dtype):
    sketch = Sketch(SHAPES, 7)
    assert sketch.gather(torch.ones(1, 7, dtype=dtype))["first"].dtype == dtype
    assert sketch.scatter({"first": torch.ones(1, 2, 3, dtype=dtype)}).dtype == dtype


# ---- the hash ----


def test_the_hash_is_the_same_on_every_machine():
    """Draws of a released posterior are coordinates: another hash would make them noise."""
    sketch = Sketch({"w": (12,)}, 5, seed=7)
    signed_bucket = (matrix(sketch) * (1 + torch.arange(5))).sum(1).int().tolist()
    assert signed_bucket == [4, 2, 5, -3, -5, -4, -1, -3, 3, -3, 5, 1]


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_the_hash_is_split_mix(seed):
    weights, dimension = 300, 11
    p = matrix(Sketch({"w": (weights,)}, dimension, seed))
    for i in range(weights):
        bits = split_mix(i + (seed << 40)) & (2**62 - 1)
        assert p[i, (bits >> 1) % dimension] == (-1.0 if bits & 1 else 1.0)


def test_seeds_have_hashes_of_their_own():
    hashes = [matrix(Sketch({"w": (50,)}, 10, seed)) for seed in range(20)]
    same = [float((a * b).sum()) for k, a in enumerate(hashes) for b in hashes[:k]]
    assert max(same) < 25  # of 50; each weight falls on its place again once in 20 times


@pytest.mark.parametrize("seed", [2**24, 2**40])
def test_large_seeds_are_seeds(seed):
    there, zero = (matrix(Sketch({"w": (50,)}, 10, s)) for s in (seed, 0))
    assert not torch.equal(there, zero)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (2**22, [-1, -3, 1, -4, -5, -2, -1, 5, -1, -2, 2, 2]),
        (2**40, [-2, -3, -2, 2, 3, 4, -4, 5, 3, -2, 2, 1]),
    ],
)
def test_large_seeds_are_folded_in_the_same_way_on_every_machine(seed, expected):
    sketch = Sketch({"w": (12,)}, 5, seed=seed)
    assert (matrix(sketch) * (1 + torch.arange(5))).sum(1).int().tolist() == expected


def test_matrices_of_one_shape_have_hashes_of_their_own():
    sketch = Sketch({"first": (4, 8), "second": (4, 8)}, 16)
    v = normal(1, 16)
    assert not torch.equal(sketch.gather(v)["first"], sketch.gather(v)["second"])


@pytest.mark.statistical
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("dimension", [50, 64])
def test_buckets_are_equally_full_and_signs_balanced(seed, dimension):
    """Within 5 standard deviations of the binomial distributions."""
    weights = 40_000
    p = Sketch({"w": (weights,)}, dimension, seed)
    ones = torch.ones(1, weights, dtype=torch.float64)
    signed = p.scatter({"w": ones})[0]  # [d], sums of signs
    bucket, _ = p._buckets["w"]
    counts = torch.bincount(bucket, minlength=dimension).double()
    expected = weights / dimension
    assert (counts - expected).abs().max() < 5 * expected**0.5
    assert signed.abs().max() < 5 * expected**0.5
    assert signed.sum().abs() < 5 * weights**0.5


@pytest.mark.statistical
def test_inner_products_survive_on_average_over_seeds():
    """Within 4 standard errors of 400 seeds; their spread falls as 1 / sqrt(d)."""
    weights, dimension, seeds = 60, 16, 400
    a, b = normal(1, weights), normal(1, weights, seed=1)
    found = []
    for seed in range(seeds):
        sketch = Sketch({"w": (weights,)}, dimension, seed)
        found.append(float((sketch.scatter({"w": a}) * sketch.scatter({"w": b})).sum()))
    products = torch.tensor(found, dtype=torch.float64)
    error = products.std() / seeds**0.5
    assert abs(products.mean() - (a * b).sum()) < 4 * error
    pairs = a.square().sum() * b.square().sum() + (a * b).sum() ** 2
    variance = (pairs - 2 * (a * b).square().sum()) / dimension  # pairs of different weights
    assert products.std() == pytest.approx(float(variance.sqrt()), rel=0.2)


# ---- equality, copies, errors ----


def test_use_does_not_change_what_a_sketch_is_equal_to():
    one, other = Sketch(SHAPES, 7, 1), Sketch(dict(SHAPES), 7, 1)
    one.gather(normal(1, 7))
    assert one == other
    assert one != Sketch(SHAPES, 8, 1)
    assert one != Sketch(SHAPES, 7, 2)


def test_copies_are_small_and_the_same():
    sketch = Sketch({"w": (1000,)}, 7, 1)
    before = matrix(sketch)
    kept = pickle.dumps(sketch)
    assert len(kept) < 1000
    assert torch.equal(matrix(pickle.loads(kept)), before)


@pytest.mark.parametrize(("shapes", "dimension"), [({}, 4), (SHAPES, 0), (SHAPES, -1)])
def test_nothing_to_sketch_is_refused(shapes, dimension):
    with pytest.raises(InputError, match="weights and a positive dimension"):
        Sketch(shapes, dimension)


def test_sketches_are_equal_by_what_they_are_not_by_what_they_have_worked_out():
    used, fresh = Sketch(SHAPES, 18), Sketch(SHAPES, 18, seed=0)
    for name in SHAPES:
        used.gather(normal(2, used.size))[name]
    assert used == fresh
    assert repr(used) == repr(fresh)
    assert used != Sketch(SHAPES, 18, seed=1)


def test_folded_seeds_leave_room_for_the_number_of_a_weight():
    assert all(0 <= _folded(2**22 + k) < 2**22 for k in range(100))
