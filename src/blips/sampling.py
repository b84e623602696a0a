"""Monte Carlo over posterior samples: chunks, threads, memory, moments.

    mean = 1/K sum_k y_k,    epistemic std = sqrt( 1/(K-1) sum_k (y_k - mean)^2 )

Samples run as replicated batches, in chunks that fit a memory bound, side by side on the cores.
Sample k is a function of (seed, k), so the chunking does not change the result.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from blips import keys
from blips.data.graph import Graph
from blips.errors import InputError, TooLargeError
from blips.memory import available_bytes
from blips.predict import Array, Outputs, Prediction, atom_counts

T = TypeVar("T")
R = TypeVar("R")
Sampler = Callable[[Graph, range], Outputs]  # (graph, sample numbers) -> [K * rows, ...]

ROWS_AT_ONCE = 16384  # larger passes fall out of the processor's cache and get slower per row
ROWS_FOR_A_THREAD = 2048  # smaller passes side by side wait for Python more than they compute
LARGE_ROWS = 65536  # operations on so many use all cores by themselves
PROBE_NODES = 200  # of a large graph, to measure what a row needs
GIGABYTE = 1e9
DEFAULT_BYTES = 2 * GIGABYTE
SAVED_TO_PEAK = 2.5  # peak memory of a pass over the bytes that autograd saves in it


class RunningMoments:
    """Mean and variance of samples that arrive in chunks (Chan's update, float64)."""

    def __init__(self, covariance: bool = False) -> None:
        self.count = 0
        self.covariance = covariance
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, samples: Tensor) -> None:
        """[K, ...], or [K, ..., 3] with `covariance` over the last axis."""
        samples = samples.detach().double()
        count, mean = samples.shape[0], samples.mean(0)
        squares = self._outer(samples - mean).sum(0)
        if self._mean is None or self._squares is None:
            self.count, self._mean, self._squares = count, mean, squares
            return
        total = self.count + count
        shift = mean - self._mean
        self._squares = self._squares + squares + self._outer(shift) * (self.count * count / total)
        self._mean = self._mean + shift * (count / total)
        self.count = total

    def _outer(self, deviation: Tensor) -> Tensor:
        if self.covariance:
            return deviation[..., :, None] * deviation[..., None, :]
        return deviation.square()

    @property
    def mean(self) -> Array:
        """[...]."""
        if self._mean is None:
            raise InputError("no samples were drawn; ask for at least one")
        return self._mean.cpu().numpy()

    @property
    def var(self) -> Array:
        """(K-1)-normalised variance, or covariance, [...]."""
        if self._squares is None or self.count < 2:
            raise InputError(f"a standard deviation needs at least 2 samples, got {self.count}")
        return (self._squares / (self.count - 1)).cpu().numpy()


def monte_carlo(
    sampler: Sampler,
    graph: Graph,
    samples: int,
    *,
    method: str,
    chunk: int,
    covariance: bool = False,
) -> Prediction:
    """Mean and deviation of `samples` samples on a batch of structures.

    Args:
        sampler: evaluates the samples of a range of numbers as one replicated batch.
        graph: the structures.
        samples: K >= 2.
        method: name for the result.
        chunk: at most so many samples at once.
        covariance: also the 3x3 covariance of the forces.
    """
    if samples < 2:
        raise InputError(
            f"samples={samples}: a deviation needs at least 2 samples; "
            'use method="map" for a prediction without error bars'
        )
    moments = Moments(covariance)
    for outputs in sampled_outputs(sampler, graph, range(samples), chunk):
        moments.add(outputs)
    return moments.prediction(graph, method=method, chunk=chunk)


class Moments:
    """Running moments of every output.

    Args:
        covariance: also the 3x3 covariance of the forces.
    """

    def __init__(self, covariance: bool = False) -> None:
        self.covariance = covariance
        self._of: dict[str, RunningMoments] = {}

    def add(self, outputs: Outputs) -> None:
        """[K, ...] of each output."""
        for name, value in outputs.items():
            wants_covariance = self.covariance and name == keys.FORCES
            self._of.setdefault(name, RunningMoments(wants_covariance)).add(value)

    def prediction(self, graph: Graph, *, method: str, chunk: int) -> Prediction:
        """Means and deviations."""
        arrays: dict[str, Array] = {}
        for name, moment in self._of.items():
            arrays[name] = moment.mean
            if moment.covariance:
                arrays[f"{name}_cov"] = moment.var
                arrays[f"{name}_std"] = np.sqrt(np.diagonal(moment.var, axis1=-2, axis2=-1))
            else:
                arrays[f"{name}_std"] = np.sqrt(moment.var)
        return Prediction.of(
            arrays,
            n_atoms=atom_counts(graph),
            method=method,
            samples=max(moment.count for moment in self._of.values()),
            details={"chunk": chunk},
        )


