"""Forces and stress as derivatives of a (possibly sampled) energy.

    F = -dE/dr,    stress = (1 / V) dE/d(strain),    r -> r (1 + strain), cell -> cell (1 + strain)

The energy is evaluated once; with the noise of a sample held fixed, these are the forces and the
stress of that sample (method: F = -dE/dr of the sampled energy, posterior widths included).
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.data.graph import AtomGraph, Graph
from blips.errors import InputError

EnergyFunction = Callable[[AtomGraph], Tensor]  # graph -> energies of the atoms [N]


class Derivatives(TypedDict, total=False):
    """Which derivatives to take; the options of `energy_and_derivatives`."""

    forces: bool
    stress: bool
    create_graph: bool


def energy_and_derivatives(
    energies_of: EnergyFunction,
    graph: AtomGraph,
    *,
    forces: bool = True,
    stress: bool = False,
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """Compute energy [S], energies [N], forces [N, 3] and stress [S, 3, 3] of `energies_of`.

    In eV, eV/A and eV/A^3; the stress is symmetric, positive under tension. `create_graph` keeps
    what is needed to differentiate the derivatives (training).
    """
    if not (forces or stress):
        energies = energies_of(graph)
        return {keys.ENERGY: graph.sum_over_structures(energies), keys.ENERGIES: energies}
    volumes = graph.volumes() if stress else None
    with torch.enable_grad():
        strained, inputs = differentiable(graph, forces=forces, stress=stress)
        with first_derivatives_only(not create_graph):
            energies = energies_of(strained)
        energy = graph.sum_over_structures(energies)
        gradients = torch.autograd.grad(
            energy.sum(),
            list(inputs.values()),
            create_graph=create_graph,
            materialize_grads=True,  # an isolated atom feels nothing
        )
    gradient_of = dict(zip(inputs, gradients, strict=True))
    out = {keys.ENERGY: energy, keys.ENERGIES: energies}
    if forces:
        out[keys.FORCES] = -gradient_of["positions"]
    if volumes is not None:
        out[keys.STRESS] = gradient_of["strain"] / volumes[:, None, None]
    return out if create_graph else {name: value.detach() for name, value in out.items()}


def plain_outputs(
    backbone: Backbone,
    graph: Graph,
    run: Callable[[Graph], dict[str, Tensor]] | None = None,
    **derivatives: Unpack[Derivatives],
) -> dict[str, Tensor]:
    """Compute what is asked for of a backbone's outputs; `run` stands in for its `forward`."""
    run = run or backbone
    if not backbone.conservative:
        return asked_for(run(graph), graph, derivatives)
    if not isinstance(graph, AtomGraph):
        raise InputError(f"a potential needs an AtomGraph, got {type(graph).__name__}")
    return energy_and_derivatives(lambda graph: run(graph)[keys.ENERGIES], graph, **derivatives)


def asked_for(
    outputs: dict[str, Tensor], graph: Graph, derivatives: Derivatives
) -> dict[str, Tensor]:
    """Select the requested outputs of a model that predicts forces and stress directly."""
    wanted = {keys.FORCES: derivatives.get("forces", True), keys.STRESS: derivatives.get("stress")}
    if wanted[keys.STRESS] and keys.STRESS not in outputs:
        if isinstance(graph, AtomGraph):
            graph.volumes()  # says which structure has none
        raise InputError("this model predicts no stress; ask for energy and forces only")
    return {name: value for name, value in outputs.items() if wanted.get(name, True)}


_first_only: ContextVar[bool] = ContextVar("blips_first_derivatives_only", default=False)


def only_first_derivatives() -> bool:
    """Return whether what is computed now will be differentiated at most once."""
    return _first_only.get()


@contextmanager
def first_derivatives_only(first_only: bool) -> Generator[None]:
    """Say, within the block, whether what is computed will be differentiated at most once."""
    token = _first_only.set(first_only)
    try:
        yield
    finally:
        _first_only.reset(token)


def differentiable(
    graph: AtomGraph, *, forces: bool, stress: bool
) -> tuple[AtomGraph, dict[str, Tensor]]:
    """Rebuild the graph as a function of new leaves: positions and a strain per structure."""
    positions, cell = graph.positions, graph.cell
    inputs: dict[str, Tensor] = {}
    if forces:
        positions = inputs["positions"] = positions.detach().requires_grad_()
    if stress:
        strain = inputs["strain"] = torch.zeros_like(cell).requires_grad_()
        symmetric = 0.5 * (strain + strain.transpose(-1, -2))  # [S, 3, 3]
        node_strain = symmetric[graph.structure]  # [N, 3, 3]
        positions = positions + torch.einsum("na,nab->nb", positions, node_strain)
        cell = cell + cell @ symmetric
    return replace(graph, positions=positions, cell=cell), inputs
