"""What do error bars cost? Time and memory of every method, on the same inputs, in one run.

The subject is PaiNN (128 features, 3 blocks) with energies and forces, on one thread. A second copy
of the base shows what the measurement (`benchmarks.measure`) can tell at all. The means alone are
measured beside it in many rounds of their own, as tensors and as the arrays that `predict` gives.

LLPR needs a backward pass for each feature to get sigmas of forces, in batches whose memory is that
of 32 passes: it is measured up to `SMALL` atoms, and for energies alone at every size.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.measure import Call, measure
from benchmarks.structures import SIZES, structure
from blips.backbones import PaiNN
from blips.backbones.derivatives import plain_outputs
from blips.baselines import DeepEnsemble, predict_plain
from blips.bayes.condition import Evidence, normals
from blips.bayes.noise import generators
from blips.conversion import bayesianize
from blips.data.graph import AtomGraph
from blips.inference.domain import Domain
from blips.inference.maps import READOUT, ChosenMaps, chosen_roles
from blips.inference.posterior import ConditionedPosterior, Scale
from blips.potential import DIMENSION, BayesianPotential
from studies.baselines import LastLayerRigidity, ShallowEnsemble
from studies.baselines.last_layer import inputs_of, readout_of
from studies.baselines.llpr import Rigidity

MEMBERS = 4
SMALL = 100  # atoms; beyond, only the smallest number of samples is also drawn one by one
SAMPLES = (8, 32, 100)
DRAWS = (8, 16, 32)  # of the conditioned posterior
RANK = 1500  # directions that its data pin down
LOOPED = 32  # samples one by one, at most
REPEATS = 40  # at most
MEANS = ("base", "base, a copy", "base, arrays", "map", "map, arrays")
FINER = 25  # times more rounds for these


def ways(atoms: int, samples: Sequence[int]) -> dict[str, Call]:
    """Return every way to get energies and forces, most with error bars, on one structure."""
    torch.manual_seed(0)
    plain = PaiNN()
    # Each of MEANS has weights of its own, so that none finds them in the cache.
    twin, third = copy.deepcopy(plain), copy.deepcopy(plain)
    potential, other = (bayesianize(copy.deepcopy(plain)) for _ in range(2))
    conditioned = bayesianize(copy.deepcopy(plain))
    conditioned.posterior = some_posterior(conditioned)
    graph = plain.graph(structure(atoms))
    conditioned.predict(graph, forces=False)  # its draws are made once
    ensemble = DeepEnsemble.of([copy.deepcopy(plain) for _ in range(MEMBERS)])
    shallow = ShallowEnsemble(copy.deepcopy(plain), heads=16)
    rigidity = _rigidity(plain)

    def base(model: PaiNN) -> Any:
        with torch.no_grad():
            return plain_outputs(model, graph)

    def means() -> Any:
        with torch.no_grad():
            return potential(graph)

    calls: dict[str, Call] = {
        "base": lambda: base(plain),
        "base, a copy": lambda: base(twin),
        "base, arrays": lambda: predict_plain(third, graph),
        "map": means,
        "map, arrays": lambda: other.predict(graph, method="map"),
        "onepass energy": lambda: potential.predict(graph, method="onepass"),
    }
    calls["conditioned, std of energies"] = lambda: conditioned.predict(graph, method="onepass")
    for count in DRAWS:
        calls[f"conditioned {count}"] = lambda count=count: conditioned.predict(
            graph, method="conditioned", samples=count
        )
    for count in samples:
        if count <= (LOOPED if atoms <= SMALL else min(samples)):
            calls[f"mc loop {count}"] = lambda count=count: _one_by_one(potential, graph, count)
        calls[f"mc batched {count}"] = lambda count=count: potential.predict(
            graph, method="mc", samples=count
        )
    calls[f"deep ensemble {MEMBERS}"] = lambda: ensemble.predict_graph(graph)
    calls["shallow ensemble 16"] = lambda: shallow.predict_graph(graph)
    calls["llpr energy"] = lambda: _rigid_energy(rigidity, graph)
    if atoms <= SMALL:
        calls["llpr"] = lambda: rigidity.predict_graph(graph)
    return calls


def some_posterior(
    potential: BayesianPotential, dimension: int = DIMENSION
) -> ConditionedPosterior:
    """Make a posterior of any evidence: the cost of a prediction is independent of its values."""
    roles, last = chosen_roles(potential.backbone, potential.roles, READOUT)
    maps = ChosenMaps.of(potential.backbone, roles, dimension, 0, last=last)
    evidence = Evidence(maps.sketch.size)
    evidence.add(normals(maps.sketch.size, min(RANK, maps.sketch.size - 1), 0))
    scale = Scale(1e-3, 1.0, {"energy": 1e-3, "forces": 1e-2})
    return ConditionedPosterior(maps, scale, "constant", 1, Domain(), evidence)


def _one_by_one(potential: Any, graph: AtomGraph, count: int) -> None:
    for k in range(count):
        potential.sample(graph, generators(0, 1, first=k))


def _rigidity(plain: PaiNN) -> LastLayerRigidity:
    """Make an LLPR with any matrix: the cost is independent of its training data."""
    found = LastLayerRigidity(copy.deepcopy(plain))
    width = plain.readout[-1].in_features
    found.rigidity = Rigidity.of(torch.eye(int(width), dtype=torch.float64))  # type: ignore
    found.scales = {name: (1.0, 1.0) for name in ("energy", "forces")}
    return found


def _rigid_energy(rigidity: LastLayerRigidity, graph: AtomGraph) -> Any:
    """Compute energy, its LLPR std and forces: features come with the one evaluation."""
    with torch.no_grad(), inputs_of(readout_of(rigidity.backbone)[-1]) as seen:
        outputs = plain_outputs(rigidity.backbone, graph)
    summed = graph.sum_over_structures(seen[-1].detach().double())
    return outputs, rigidity.rigidity.covariance(summed[:, None], 1.0).sqrt()


def cost(
    sizes: Sequence[int] = SIZES, samples: Sequence[int] = SAMPLES, repeats: int = REPEATS
) -> dict[str, Any]:
    """Measure ratios to energy and forces of the base, by number of atoms.

    Args:
        sizes: numbers of atoms, out of `SIZES`.
        samples: numbers of samples.
        repeats: at most; less for what takes long.
    """
    return {str(atoms): _cost(ways(atoms, samples), repeats) for atoms in sizes}


def _cost(calls: Mapping[str, Call], repeats: int) -> dict[str, Any]:
    means = {name: calls[name] for name in MEANS}
    return measure(calls, repeats).rows() | measure(means, FINER * repeats).rows()


def cost_table(found: Mapping[str, Any]) -> str:
    """Format ratios of times, half their 95 % intervals and peak MB; a column for each size."""
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
