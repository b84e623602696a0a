"""Compiled code and torch's formulas give the same numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blips.bayes import kernels
from blips.bayes.random import BitSource, sign_bits

pytestmark = pytest.mark.skipif(
    kernels.library() is None, reason="blips was installed without a C compiler"
)

SHAPES = st.tuples(
    st.integers(0, 9), st.sampled_from([(), (1,), (3,), (5,)]), st.integers(1, 100)
).map(lambda parts: (parts[0], *parts[1], parts[2]))


def tensors(shape: tuple[int, ...], count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def bits_of(shape: tuple[int, ...]) -> Tensor:
    return sign_bits(BitSource([torch.Generator().manual_seed(2)]), shape[0], shape[-1])[0]


def both_ways(function, *inputs: Tensor | float | None) -> list[list[Tensor]]:
    """The result and the inputs afterwards, by compiled code and (in double precision) by torch."""
    outcomes = []
    for dtype in (torch.float32, torch.float64):
        copies = [
            x.to(dtype, copy=True) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in inputs
        ]
        found = function(*copies)
        outcomes.append([x.double() for x in (found, *copies) if isinstance(x, Tensor)])
    return outcomes


def assert_same(function, *inputs: Tensor | float | None):
    compiled, by_torch = both_ways(function, *inputs)
    for a, b in zip(compiled, by_torch, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@given(SHAPES)
def test_flips(shape):
    x, z = tensors(shape, 2)
    coef, bits = torch.rand(shape[0]), bits_of(shape)
    assert_same(kernels.flip, x, bits)
    assert_same(kernels.flip, x, bits, coef)
    assert_same(kernels.flip_, x, bits)
    assert_same(kernels.add_flipped_, z, x, bits, coef)


@given(SHAPES)
def test_sums_over_rows(shape):
    assert_same(kernels.row_dot, *tensors(shape, 2))
    x, y = tensors(shape, 2)
    coef = 0.1 + torch.rand(shape[0])
    assert_same(kernels.multiply_and_dot, x, y, coef)
    assert_same(kernels.flip_and_dot, x, bits_of(shape), y, coef)


@given(st.integers(0, 9), st.integers(1, 100))
def test_local_noise(rows, channels):
    z, noise, var = tensors((rows, channels), 3)
    assert_same(kernels.add_local_, z, noise, var.square(), 1e-12, torch.rand(rows))


@given(st.integers(0, 9), st.integers(1, 700), st.integers(0, 2**40))
def test_random_values_are_those_of_the_words(streams, count, first):
    seeds = torch.randint(-(2**62), 2**62, (streams,))
    table = torch.randn(2**16)
    words = kernels.random_words(seeds, first, -(-count // 4)).view(torch.uint16)
    expected = table[words.to(torch.int64)[:, :count]]
    assert torch.equal(kernels.random_values(seeds, first, count, table), expected)
    in_double = kernels.random_values(seeds, first, count, table.double())
    assert torch.equal(in_double, expected.double())


def test_random_words_are_those_of_splitmix64(monkeypatch):
    seeds = torch.tensor([1234567, -5])
    compiled = kernels.random_words(seeds, 1, 5)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423,
                 4593380528125082431, 16408922859458223821]  # fmt: skip
    assert [word % 2**64 for word in compiled[0].tolist()] == published
    assert torch.equal(kernels.random_words(seeds, 3, 2), compiled[:, 2:4])
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert torch.equal(kernels.random_words(seeds, 1, 5), compiled)


def test_inputs_that_are_not_contiguous():
    x = torch.randn(6, 40).t()
    bits = bits_of((40, 6))
    assert torch.equal(kernels.flip(x, bits), kernels.flip(x.contiguous(), bits))
    y = torch.randn(40, 6)
    torch.testing.assert_close(kernels.row_dot(x, y), (x * y).sum(1))
    coef = torch.rand(40, 2)[:, 0]
    found = kernels.add_flipped_(torch.zeros(40, 6), y, bits, coef)
    assert torch.equal(found, kernels.flip(y, bits, coef))
    torch.testing.assert_close(found.abs(), y.abs() * coef.sqrt()[:, None])


def test_without_compiled_code_the_numbers_are_the_same(monkeypatch):
    x, coef, bits = torch.randn(20, 3, 33), torch.rand(20), bits_of((20, 3, 33))
    compiled = kernels.flip(x, bits, coef)
    monkeypatch.setattr(kernels, "library", lambda: None)
    torch.testing.assert_close(kernels.flip(x, bits, coef), compiled)
