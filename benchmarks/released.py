"""What does a posterior cost on released potentials, beside their own packages?

On one 36-atom cell of displaced quartz, one thread, ratios as in `benchmarks.measure`:

* ``map``: energy and forces of the Bayesian potential's means over the package's own model on the
  same, prepared graph;
* ``one pass``: `predict(method="onepass")`, which has sigma of the energy, over energy and forces
  of the means;
* ``training``: forward and backward of a training step with noise (energy + forces), over the plain
  model behind the same adapter.

Run ``python -m benchmarks.released --output results/benchmarks/released``; models whose package
(or whose weights) are missing are named and left out. MACE needs an environment of its own: run
there ``python -m benchmarks.released --mace FILE --output results/benchmarks/mace``.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ase import Atoms

from benchmarks.measure import Call, measure
from benchmarks.structures import labelled, structure
from benchmarks.training import step
from blips.backbones import family_of, load
from blips.backbones.base import first_parameter
from blips.backbones.foreign import ForeignBackbone
from blips.conversion import bayesianize
from blips.data.dataset import StructureData
from blips.errors import BlipsError
from blips.train.run import environment

MODELS: dict[str, dict[str, Any]] = {
    "chgnet": {},
    "mattersim-1m": {},
    "sevennet-0": {},
    "orb-v3-direct-20-omat": {"random": True},
    "orb-v3-conservative-20-omat": {"random": True},
}


def chgnet_call(model: Any, atoms: Atoms) -> Call:
    """Compute energy and forces by CHGNet itself."""
    from pymatgen.io.ase import AseAtomsAdaptor

    model.eval()
    structure = AseAtomsAdaptor.get_structure(atoms)  # type: ignore[arg-type]
    graph = model.graph_converter(structure)
    return lambda: model([graph], task="ef")


def mattersim_call(model: Any, atoms: Atoms) -> Call:
    """Compute energy and forces by MatterSim itself."""
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
    """Compute energy, forces and stress by SevenNet itself, which always computes all three."""
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
    """Compute all outputs by ORB itself."""
    from orb_models.forcefield.atomic_system import ase_atoms_to_atom_graphs

    model.eval()
    graph = ase_atoms_to_atom_graphs(atoms, model.system_config, device=torch.device("cpu"))
    return lambda: model.predict(graph)


def mace_call(model: Any, atoms: Atoms) -> Call:
    """Compute energy and forces by MACE itself."""
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


def costs(name: str, options: dict[str, Any], repeats: int) -> dict[str, float]:
    """Measure the ratios of one model."""
    plain, potential = _loaded(name, options), bayesianize(_loaded(name, options))
    atoms = labelled(structure(36), 0)
    graph = plain.graph(atoms)
    family = str(family_of(plain))
    stress = family in ("sevennet", "orb", "orb-direct")
    torch.set_grad_enabled(plain.conservative)
    calls = {
        "package": PACKAGE_CALLS[family](_loaded(name, options).model, atoms),
        "map": lambda: potential(graph, stress=stress),
    }
    found = {"map": measure(calls, repeats).ratio("map", "package")}
    torch.set_grad_enabled(True)
    calls = {
        "base": lambda: potential.predict(graph, method="map"),
        "onepass": lambda: potential.predict(graph, method="onepass"),
    }
    found["onepass"] = measure(calls, repeats).ratio("onepass")
    batch = StructureData([atoms], plain.graph_of, dtype=first_parameter(plain).dtype).batch([0])
    calls = {"base": step(plain, batch, "huber"), "blip": step(potential, batch, "huber")}
    found["training"] = measure(calls, repeats).ratio("blip")
    rounded = {key: round(value, 3) for key, value in found.items()}
    return {"atoms": len(atoms), "edges": graph.num_edges, **rounded}


def _loaded(name: str, options: dict[str, Any]) -> ForeignBackbone:
    torch.manual_seed(0)
    return load(name, **options)


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
            found[name] = costs(name, options, arguments.repeats)
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
        "training step, BLIP / plain",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in found.items():
        columns = ("atoms", "edges", "map", "onepass", "training")
        cells = (name, *(row[column] for column in columns))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    arguments.output.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
