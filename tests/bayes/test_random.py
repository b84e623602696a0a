import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blips.bayes import random
from blips.bayes.random import normals, sign_bits, sign_mask

LONG = 3 * random.STREAM + 5  # several streams, the last one incomplete


def seeded(count: int, first: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + k) for k in range(count)]


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.statistical
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [random.STREAM, 20 * random.STREAM])
def test_normals_follow_the_normal_distribution(size: int, dtype: torch.dtype):
    x = normals((size,), seeded(1), dtype)[0].double()
    cdf = 0.5 * (1 + torch.erf(x.sort().values / math.sqrt(2)))
    distance = (cdf - (torch.arange(size) + 0.5) / size).abs().max()
    assert distance < 2.0 / math.sqrt(size)  # Kolmogorov-Smirnov, p < 1e-3
    assert abs(x.mean()) < 4 / math.sqrt(size)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / size)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / size)


def test_normals_have_the_requested_std():
    x = normals((100,), seeded(2), torch.float64)
    assert torch.allclose(normals((100,), seeded(2), torch.float64, std=0.5), 0.5 * x)


@pytest.mark.statistical
def test_streams_of_a_long_draw_are_uncorrelated():
    streams = normals((16 * random.STREAM,), seeded(1), torch.float32).view(16, -1)
    correlation = torch.corrcoef(streams) - torch.eye(16)
    assert correlation.abs().max() < 5 / math.sqrt(random.STREAM)


@pytest.mark.parametrize("size", [7, 1000, LONG])
def test_a_replicas_normals_depend_on_its_generator_alone(size: int):
    together = normals((size,), seeded(3), torch.float32)
    alone = torch.cat([normals((size,), seeded(1, first=k), torch.float32) for k in range(3)])
    assert torch.equal(together, alone)
    assert not torch.equal(together[0], together[1])


def test_normals_do_not_depend_on_the_number_of_threads(restore_threads: None):
    draws: list[torch.Tensor] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        draws.append(normals((LONG,), seeded(2), torch.float32))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("size", [1000, LONG])
def test_successive_draws_differ(size: int):
    generators = seeded(1)
    first = normals((size,), generators, torch.float32)
    assert not torch.equal(first, normals((size,), generators, torch.float32))


@given(rows=st.integers(0, 5), channels=st.integers(1, 70), replicas=st.integers(1, 3))
def test_signs_change_nothing_but_the_sign(rows: int, channels: int, replicas: int):
    bits = sign_bits(rows, [channels], seeded(replicas))[0]
    number = torch.rand(rows * replicas, channels)
    signed = (number.view(torch.int32) ^ sign_mask(bits, channels)).view(torch.float32)
    assert torch.equal(signed.abs(), number)


def test_a_replicas_signs_depend_on_its_generator_alone():
    together = sign_bits(5, [33, 3], seeded(3))
    alone = [sign_bits(5, [33, 3], seeded(1, first=k)) for k in range(3)]
    for layer in (0, 1):
        assert torch.equal(together[layer], torch.cat([bits[layer] for bits in alone]))


@pytest.mark.statistical
def test_signs_are_fair_and_uncorrelated_between_rows_and_channels():
    samples, rows, channels = 20_000, 2, 40
    (bits,) = sign_bits(samples * rows, [channels], seeded(1))
    signs = torch.where(sign_mask(bits, channels) == 0, 1.0, -1.0)
    signs = signs.reshape(samples, rows * channels)
    covariance = signs.T @ signs / samples
    assert signs.mean(0).abs().max() < 5 / math.sqrt(samples)
    assert (covariance - torch.eye(rows * channels)).abs().max() < 5.5 / math.sqrt(samples)