def sampled_outputs(
    sampler: Sampler, graph: Graph, numbers: range, chunk: int
) -> Iterator[Outputs]:
    """Outputs [K, ...] of the samples with these numbers, in chunks, in order."""
    starts = range(numbers.start, numbers.stop, chunk)
    chunks = [range(k, min(k + chunk, numbers.stop)) for k in starts]
    threads = passes_side_by_side(rows_of(graph))
    results = side_by_side(lambda part: sampler(graph, part), chunks, threads)
    for part, outputs in zip(chunks, results, strict=True):
        yield {
            name: value.detach().reshape(len(part), -1, *value.shape[1:])
            for name, value in outputs.items()
        }


def side_by_side(
    work: Callable[[T], R], items: Sequence[T], most: int | None = None
) -> Iterator[R]:
    """Results of `work` in the order of `items`, on as many threads as torch may use.

    Small tensors leave a second core idle within an operation, not between two samples.
    """
    threads = min(most or torch.get_num_threads(), len(items))
    if threads < 2 or torch.cuda.is_available():
        yield from map(work, items)
        return
    with (
        kept_num_threads(),
        ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        yield from pool.map(work, items)


@contextmanager
def kept_num_threads() -> Iterator[None]:
    """Give new threads the number of threads again that they had before the block."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class MemoryBound(NamedTuple):
    """How many bytes the passes of a prediction may take.

    Attributes:
        wished: for what runs at once.
        most: for a single sample, which cannot be divided further.
    """

    wished: float
    most: float

    @classmethod
    def of(cls, memory_gb: float | None) -> "MemoryBound":
        """A bound for both; by default 2 GB, and what the machine has for a single sample."""
        if memory_gb is None:
            return cls(DEFAULT_BYTES, available_bytes())
        return cls(memory_gb * GIGABYTE, memory_gb * GIGABYTE)


class MemoryGauge:
    """How many samples of a graph fit a memory bound.

    A pass needs bytes for its rows (edges and nodes) and for the noise of its weights. The bytes
    that autograd keeps for a row are measured on the first graph that comes (on a part of it, where
    it is large), and remembered.

    Args:
        weight_bytes: size of the weights that each sample draws anew.
    """

    def __init__(self, weight_bytes: int = 0) -> None:
        self.weight_bytes = 2 * weight_bytes  # the noise, and its product with the weights
        self._bytes_per_row: float | None = None

    def chunk(
        self, graph: Graph, samples: int, bound: MemoryBound, run: Callable[[Graph], Any]
    ) -> int:
        """Samples at once, at least 1, such that the passes side by side stay within the bound.

        Args:
            graph: the structures.
            samples: K.
            bound: of the memory.
            run: one sample of a graph.
        """
        rows = rows_of(graph)
        needed = self.weight_bytes + self._per_row(graph, run) * rows
        if needed > bound.most:
            raise TooLargeError(_too_large(graph, needed, bound.most))
        threads = passes_side_by_side(rows)
        fits = int(bound.wished / threads / needed)
        busy = max(1, min(threads, samples * rows // ROWS_FOR_A_THREAD))  # threads side by side
        return max(1, min(-(-samples // busy), fits, ROWS_AT_ONCE // rows))

    def _per_row(self, graph: Graph, run: Callable[[Graph], Any]) -> float:
        if self._bytes_per_row is None:
            probe = graph if not is_large(graph) else graph.neighbourhood(PROBE_NODES)
            self._bytes_per_row = SAVED_TO_PEAK * saved_bytes(lambda: run(probe)) / rows_of(probe)
        return self._bytes_per_row


def rows_of(graph: Graph) -> int:
    """Nodes and edges."""
    return graph.num_nodes + graph.num_edges


def is_large(graph: Graph) -> bool:
    """Whether a single pass is so large that its memory has to be thought of."""
    return rows_of(graph) > LARGE_ROWS


def passes_side_by_side(rows: int) -> int:
    """Passes over so many rows that run at once; large ones use all threads themselves."""
    return 1 if rows > LARGE_ROWS else torch.get_num_threads()


def _too_large(graph: Graph, needed: float, most: float) -> str:
    return (
        f"{graph.num_nodes} atoms with {graph.num_edges} pairs need about "
        f"{needed / GIGABYTE:.3g} GB for one sample, and {most / GIGABYTE:.3g} GB may be used; "
        "predict a smaller structure, or allow more with memory_gb where there is more"
    )


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes of distinct storages that autograd saves while `run` runs."""
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with torch.enable_grad(), hooks:
        run()
    return sum(storages.values())
