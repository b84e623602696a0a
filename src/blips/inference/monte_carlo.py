r"""Monte Carlo over posterior samples, a given number of them or as many as the std needs.

    mean = 1/K sum_k y_k,    std = sqrt( 1/(K-1) sum_k (y_k - mean)^2 )

The standard deviation of K samples is itself uncertain. With the kurtosis kappa = m4 / m2^2,

    relative standard error of the std = 1/2 sqrt( (kappa - (K - 3)/(K - 1)) / K ),

1 / sqrt(2 (K - 1)) for normal samples.

Samples run as replicated batches, in chunks that fit a memory bound, side by side on the cores.
Sample k is a function of (seed, k), so the chunking does not change the result, and a result whose
number of samples was chosen is that of as many samples asked for by number.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from blips.data.graph import Graph
from blips.errors import InputError
from blips.inference.memory import passes_side_by_side, rows_of
from blips.prediction import Outputs, Prediction, point_prediction

Sampler = Callable[[Graph, range], Outputs]  # (graph, sample numbers) -> [K * rows, ...]

FIRST_ROUND = 16  # samples before the first look: kurtosis from fewer says nothing
ROUND_TO, MOST = 8, 512  # samples of later rounds, and of all
NORMAL_KURTOSIS = 3.0
Samples = int | Literal["auto"]


def monte_carlo(
    sampler: Sampler,
    graph: Graph,
    samples: Samples,
    *,
    method: str,
    chunk: int,
    tolerance: float = 0.1,
) -> Prediction:
    """Return mean and std of samples on a batch of structures.

    With samples="auto" they are drawn in rounds until the relative standard error of a typical std
    (the root mean square over all energies, force components, ... of the batch) is below the
    tolerance. `details` then has the "std_relative_error" that each quantity reached. At most
    `chunk` samples run at once; `method` names the result.
    """
    goal = FIRST_ROUND if samples == "auto" else samples
    refuse_few(goal)
    count, drawn, details = 0, Outputs(), dict[str, Any](chunk=chunk)
    while count < goal:
        more = sampled_outputs(sampler, graph, range(count, goal), chunk)
        drawn = {k: torch.cat([drawn[k], v]) if drawn else v for k, v in more.items()}
        count = goal
        if samples == "auto":
            errors = {name: relative_error(value) for name, value in drawn.items()}
            excess = max(errors.values()) / tolerance
            details["std_relative_error"] = errors
            if excess > 1.0:  # as the error demands, at most twice as many
                needed = ROUND_TO * math.ceil(count * min(excess**2, 2.0) / ROUND_TO)
                goal = min(max(needed, count + ROUND_TO), MOST)
    return replace(point_prediction(moments(drawn), graph, method, count), details=details)


def refuse_few(samples: int) -> None:
    """Refuse numbers of samples that have no deviation."""
    if samples < 2:
        raise InputError(
            f"samples={samples}: a deviation needs at least 2 samples; "
            'use method="map" for a prediction without error bars'
        )


def moments(drawn: Outputs) -> Outputs:
    """Compute mean and (K-1)-normalised std of samples [K, ...], float64."""
    found: Outputs = {}
    for name, samples in drawn.items():
        samples = samples.double()
        found[name], found[f"{name}_std"] = samples.mean(dim=0), samples.std(dim=0)
    return found


def relative_error(samples: Tensor) -> float:
    """Estimate the relative standard error of a typical std of samples [K, ...].

    Never below that of normal samples, nor where nothing varies.
    """
    count = len(samples)
    square = (samples.double() - samples.double().mean(dim=0)).square()
    m2, m4 = square.mean(dim=0), square.square().mean(dim=0)
    kurtosis = torch.where(m2 > 0, m4 / m2.square().clamp_min(1e-300), NORMAL_KURTOSIS)
    square = 0.25 * (kurtosis.clamp_min(NORMAL_KURTOSIS) - (count - 3) / (count - 1)) / count
    return float(square.mean().sqrt())


def sampled_outputs(sampler: Sampler, graph: Graph, numbers: range, chunk: int) -> Outputs:
    """Compute outputs [K, ...] of the samples with these numbers, in order."""
    starts = range(numbers.start, numbers.stop, chunk)
    chunks = [range(k, min(k + chunk, numbers.stop)) for k in starts]
    threads = min(passes_side_by_side(rows_of(graph)), len(chunks))
    if threads < 2 or torch.cuda.is_available():
        found = [sampler(graph, part) for part in chunks]
    else:  # small tensors leave a second core idle within an operation, not between two samples
        pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        with kept_num_threads(1), pool:
            found = list(pool.map(partial(sampler, graph), chunks))
    return {
        name: torch.cat(
            [
                outputs[name].detach().reshape(len(part), -1, *value.shape[1:])
                for part, outputs in zip(chunks, found, strict=True)
            ]
        )
        for name, value in found[0].items()
    }


@contextmanager
def kept_num_threads(within: int | None) -> Iterator[None]:
    """Let torch use so many threads, if given, within the block, and as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(within or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
