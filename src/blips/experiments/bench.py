"""What error bars cost: time and memory of every way, on the same inputs, in one run.

The subject is PaiNN (128 features, 3 blocks) with energies and forces. Times are processor seconds
of one thread, measured in rounds, each in a random order of its own; a ratio is the median over
rounds of that within a round, so that all share the machine's moods and none its place. With it
comes a 95 % interval of that median, and a second copy of the base shows what the measurement can
tell at all. Ways that take long are repeated less often, down to once. Peak memory is the growth of
the resident set above what it was before the call (Linux only).

LLPR needs a backward pass for each feature to get sigmas of forces, in batches whose memory is that
of 32 passes: it is measured up to `SMALL` atoms, and for energies alone at every size.
"""

import copy
import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.build import molecule
from scipy.stats import binom

from blips.backbones import PaiNN
from blips.backbones.hooks import inputs_of
from blips.baselines import DeepEnsemble, LastLayerRigidity, ShallowEnsemble
from blips.baselines.last_layer import readout_of
from blips.baselines.llpr import Rigidity, Scale
from blips.data.graph import AtomGraph
from blips.errors import InputError
from blips.experiments.fast_data import displaced, quartz
from blips.factory import bayesianize
from blips.spread import ForceSpread
from blips.spread.network import Refinement
from blips.spread.tensors import GROUPS, feature_names
from blips.train.objective import plain_outputs

Call = Callable[[], Any]
MEMBERS = 4
SMALL = 100  # atoms; beyond, only the smallest number of samples is also drawn one by one
SAMPLES = (8, 32, 100)
LOOPED = 32  # samples one by one, at most
ENOUGH_SECONDS = 10.0  # for the repeats of a way
REPEATS = 40  # at most
CELLS = {36: (2, 2, 1), 144: (4, 4, 1), 720: (4, 4, 5)}  # of 9 atoms
SIZES = (4, *CELLS)


@dataclass(frozen=True)
class Measured:
    """Processor seconds of every repeat, and bytes, by way."""

    seconds: Mapping[str, list[float]]
    peak_bytes: Mapping[str, int | None]

    def ratio(self, way: str, base: str = "base") -> float:
        """Median over rounds of the ratio within a round."""
        return statistics.median(self._ratios(way, base))

    def interval(self, way: str, base: str = "base") -> tuple[float, float] | None:
        """95 % interval of that median from order statistics; None for less than six rounds."""
        return median_interval(self._ratios(way, base))

    def _ratios(self, way: str, base: str) -> list[float]:
        pairs = zip(self.seconds[way], self.seconds[base], strict=False)  # the slow: fewer rounds
        return [a / b for a, b in pairs]

    def shortest(self, way: str, base: str = "base") -> float:
        """Ratio of the shortest times."""
        return min(self.seconds[way]) / min(self.seconds[base])

    def rows(self) -> dict[str, dict[str, Any]]:
        """Everything, JSON-able."""
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
    """Interval that has the median with at least that probability, whatever the distribution.

    The number of n values below the median is Binomial(n, 1/2), so that the median lies between
    the k-th smallest and the k-th largest with probability 1 - 2 P(B < k); k is the largest that
    keeps this above `level`. None if even the extremes do not.
    """
    ordered = sorted(values)
    k = int(binom.ppf((1 - level) / 2, len(ordered), 0.5))  # smallest with P(B <= k) >= 2.5 %
    return (ordered[k - 1], ordered[-k]) if k > 0 else None


