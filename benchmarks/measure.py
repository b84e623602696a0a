"""How times and memory of calls are measured together.

Times are processor seconds, in rounds, each in a random order of its own. A ratio is the median
over rounds of that within a round, so that every call sees the same load; with it comes a 95 %
interval of that median. What takes long is repeated less often, down to once. Peak memory is the
growth of the resident set above what it was before the call (Linux only).
"""

import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import binom

Call = Callable[[], Any]
ENOUGH_SECONDS = 10.0  # for the repeats of a way


@dataclass(frozen=True)
class Measured:
    """Processor seconds of every repeat, and bytes, by way."""

    seconds: Mapping[str, list[float]]
    peak_bytes: Mapping[str, int | None]

    def ratio(self, way: str, base: str = "base") -> float:
        """Compute the median over rounds of the ratio within a round."""
        return statistics.median(self._ratios(way, base))

    def interval(self, way: str, base: str = "base") -> tuple[float, float] | None:
        """Compute the 95 % interval of that median; None for less than six rounds."""
        return median_interval(self._ratios(way, base))

    def _ratios(self, way: str, base: str) -> list[float]:
        pairs = zip(self.seconds[way], self.seconds[base], strict=False)  # the slow: fewer rounds
        return [a / b for a, b in pairs]

    def shortest(self, way: str, base: str = "base") -> float:
        """Compute the ratio of the shortest times."""
        return min(self.seconds[way]) / min(self.seconds[base])

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return everything, JSON-able."""
        return {
            way: {
                "ratio": round(self.ratio(way), 3),
                "ratio_interval": _rounded(self.interval(way)),
                "ratio_of_shortest": round(self.shortest(way), 3),
                "shortest_seconds": min(self.seconds[way]),
                "repeats": len(self.seconds[way]),
                "peak_megabytes": _megabytes(self.peak_bytes[way]),
            }
            for way in self.seconds
        }


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Return an interval that has the median with at least that probability, distribution-free.

    The number of n values below the median is Binomial(n, 1/2), so that the median lies between
    the k-th smallest and the k-th largest with probability 1 - 2 P(B < k); k is the largest that
    keeps this above `level`. None if even the extremes do not.
    """
    ordered = sorted(values)
    k = int(binom.ppf((1 - level) / 2, len(ordered), 0.5))  # smallest with P(B <= k) >= 2.5 %
    return (ordered[k - 1], ordered[-k]) if k > 0 else None


def _rounded(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else [round(value, 3) for value in interval]


def measure(calls: Mapping[str, Call], repeats: int) -> Measured:
    """Measure times in rounds; memory in a first one, whose times count only for slow calls.

    A way is repeated as often as `ENOUGH_SECONDS` allow, `repeats` times at most.
    """
    peaks: dict[str, int | None] = {}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    left: dict[str, int] = {}
    for name, call in calls.items():
        first: list[float] = []
        peaks[name] = peak_bytes(lambda call=call, first=first: first.append(_seconds(call)))
        (took,) = first
        left[name] = min(repeats, int(ENOUGH_SECONDS / max(took, 1e-6)))
        if left[name] == 0:
            seconds[name].append(took)
    order = random.Random(0)
    for repeat in range(repeats):
        due = [name for name in calls if repeat < left[name]]
        for name in order.sample(due, len(due)):
            seconds[name].append(_seconds(calls[name]))
    return Measured(seconds, peaks)


def _seconds(call: Call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def peak_bytes(call: Call) -> int | None:
    """Measure the peak resident set of `call` above that before; None without Linux's /proc."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        clear.write_text("5")  # begin the high-water mark anew
        before = _status(status, "VmRSS")
        call()
        return max(0, _status(status, "VmHWM") - before)
    except (OSError, AttributeError):
        call()
        return None


def _status(path: Path, field: str) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def _megabytes(size: int | None) -> float | None:
    return None if size is None else round(size / 1e6, 1)
