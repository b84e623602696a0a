"""How many parameters and floating-point operations do a posterior and an ensemble of four add?

Operations are those that torch's flop counter knows (matrix products, forward and backward), for
energies and forces of one structure: `inference` one evaluation (with a posterior: one sample),
`training` one step. An ensemble of N costs N times the base in each.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cost import MEMBERS
from benchmarks.structures import structure
from blips.backbones import PaiNN, load
from blips.backbones.base import AtomisticBackbone
from blips.backbones.derivatives import plain_outputs
from blips.bayes.noise import generators
from blips.config import load_config
from blips.conversion import bayesianize
from blips.data.dataset import StructureData
from blips.errors import BlipsError
from blips.train.objective import Objective

MODELS: dict[str, Callable[[], AtomisticBackbone]] = {
    "painn": PaiNN,
    "chgnet": lambda: load("chgnet"),
    "mattersim-1m": lambda: load("mattersim-1m"),
    "sevennet-0": lambda: load("sevennet-0", trust=True),
    "orb-v3-direct-20-omat": lambda: load("orb-v3-direct-20-omat", random=True),
    "orb-v3-conservative-20-omat": lambda: load("orb-v3-conservative-20-omat", random=True),
}


class Untracked:
    """In place of the counter's bookkeeping by module, whose hooks some models' forces break."""

    parents = frozenset({"Global"})

    def __enter__(self) -> "Untracked":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _addmm_flops(_: Any, left: Sequence[int], right: Sequence[int], **__: Any) -> int:
    """Count the operations of shapes [m, k] and [k, n]."""
    return 2 * left[0] * left[1] * right[1]


def flops_of(call: Callable[[], Any]) -> int:
    """Count floating-point operations of the matrix products in `call`."""
    in_place = {torch.ops.aten.addmm_: _addmm_flops}  # which the counter does not know
    counter: Any = FlopCounterMode(display=False, custom_mapping=in_place)
    counter.mod_tracker = Untracked()
    with counter:
        call()
    return counter.get_total_flops()


def flops(
    only: Sequence[str] = (), atoms: int = 36, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Count the operations of every model whose package is there."""
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        if only and name not in only:
            continue
        try:
            found[name] = count(make(), atoms)
        except BlipsError as error:
            report(f"{name} is left out: {error}")
            continue
        report(f"flops of {name} counted")
    return found


def count(plain: AtomisticBackbone, atoms: int) -> dict[str, Any]:
    """Return millions of parameters, and millions of operations for each atom."""
    potential = bayesianize(copy.deepcopy(plain))
    one = structure(atoms)
    graph = plain.graph(one)
    one.calc = None
    base = {
        "parameters": _parameters(plain),
        "inference": flops_of(lambda: plain_outputs(plain, graph)) / len(one) / 1e6,
        "training": flops_of(lambda: _step(plain, plain, one)) / len(one) / 1e6,
    }
    posterior = {
        "parameters": _parameters(potential),
        "inference": flops_of(lambda: potential.sample(graph, generators(0, 1))) / len(one) / 1e6,
        "training": flops_of(lambda: _step(potential, plain, one)) / len(one) / 1e6,
    }
    rows = {
        "base": base,
        "base + BLIP": posterior,
        f"{MEMBERS}-fold ensemble": {key: MEMBERS * value for key, value in base.items()},
    }
    return {way: {key: round(value, 4) for key, value in row.items()} for way, row in rows.items()}


def _parameters(model: torch.nn.Module) -> float:
    return sum(p.numel() for p in model.parameters()) / 1e6


def _step(model: Any, backbone: AtomisticBackbone, atoms: Any) -> None:
    from ase.calculators.singlepoint import SinglePointCalculator

    labelled = atoms.copy()
    forces = 0.1 * labelled.positions
    labelled.calc = SinglePointCalculator(labelled, energy=0.0, forces=forces)
    config = load_config({"training": {"loss": "huber", "noise": True, "kl_weight": 1e-3}}).training
    dtype = next(backbone.parameters()).dtype
    batch = StructureData([labelled], backbone.graph_of, dtype=dtype).batch([0])
    objective = Objective(model, config, num_data=100)
    objective(batch, ("benchmark", 0), 1.0).total.backward()


def flops_table(found: dict[str, Any]) -> str:
    """Format the results as Markdown."""
    lines = ["| model | | parameters (M) | inference (MFLOP/atom) | training (MFLOP/atom) |"]
    lines.append("|---|---|---|---|---|")
    for name, rows in found.items():
        for way, row in rows.items():
            cells = [name, way, *(f"{row[key]:.4g}" for key in row)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
