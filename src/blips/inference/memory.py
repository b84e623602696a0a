"""Whether a pass over a graph fits the memory, and how many samples of it do at once.

Every method is judged by its own cost. The most bytes that the tensors of a pass take at any time
are measured on a part of the first large graph that comes; they grow with the rows (atoms and
edges), so that one number for each method, bytes per row, says what another graph takes.
"""

import ctypes
import os
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blips.data.graph import Graph
from blips.errors import TooLargeError

ROWS_AT_ONCE = 16384  # larger passes fall out of the processor's cache and get slower per row
ROWS_FOR_A_THREAD = 2048  # smaller passes side by side wait for Python more than they compute
LARGE_ROWS = 65536  # operations on so many use all cores by themselves
PROBE_NODES = 200  # of a large graph, to measure what a row needs
GIGABYTE = 1e9
DEFAULT_GB = 2.0
RESERVE = 32e6  # bytes that a process takes beside tensors: buffers of matrix products, arrays
SAFETY = 1.2  # memory that the allocator cannot use again, over that of living tensors

Run = Callable[[Graph], Any]


class MemoryGauge:
    """Memory of passes, measured once for each kind of pass and remembered.

    A `kind` names a method and its outputs: passes of one kind need the same for a row. `run` is
    such a pass over a (smaller) graph. `memory_gb` bounds what runs at once, by default 2 GB; a
    single pass, which cannot be divided, may by default take what the machine has. Each sample
    draws weights of `weight_bytes` anew.
    """

    def __init__(self, weight_bytes: int = 0) -> None:
        # the noise, its product with the weights, and it beside the weights
        self.weight_bytes = 4 * weight_bytes
        self._bytes_per_row: dict[Hashable, float] = {}

    def check(self, kind: Hashable, graph: Graph, memory_gb: float | None, run: Run) -> float:
        """Estimate the bytes of one pass; raise an error if it is too large for the bound."""
        if kind not in self._bytes_per_row:
            probe = graph if not is_large(graph) else graph.neighbourhood(PROBE_NODES)
            peak = peak_bytes(lambda: run(probe))
            self._bytes_per_row[kind] = SAFETY * peak / max(rows_of(probe), 1)
        needed = self._bytes_per_row[kind] * rows_of(graph)
        most = available_bytes() if memory_gb is None else memory_gb * GIGABYTE
        if needed > most:
            raise TooLargeError(
                f"{graph.num_nodes} atoms with {graph.num_edges} pairs need about "
                f"{needed / GIGABYTE:.3g} GB for one pass, and {most / GIGABYTE:.3g} GB may be "
                "used; predict a smaller structure, or allow more with memory_gb where there is "
                "more"
            )
        return needed

    def chunk(
        self, kind: Hashable, graph: Graph, samples: int, memory_gb: float | None, run: Run
    ) -> int:
        """Choose how many of K samples run at once, at least 1, within the bound."""
        rows = rows_of(graph)
        needed = self.weight_bytes + self.check(kind, graph, memory_gb, run)
        wished = (DEFAULT_GB if memory_gb is None else memory_gb) * GIGABYTE
        threads = passes_side_by_side(rows)
        fits = int((wished / threads - RESERVE) / needed)
        busy = max(1, min(threads, samples * rows // ROWS_FOR_A_THREAD))  # threads side by side
        return max(1, min(-(-samples // busy), fits, ROWS_AT_ONCE // rows))


def rows_of(graph: Graph) -> int:
    """Count nodes and edges."""
    return graph.num_nodes + graph.num_edges


def is_large(graph: Graph) -> bool:
    """Return whether a single pass is large enough that memory must be checked."""
    return rows_of(graph) > LARGE_ROWS


def passes_side_by_side(rows: int) -> int:
    """Return how many passes over so many rows run at once; large ones use all threads."""
    return 1 if rows > LARGE_ROWS else torch.get_num_threads()


def peak_bytes(run: Callable[[], Any]) -> int:
    """Measure the most bytes that tensors made by `run` take together at any time."""
    with _LivingTensors() as tensors:
        run()
    return tensors.peak


class _LivingTensors(TorchDispatchMode):
    """Adds up the storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for storage in _storages(outputs) - _storages((args, kwargs)):  # no view of an argument
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())
        return outputs

    def _add(self, size: int) -> None:
        self._now += size
        self.peak = max(self.peak, self._now)


def _storages(tree: Any) -> set[torch.UntypedStorage]:
    return {leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


@cache
def keep_freed_memory() -> bool:
    """Ask glibc to keep freed memory for the next tensors, up to 1 GB; return whether it will.

    Every pass over a model allocates and frees the same tensors. By default much of their memory
    goes back to the kernel, which hands it out again page by page and zeroed: a plain training
    step of PaiNN on four cells of 36 atoms then takes 1.4 to 1.6 times as long
    (results/benchmarks/ablation.md). Other C libraries are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mmap_threshold, trim_threshold = -3, -1  # numbers of the parameters; the first ends at 2^25
    return bool(mallopt(mmap_threshold, 2**25) and mallopt(trim_threshold, 2**30))


def available_bytes() -> float:
    """Return the memory that is left for programs; infinite where it is unknown."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    with suppress(AttributeError, OSError, ValueError):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return float("inf")
