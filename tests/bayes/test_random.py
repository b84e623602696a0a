import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blips.bayes.estimators import normals, signs
from blips.bayes.noise import seeded_generator


def seeded(count: int, first: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + k) for k in range(count)]


BOTH = pytest.mark.parametrize("draw", [normals, signs])


@pytest.mark.statistical
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normals_follow_the_normal_distribution(dtype: torch.dtype):
    size = 2**17
    x = normals((size,), seeded(1), dtype)[0].double()
    cdf = 0.5 * (1 + torch.erf(x.sort().values / math.sqrt(2)))
    distance = (cdf - (torch.arange(size) + 0.5) / size).abs().max()
    assert distance < 2.0 / math.sqrt(size)  # Kolmogorov-Smirnov, p < 1e-3
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / size)


@BOTH
@pytest.mark.parametrize("size", [7, 1000])
def test_a_replicas_numbers_depend_on_its_generator_alone(draw, size: int):
    together = draw((size,), seeded(3), torch.float32)
    alone = torch.cat([draw((size,), seeded(1, first=k), torch.float32) for k in range(3)])
    assert torch.equal(together, alone)
    assert not torch.equal(together[0], together[1])


@BOTH
def test_successive_draws_differ(draw):
    generators = seeded(1)
    first = draw((1000,), generators, torch.float32)
    assert not torch.equal(first, draw((1000,), generators, torch.float32))


@given(rows=st.integers(0, 5), channels=st.integers(1, 70), replicas=st.integers(1, 3))
def test_signs_are_one_or_minus_one_in_any_shape_and_type(rows: int, channels: int, replicas: int):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        drawn = signs((rows, channels), seeded(replicas), dtype)
        assert drawn.shape == (replicas, rows, channels)
        assert drawn.dtype == dtype
        assert bool((drawn.abs() == 1).all())


@pytest.mark.statistical
def test_signs_are_fair_and_uncorrelated_between_rows_and_channels():
    samples, rows, channels = 20_000, 2, 80
    drawn = signs((samples, rows * channels), seeded(1), torch.float32)[0]
    covariance = drawn.T @ drawn / samples
    assert drawn.mean(0).abs().max() < 5 / math.sqrt(samples)
    assert (covariance - torch.eye(rows * channels)).abs().max() < 5.5 / math.sqrt(samples)


def test_seeded_generators_are_functions_of_their_key_the_same_on_every_machine():
    keys = [("a", 0), ("a", 1), ("b", 0), ("a", 0, 0)]
    first = [int(torch.randint(2**62, (), generator=seeded_generator(*key))) for key in keys]
    assert len(set(first)) == len(keys)
    assert seeded_generator("sample", 0, 3).initial_seed() == 2931521215600375911