def _rounded(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else [round(value, 3) for value in interval]


def structure(atoms: int) -> Atoms:
    """NH3 for 4 atoms, displaced quartz otherwise."""
    if atoms == 4:
        return displaced(molecule("NH3"), 0.05, 0)
    return displaced(quartz(0.0, 0) * CELLS[atoms], 0.05, 0)


def ways(atoms: int, samples: Sequence[int]) -> dict[str, Call]:
    """Every way to get energies and forces, most with error bars, on one structure."""
    torch.manual_seed(0)
    plain = PaiNN()
    twin = copy.deepcopy(plain)
    potential = bayesianize(copy.deepcopy(plain))
    graph = plain.graph(structure(atoms))
    tensors, refined = _spreads(graph.numbers.unique().tolist())
    ensemble = DeepEnsemble.of([copy.deepcopy(plain) for _ in range(MEMBERS)])
    shallow = ShallowEnsemble(copy.deepcopy(plain), heads=16)
    rigidity = _rigidity(plain)

    def means(model: PaiNN) -> Any:
        with torch.no_grad():
            return plain_outputs(model, graph)

    calls: dict[str, Call] = {
        "base": lambda: means(plain),
        "base, a copy": lambda: means(twin),
        "map": lambda: potential.predict(graph, method="map"),
        "onepass energy": lambda: _in_one_pass(potential, graph, None),
        "onepass energy + forces": lambda: _in_one_pass(potential, graph, tensors),
        "onepass energy + forces, refined": lambda: _in_one_pass(potential, graph, refined),
    }
    for count in samples:
        if count <= (LOOPED if atoms <= SMALL else min(samples)):
            calls[f"mc loop {count}"] = lambda count=count: _one_by_one(potential, graph, count)
        calls[f"mc batched {count}"] = lambda count=count: potential.predict(graph, samples=count)
    calls[f"deep ensemble {MEMBERS}"] = lambda: ensemble.predict_graph(graph)
    calls["shallow ensemble 16"] = lambda: shallow.predict_graph(graph)
    calls["llpr energy"] = lambda: _rigid_energy(rigidity, graph)
    if atoms <= SMALL:
        calls["llpr"] = lambda: rigidity.predict_graph(graph)
    return calls


def _one_by_one(potential: Any, graph: AtomGraph, count: int) -> None:
    for k in range(count):
        potential.outputs_of(graph, range(k, k + 1), 0, {"forces": True})


def _spreads(elements: Sequence[int]) -> tuple[ForceSpread, ForceSpread]:
    """Without and with a network; the cost does not depend on the values of their weights."""
    weights = (1.0,) * len(feature_names(GROUPS))
    tensors = ForceSpread(GROUPS, weights, {}, dict.fromkeys(elements, weights))
    return tensors, replace(tensors, refinement=Refinement(elements, GROUPS + 1).double())


def _in_one_pass(potential: Any, graph: AtomGraph, spread: ForceSpread | None) -> Any:
    potential.force_spread = spread
    return potential.predict(graph, method="onepass")


def _rigidity(plain: PaiNN) -> LastLayerRigidity:
    """LLPR with any matrix: what its training data were does not change the cost."""
    found = LastLayerRigidity(copy.deepcopy(plain))
    width = plain.readout[-1].in_features
    found.rigidity = Rigidity.of(torch.eye(int(width), dtype=torch.float64))  # type: ignore
    found.scales = {name: Scale(1.0, 1.0) for name in ("energy", "forces")}
    return found


def _rigid_energy(rigidity: LastLayerRigidity, graph: AtomGraph) -> Any:
    """Energy, its LLPR deviation and forces: features come with the one evaluation."""
    with torch.no_grad(), inputs_of(readout_of(rigidity.backbone)[-1]) as seen:
        outputs = plain_outputs(rigidity.backbone, graph)
    summed = graph.sum_over_structures(seen[-1].detach().double())
    if rigidity.rigidity is None:
        raise InputError("the rigidity is not known yet")
    return outputs, rigidity.rigidity.covariance(summed[:, None], 1.0).sqrt()


def measure(calls: Mapping[str, Call], repeats: int) -> Measured:
    """Times in rounds; memory in a first one, whose times count only for what is slow.

    A way is repeated as often as `ENOUGH_SECONDS` allow, `repeats` times at most.
    """
    peaks: dict[str, int | None] = {}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    left: dict[str, int] = {}
    for name, call in calls.items():
        start = time.process_time()
        peaks[name] = peak_bytes(call)
        took = time.process_time() - start
        left[name] = min(repeats, int(ENOUGH_SECONDS / max(took, 1e-6)))
        if left[name] == 0:
            seconds[name].append(took)
    order = random.Random(0)
    for repeat in range(repeats):
        due = [name for name in calls if repeat < left[name]]
        for name in order.sample(due, len(due)):
            start = time.process_time()
            calls[name]()
            seconds[name].append(time.process_time() - start)
    return Measured(seconds, peaks)


def peak_bytes(call: Call) -> int | None:
    """Largest resident set during `call` above that before; None where Linux's /proc is missing."""
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


def cost(
    sizes: Sequence[int] = SIZES, samples: Sequence[int] = SAMPLES, repeats: int = REPEATS
) -> dict[str, Any]:
    """Ratios to energy and forces of the base, by number of atoms.

    Args:
        sizes: numbers of atoms, out of `SIZES`.
        samples: numbers of samples.
        repeats: at most; less for what takes long.
    """
    return {str(atoms): measure(ways(atoms, samples), repeats).rows() for atoms in sizes}


def cost_table(found: Mapping[str, Any]) -> str:
    """Markdown: ratio of times, half its 95 % interval, peak MB; one column for each size."""
    names: dict[str, None] = {}
    for rows in found.values():
        names.update(dict.fromkeys(rows))
    lines = ["| | " + " | ".join(f"{atoms} atoms" for atoms in found) + " |"]
    lines.append("|" + "---|" * (len(found) + 1))
    for name in names:
        cells = [name]
        for rows in found.values():
            row = rows.get(name)
            cells.append("-" if row is None else _cell(row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[str, Any]) -> str:
    low, high = row["ratio_interval"] or (None, None)
    spread = "" if low is None else f" ± {(high - low) / 2:.2f}"
    return f"{row['ratio']:.2f}{spread} ({row['peak_megabytes']} MB)"
