import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blips.bayes import random
from blips.bayes.kernels import sign_mask
from blips.bayes.random import BitSource, normals, quick_normals, sign_bits

LONG = 3 * random.STREAM + 5  # several streams, the last one incomplete


def seeded(count: int, first: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + k) for k in range(count)]


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def quick(shape: tuple[int], generators: list[torch.Generator], dtype: torch.dtype):
    """``quick_normals`` behind the signature of ``normals``."""
    (size,) = shape
    return quick_normals(BitSource(generators), size, 1, dtype).view(len(generators), size)


BOTH = pytest.mark.parametrize("draw", [normals, quick])


@BOTH
@pytest.mark.statistical
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [random.STREAM, 10 * random.STREAM])
def test_normals_follow_the_normal_distribution(draw, size: int, dtype: torch.dtype):
    x = draw((size,), seeded(1), dtype)[0].double()
    cdf = 0.5 * (1 + torch.erf(x.sort().values / math.sqrt(2)))
    distance = (cdf - (torch.arange(size) + 0.5) / size).abs().max()
    assert distance < 2.0 / math.sqrt(size)  # Kolmogorov-Smirnov, p < 1e-3
    assert abs(x.mean()) < 4 / math.sqrt(size)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / size)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / size)


def test_quick_normals_are_drawn_from_values_with_the_stated_moments():
    values = random._quantiles(torch.float64, torch.device("cpu"))
    assert abs(values.mean()) < 1e-12
    assert abs(values.square().mean() - 1) < 1e-12
    assert abs((values**4).mean() - 2.9998) < 1e-4
    assert abs(values.max() - 4.39) < 0.005
    assert torch.isin(quick((1000,), seeded(1), torch.float64), values).all()


@pytest.mark.statistical
def test_neighbouring_quick_normals_are_independent():
    x = quick_normals(BitSource(seeded(1)), 100_000, 4, torch.float64)
    error = 5 / math.sqrt(len(x))
    assert (torch.corrcoef(x.T) - torch.eye(4)).abs().max() < error
    assert (torch.corrcoef(x.T.square()) - torch.eye(4)).abs().max() < error


@pytest.mark.statistical
def test_streams_of_a_long_draw_are_uncorrelated():
    streams = normals((16 * random.STREAM,), seeded(1), torch.float32).view(16, -1)
    correlation = torch.corrcoef(streams) - torch.eye(16)
    assert correlation.abs().max() < 5 / math.sqrt(random.STREAM)


@BOTH
@pytest.mark.parametrize("size", [7, 1000, LONG])
def test_a_replicas_normals_depend_on_its_generator_alone(draw, size: int):
    together = draw((size,), seeded(3), torch.float32)
    alone = torch.cat([draw((size,), seeded(1, first=k), torch.float32) for k in range(3)])
    assert torch.equal(together, alone)
    assert not torch.equal(together[0], together[1])


@BOTH
def test_normals_do_not_depend_on_the_number_of_threads(draw, restore_threads: None):
    draws: list[torch.Tensor] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        draws.append(draw((LONG,), seeded(2), torch.float32))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])


@BOTH
@pytest.mark.parametrize("size", [1000, LONG])
def test_successive_draws_differ(draw, size: int):
    generators = seeded(1)
    first = draw((size,), generators, torch.float32)
    assert not torch.equal(first, draw((size,), generators, torch.float32))


@given(rows=st.integers(0, 5), channels=st.integers(1, 70), replicas=st.integers(1, 3))
def test_signs_change_nothing_but_the_sign(rows: int, channels: int, replicas: int):
    (bits,) = sign_bits(BitSource(seeded(replicas)), rows, channels)
    number = torch.rand(rows * replicas, channels)
    signed = (number.view(torch.int32) ^ sign_mask(bits, channels)).view(torch.float32)
    assert torch.equal(signed.abs(), number)


@pytest.mark.parametrize("rows", [5, 2 * random.AHEAD])
def test_a_replicas_signs_depend_on_its_generator_alone(rows: int):
    together = BitSource(seeded(3))
    alone = [BitSource(seeded(1, first=k)) for k in range(3)]
    draws: list[torch.Tensor] = []
    for channels in (33, 3, 33, 64):
        draws += sign_bits(together, rows, channels)
        assert torch.equal(
            draws[-1], torch.cat([sign_bits(source, rows, channels)[0] for source in alone])
        )
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.statistical
def test_signs_are_fair_and_uncorrelated_between_rows_and_channels():
    samples, rows, channels = 20_000, 2, 40
    (bits,) = sign_bits(BitSource(seeded(1)), samples * rows, channels)
    signs = torch.where(sign_mask(bits, channels) == 0, 1.0, -1.0)
    signs = signs.reshape(samples, rows * channels)
    covariance = signs.T @ signs / samples
    assert signs.mean(0).abs().max() < 5 / math.sqrt(samples)
    assert (covariance - torch.eye(rows * channels)).abs().max() < 5.5 / math.sqrt(samples)
