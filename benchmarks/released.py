"""Cost of released potentials with a posterior, side by side with their own packages.

On one 36-atom cell of rattled quartz, one thread, processor time, in turn within one run:

* ``map``: energy and forces of the Bayesian potential's means over the package's own model on the
  same, prepared graph;
* ``one pass``: `predict(method="onepass")` with the std of the energy, over energy and forces of
  the means alone, which run as the package wrote them; ``by edges`` multiplies rows that were
  gathered from nodes as they are, too (`blips.bayes.gathered` does so on the nodes);
* ``training``: forward and backward of a training step (energy + forces), BLIP over the plain
  model behind the same adapter.

Run ``python benchmarks/released.py --output results/benchmarks/released``; models whose package
(or whose weights) are missing are named and left out. MACE needs an environment of its own: run
there ``python benchmarks/released.py --mace FILE --output results/benchmarks/mace``.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ase import Atoms

import blips
from blips.backbones import load
from blips.backbones.foreign import ForeignBackbone
from blips.bayes import gathered
from blips.config import load_config
from blips.data.dataset import StructureData
from blips.data.graph import AtomGraph
from blips.errors import BlipsError
from blips.prediction import Prediction
from blips.train.objective import Objective
from blips.train.run import environment
from potential import quartz

Call = Callable[[], Any]
ONE_PASS = ("onepass energy", "onepass energy, by edges")
MODELS: dict[str, dict[str, Any]] = {
    "chgnet": {},
    "mattersim-1m": {},
    "sevennet-0": {},
    "orb-v3-direct-20-omat": {"random": True},
    "orb-v3-conservative-20-omat": {"random": True},
}


def chgnet_call(model: Any, atoms: Atoms) -> Call:
    """Energy and forces by CHGNet itself."""
    from pymatgen.io.ase import AseAtomsAdaptor

    model.eval()
    structure = AseAtomsAdaptor.get_structure(atoms)  # type: ignore[arg-type]
    graph = model.graph_converter(structure)
    return lambda: model([graph], task="ef")


def mattersim_call(model: Any, atoms: Atoms) -> Call:
    """Energy and forces by MatterSim itself."""
    from mattersim.datasets.utils.build import build_dataloader
    from mattersim.forcefield.potential import Potential, batch_to_dict

    model.eval()
    potential = Potential(model, device="cpu", allow_tf32=False)
    loader: Any = build_dataloader([atoms], only_inference=True, batch_size=1)
    batch = next(iter(loader))
    inputs = batch_to_dict(batch, device="cpu")

    def call() -> Any:
        fresh = {**inputs, "atom_pos": inputs["atom_pos"].detach().clone()}
        return potential(fresh, include_forces=True, include_stresses=False)

    return call


def sevennet_call(model: Any, atoms: Atoms) -> Call:
    """Energy, forces and stress by SevenNet itself, which has no energy and forces alone."""
    import sevenn._keys as names
    from sevenn.atom_graph_data import AtomGraphData
    from sevenn.calculator import SevenNetCalculator
    from sevenn.train.dataload import unlabeled_atoms_to_graph

    own: Any = SevenNetCalculator("7net-0", device="cpu")

    data = AtomGraphData.from_numpy_dict(unlabeled_atoms_to_graph(atoms, own.cutoff))
    data = data.to_dict()
    data[names.NODE_FEATURE] = torch.tensor(
        [own.type_map[number] for number in atoms.numbers], dtype=torch.int64
    )
    own.model.set_is_batch_data(False)

    def call() -> Any:
        fresh = dict(data)
        fresh[names.EDGE_VEC] = data[names.EDGE_VEC].detach().clone().requires_grad_()
        return own.model(fresh)

    return call


def orb_call(model: Any, atoms: Atoms) -> Call:
    """All outputs by ORB itself."""
    from orb_models.forcefield.atomic_system import ase_atoms_to_atom_graphs

    model.eval()
    graph = ase_atoms_to_atom_graphs(atoms, model.system_config, device=torch.device("cpu"))
    return lambda: model.predict(graph)


def mace_call(model: Any, atoms: Atoms) -> Call:
    """Energy and forces by MACE itself."""
    from mace.tools import torch_geometric, utils  # type: ignore[import-not-found]

    from mace import data  # type: ignore[import-not-found]

    numbers = utils.AtomicNumberTable([int(number) for number in model.atomic_numbers])
    one = data.AtomicData.from_config(
        data.config_from_atoms(atoms), z_table=numbers, cutoff=float(model.r_max)
    )
    batch = next(iter(torch_geometric.dataloader.DataLoader([one], batch_size=1, shuffle=False)))
    dtype = next(model.parameters()).dtype
    inputs = {
        name: value.to(dtype) if torch.is_floating_point(value) else value
        for name, value in batch.to_dict().items()
        if isinstance(value, torch.Tensor)
    }

    def call() -> Any:
        fresh = {**inputs, "positions": inputs["positions"].detach().clone()}
        return model(fresh, compute_force=True)

    return call


PACKAGE_CALLS: dict[str, Callable[[Any, Atoms], Call]] = {
    "chgnet": chgnet_call,
    "mattersim": mattersim_call,
    "sevennet": sevennet_call,
    "orb": orb_call,
    "orb-direct": orb_call,
    "mace": mace_call,
}


def interleaved(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Processor seconds of every call, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if repeat:
                seconds[name].append(time.process_time() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> float:
    """Median over repeats of the ratio within a repeat."""
    pairs = zip(seconds[name], seconds[base], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3)


def measure(name: str, options: dict[str, Any], repeats: int) -> dict[str, float]:
    """Ratios of one model."""
    torch.manual_seed(0)
    plain = load(name, **options)
    torch.manual_seed(0)
    potential = blips.bayesianize(load(name, **options))
    atoms = quartz()
    graph = plain.graph(atoms)
    stress = plain.family in ("sevennet", "orb", "orb-direct")
    torch.set_grad_enabled(plain.conservative)
    calls = {
        "package": PACKAGE_CALLS[plain.family](load(name, **options).model, atoms),
        "map": lambda: potential(graph, stress=stress),
    }
    found = {"map": ratio(interleaved(calls, repeats), "map", "package")}
    torch.set_grad_enabled(True)
    seconds = interleaved(_ways(potential, graph), repeats)
    found |= {way: ratio(seconds, way, "means") for way in ONE_PASS}
    steps = {"base": _step(plain, plain, atoms), "blip": _step(potential, plain, atoms)}
    found["training"] = ratio(interleaved(steps, max(3, repeats // 2)), "blip", "base")
    return {"atoms": len(atoms), "edges": graph.num_edges, **found}


def _ways(potential: blips.BayesianPotential, graph: AtomGraph) -> dict[str, Call]:
    """Energy and forces of the means, and each of `ONE_PASS`."""

    def by_edges() -> Prediction:
        least = gathered.LEAST_ROWS
        gathered.LEAST_ROWS = sys.maxsize
        try:
            return potential.predict(graph, method="onepass")
        finally:
            gathered.LEAST_ROWS = least

    return {
        "means": lambda: potential.predict(graph, method="map"),
        "onepass energy": lambda: potential.predict(graph, method="onepass"),
        "onepass energy, by edges": by_edges,
    }


def _step(model: Any, backbone: ForeignBackbone, atoms: Atoms) -> Call:
    config = load_config({"training": {"loss": "huber", "kl_weight": 1e-3}}).training
    dtype = next(backbone.parameters()).dtype
    batch = StructureData([atoms], backbone.graph_of, dtype=dtype).batch([0])
    objective = Objective(model, config, num_data=100)

    def step() -> None:
        objective.zero_grad()
        objective(batch, ("benchmark", 0), 1.0).total.backward()

    return step


def main() -> None:
    """Measure and write a .json and a .md file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--mace", type=Path, help="a trusted MACE checkpoint, measured alone")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    models = MODELS
    if arguments.mace:
        models = {"mace": {"weights": arguments.mace, "trust": True}}
    for name, options in models.items():
        if arguments.model and name not in arguments.model:
            continue
        try:
            found[name] = measure(name, options, arguments.repeats)
        except BlipsError as error:
            print(f"{name} is left out: {error}")
            continue
        print(name, found[name], flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), "repeats": arguments.repeats, "models": found}
    arguments.output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    head = (
        "model",
        "atoms",
        "edges",
        "MAP / package",
        "one pass, sigma of the energy / MAP",
        "by edges / MAP",
        "training step, BLIP / plain",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in found.items():
        columns = ("atoms", "edges", "map", *ONE_PASS, "training")
        cells = (name, *(row[column] for column in columns))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    arguments.output.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
