"""Signs, noise and row sums in one pass over memory, by compiled code where it was built.

``kernels.c`` is compiled when the package is installed on a machine with a C compiler. It serves
single-precision tensors on the processor; everything else, and every machine without it, takes the
formulas of torch here, which give the same numbers to rounding.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from blips.bayes.compiled import address, is_for_compiled, load_library

SIGNS = 32
"""Signs in one int32 word."""


def flip(x: Tensor, bits: Tensor, coef: Tensor | None = None) -> Tensor:
    """``x * signs``, times ``sqrt(coef)`` of its row.

    Args:
        x: ``[rows, *irrep, channels]``.
        bits: the signs, packed (``blips.bayes.random.sign_bits``).
        coef: ``[rows]``.
    """
    if (library := library_for(x)) is None:
        flipped = _flipped(x, bits)
        return flipped if coef is None else flipped.mul_(per_row(coef.sqrt(), x))
    x, bits = x.contiguous(), bits.contiguous()
    coef = None if coef is None else coef.contiguous()
    out = torch.empty_like(x)
    library.blips_flip(address(x), address(bits), address(coef), address(out), *_sizes(x))
    return out


def flip_(x: Tensor, bits: Tensor) -> Tensor:
    """``x * signs`` in the memory of x, which is contiguous."""
    if (library := library_for(x)) is None:
        return x.copy_(_flipped(x, bits))
    bits = bits.contiguous()
    library.blips_flip(address(x), address(bits), None, address(x), *_sizes(x))
    return x


def add_flipped_(z: Tensor, x: Tensor, bits: Tensor, coef: Tensor) -> Tensor:
    """``z + sqrt(coef) * x * signs`` in the memory of z; both contiguous."""
    if (library := library_for(x)) is None:
        return z.addcmul_(_flipped(x, bits), per_row(coef.sqrt(), x))
    bits, coef = bits.contiguous(), coef.contiguous()
    library.blips_add_flipped(address(x), address(bits), address(coef), address(z), *_sizes(x))
    return z


def add_local_(z: Tensor, noise: Tensor, var: Tensor, floor: float, coef: Tensor) -> Tensor:
    """``z + slope * v`` in the memory of z, with ``slope = sqrt(coef / v) * noise``.

    ``v = var + floor``. All ``[rows, channels]`` and contiguous, coef ``[rows]``. The slope takes
    the memory of the noise.
    """
    if (library := library_for(z)) is None:
        var = var + floor
        slope = noise.mul_(per_row(coef.sqrt(), z)).mul_(var.rsqrt())
        return z.addcmul_(slope, var)
    coef = coef.contiguous()
    library.blips_add_local(
        address(noise), address(var), address(coef), address(z), floor, *z.shape
    )
    return z


def multiply_and_dot(x: Tensor, y: Tensor, coef: Tensor) -> Tensor:
    """Make x, contiguous, into ``x * y``; return ``row_dot / (2 coef)`` of the new x and y."""
    if (library := library_for(x)) is None:
        return row_dot(x.mul_(y), y).div_(coef + coef)
    y, coef, out = y.contiguous(), coef.contiguous(), coef.new_empty(len(coef))
    sizes = len(x), _width(x)
    library.blips_multiply_and_dot(address(x), address(y), address(coef), address(out), *sizes)
    return out


def flip_and_dot(x: Tensor, bits: Tensor, y: Tensor, coef: Tensor) -> Tensor:
    """Make x, contiguous, into ``x * signs``; return ``row_dot / (2 coef)`` of the new x and y."""
    if (library := library_for(x)) is None:
        return row_dot(flip_(x, bits), y).div_(coef + coef)
    bits, y, coef = bits.contiguous(), y.contiguous(), coef.contiguous()
    out = coef.new_empty(len(coef))
    given = (address(tensor) for tensor in (x, bits, y, coef, out))
    library.blips_flip_and_dot(*given, *_sizes(x))
    return out


def shared_noise_(
    z: Tensor,
    first: int,
    mean: Tensor,
    noise: Tensor,
    group: Tensor,
    bits: Tensor,
    scale: Tensor,
) -> None:
    """Write ``mean + scale * signs * noise`` to R rows of each of K samples.

    Args:
        z: of all rows, ``[K * E, channels]``, contiguous.
        first: of the R rows.
        mean: of all samples, ``[R, channels]``.
        noise: of G groups of samples, ``[G * R, channels]``.
        group: of each sample, ``[K]`` of int64.
        bits: the signs, packed, of ``[K * E, channels]``.
        scale: ``[K * E]``.
    """
    rows = slice(first, first + len(mean))
    if (library := library_for(mean)) is None:
        flipped = _flipped(_of_samples(noise, group, mean), _part(bits, group, rows))
        flipped *= per_row(_part(scale, group, rows), flipped)
        z.view(len(group), -1, z.shape[1])[:, rows] = flipped.view(len(group), *mean.shape) + mean
        return
    given = [x.contiguous() for x in (mean, noise, group, bits, scale)]
    sizes = (first, len(z) // len(group), len(group), *mean.shape)
    library.blips_shared_noise(*map(address, given), address(z), *sizes)


def shared_slopes_(
    by_x: Tensor,
    by_scale: Tensor,
    first: int,
    grad: Tensor,
    mean_slope: Tensor,
    noise: Tensor,
    noise_slope: Tensor,
    group: Tensor,
    bits: Tensor,
    scale: Tensor,
) -> None:
    """Write gradients of `shared_noise_` for R rows of each sample.

    Args:
        by_x: by what mean and noise depend on, ``[K * E]``, contiguous.
        by_scale: by the scale, ``[K * E]``, contiguous.
        first: see `shared_noise_`, as for all that is not said here.
        grad: of z.
        mean_slope: derivative of the mean, ``[R, channels]``.
        noise: of the groups.
        noise_slope: its derivative.
        group: of each sample.
        bits: the signs.
        scale: of each row.
    """
    rows = slice(first, first + len(mean_slope))
    if (library := library_for(mean_slope)) is None:
        grad, scale = _part(grad, group, rows), _part(scale, group, rows)
        flipped = _flipped(grad, _part(bits, group, rows))
        of_mean = row_dot(grad, mean_slope.repeat(len(group), 1))
        of_noise = row_dot(flipped, _of_samples(noise_slope, group, mean_slope))
        by_noise = row_dot(flipped, _of_samples(noise, group, mean_slope))
        for whole, part in ((by_x, of_mean + scale * of_noise), (by_scale, by_noise)):
            whole.view(len(group), -1)[:, rows] = part.view(len(group), -1)
        return
    tensors = (grad, mean_slope, noise, noise_slope, group, bits, scale, by_x, by_scale)
    given = [x.contiguous() for x in tensors]
    sizes = (first, len(by_x) // len(group), len(group), *mean_slope.shape)
    library.blips_shared_slopes(*map(address, given), *sizes)


def random_words(seeds: Tensor, first: int, count: int) -> Tensor:
    """Words number first, first + 1, ... of the streams of K seeds, ``[K, count]`` of int64.

    SplitMix64: each word is a hash of the seed and its number, so no state is carried along.
    """
    if seeds.is_cpu and (found := library()) is not None:
        out = seeds.new_empty((len(seeds), count))
        found.blips_random_words(address(seeds), address(out), first, *out.shape)
        return out
    number = torch.arange(first, first + count, device=seeds.device)
    word = seeds[:, None] + number * _signed(0x9E3779B97F4A7C15)
    word = (word ^ _shifted(word, 30)) * _signed(0xBF58476D1CE4E5B9)
    word = (word ^ _shifted(word, 27)) * _signed(0x94D049BB133111EB)
    return word ^ _shifted(word, 31)


def random_values(seeds: Tensor, first: int, count: int, table: Tensor) -> Tensor:
    """``table[index]``, ``[K, count]``, the indices being 16-bit parts of `random_words`.

    Args:
        seeds: of the K streams.
        first: number of the word that the first four indices are taken from.
        count: of values.
        table: 65536 values.
    """
    if (library := library_for(table)) is not None:
        out = table.new_empty((len(seeds), count))
        library.blips_random_values(address(seeds), address(table), address(out), first, *out.shape)
        return out
    index = random_words(seeds, first, -(-count // 4)).view(torch.uint16)[:, :count]
    return table.index_select(0, index.to(torch.int32).flatten()).view(index.shape)


def row_dot(x: Tensor, y: Tensor) -> Tensor:
    """Sum over all but the rows of ``x * y``, ``[rows]``."""
    if (library := library_for(x)) is None:
        return (x * y).flatten(1).sum(1)
    x, y = x.contiguous(), y.contiguous()
    out = x.new_empty(x.shape[0])
    library.blips_row_dot(address(x), address(y), address(out), x.shape[0], _width(x))
    return out


def per_row(values: Tensor, x: Tensor) -> Tensor:
    """One value per row in a shape that multiplies x."""
    return values.view(-1, *(1,) * (x.ndim - 1))


def sign_mask(bits: Tensor, channels: int) -> Tensor:
    """Unpack bits to ``[rows, channels]`` of int32: the sign bit of a float, set or not.

    Shifts by 0..31, here products with powers of two, bring every bit of a word to the place of the
    sign bit.
    """
    powers, sign_bit = _powers_and_sign_bit(bits.device)
    mask = (bits * powers).bitwise_and_(sign_bit).flatten(1)
    return mask if mask.shape[1] == channels else mask[:, :channels]


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - 2**64


def _shifted(word: Tensor, places: int) -> Tensor:
    """The unsigned word shifted to the right."""
    return (word >> places) & (2 ** (64 - places) - 1)


def _flipped(x: Tensor, bits: Tensor) -> Tensor:
    """``x * signs`` by torch; in single precision a sign is the XOR of a bit."""
    mask = sign_mask(bits, x.shape[-1])
    mask = mask.view(mask.shape[0], *(1,) * (x.ndim - 2), mask.shape[1])
    if x.dtype == torch.float32:
        return (x.view(torch.int32) ^ mask).view(torch.float32)
    return x * torch.where(mask < 0, -1.0, 1.0).to(x.dtype)


def library_for(x: Tensor) -> ctypes.CDLL | None:
    """The compiled code, where it is the best way to handle x."""
    return library() if is_for_compiled(x) else None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled ``kernels.c``; None where it was not built."""
    return load_library(Path(__file__).parent, "_kernels", _declare)


def _declare(library: ctypes.CDLL) -> None:
    """``ptrdiff_t`` has the size of ``c_ssize_t``."""
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    library.blips_flip.argtypes = [pointer] * 4 + [size] * 3
    library.blips_add_flipped.argtypes = [pointer] * 4 + [size] * 3
    library.blips_add_local.argtypes = [pointer] * 4 + [ctypes.c_float] + [size] * 2
    library.blips_multiply_and_dot.argtypes = [pointer] * 4 + [size] * 2
    library.blips_flip_and_dot.argtypes = [pointer] * 5 + [size] * 3
    library.blips_random_values.argtypes = [pointer] * 3 + [ctypes.c_uint64] + [size] * 2
    library.blips_random_words.argtypes = [pointer] * 2 + [ctypes.c_uint64] + [size] * 2
    library.blips_shared_noise.argtypes = [pointer] * 6 + [size] * 5
    library.blips_shared_slopes.argtypes = [pointer] * 9 + [size] * 5
    library.blips_row_dot.argtypes = [pointer] * 3 + [size] * 2
    library.blips_add_ends.argtypes = [pointer] * 3 + [size] * 2
    library.blips_sum_at_ends.argtypes = [pointer] * 3 + [size] * 2


def _of_samples(rows: Tensor, group: Tensor, like: Tensor) -> Tensor:
    """The rows of each sample's group, ``[G * R, channels] -> [K * R, channels]``."""
    return rows.view(-1, *like.shape).index_select(0, group).flatten(0, 1)


def _part(x: Tensor, group: Tensor, rows: slice) -> Tensor:
    """Some rows of each sample, ``[K * E, ...] -> [K * R, ...]``."""
    return x.view(len(group), len(x) // len(group), *x.shape[1:])[:, rows].flatten(0, 1)


def _width(x: Tensor) -> int:
    """Elements of a row."""
    return x.numel() // max(1, x.shape[0])


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Rows, components of the irrep, channels."""
    rows, channels = x.shape[0], x.shape[-1]
    return rows, x.numel() // max(1, rows * channels), channels


@cache
def _powers_and_sign_bit(device: torch.device) -> tuple[Tensor, Tensor]:
    """2^0 ... 2^31, and the sign of a single-precision float, as int32."""
    powers = 1 << torch.arange(SIGNS, dtype=torch.int32, device=device)
    return powers, powers[-1].clone()
