"""Energy uncertainty at first order, from the one backward pass that forces need anyway.

The model runs at its posterior means, the gradients dE/dz of every Bayesian map come with those by
the positions, and `blips.bayes.moments` makes a variance of them: no sampling, and a share of it
for every edge and atom. Noise of a size that bends the energy is beyond first order: compare with
`method="mc"` where it matters.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Unpack

import torch
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.backbones.derivatives import Derivatives, asked_for, differentiate
from blips.bayes import noise as noise_context
from blips.bayes.moments import Record, RecordedMeans, row_variances
from blips.data.graph import AtomGraph, Graph
from blips.errors import InputError
from blips.prediction import Outputs

CoefficientFunction = Callable[[Graph], Mapping[str, Tensor]]
OutputFunction = Callable[[AtomGraph], Outputs]


@dataclass(frozen=True)
class Attribution:
    """Where the variance of the energies comes from, eV^2.

    Attributes:
        energy_var: of each structure, [S].
        row_var: share of every row, [rows] by row type; over all rows of a structure they add up
            to its `energy_var`.
        atom_var: the same by the atom that a row belongs to (an edge: its receiver), [N].
    """

    energy_var: Tensor
    row_var: Mapping[str, Tensor]
    atom_var: Tensor


@dataclass(frozen=True)
class OnePass:
    """One evaluation at the posterior means, with everything that its variance is made of."""

    outputs: Outputs
    graph: AtomGraph
    roles: Mapping[str, str]
    row_atoms: Mapping[str, Tensor]
    records: list[Record]
    gradients: list[Tensor]

    @cached_property
    def row_variances(self) -> list[Tensor]:
        """Of every record, [rows] eV^2, for rows with noise of their own."""
        return [row_variances(*pair) for pair in zip(self.records, self.gradients, strict=True)]

    def attribution(self) -> Attribution:
        """Variance for rows with noise of their own (as Monte-Carlo samples have)."""
        row_var = self._by_role(range(len(self.records)))
        atom_var = self._of_atoms(row_var)
        return Attribution(self.graph.sum_over_structures(atom_var), row_var, atom_var)

    def _by_role(self, records: Iterable[int]) -> dict[str, Tensor]:
        """Sum of the variances of these records, [rows] by row type."""
        found: dict[str, Tensor] = {}
        for k in records:
            role, added = self.roles[self.records[k].map_name], self.row_variances[k].double()
            found[role] = found[role] + added if role in found else added
        return found

    def _of_atoms(self, of_rows: Mapping[str, Tensor]) -> Tensor:
        """[rows] by row type -> [N], float64."""
        device = self.graph.numbers.device
        total = torch.zeros(self.graph.num_nodes, dtype=torch.float64, device=device)
        for role, values in of_rows.items():
            total = total.index_add(0, self.row_atoms[role], values.double())
        return total


def one_pass(
    backbone: Backbone,
    coefficients_of: CoefficientFunction,
    graph: Graph,
    roles: Mapping[str, str],
    **derivatives: Unpack[Derivatives],
) -> OnePass:
    """Evaluate a model once.

    Args:
        backbone: whose maps are Bayesian.
        coefficients_of: the inference network on a graph.
        graph: a batch of structures.
        roles: row type of each Bayesian map.
        derivatives: forces, stress.
    """
    if not isinstance(graph, AtomGraph):
        raise InputError(
            f"{type(backbone).__name__} is no potential, so it has no energy to take "
            'gradients of; use method="mc"'
        )
    with torch.no_grad():
        recorder = RecordedMeans({k: v.detach() for k, v in coefficients_of(graph).items()})

    def outputs_of(graph: AtomGraph) -> Outputs:
        with noise_context.use(recorder):
            return backbone(graph)

    run = _conservative if backbone.conservative else _direct
    outputs, gradients = run(outputs_of, graph, recorder.records, derivatives)
    row_atoms = backbone.row_atoms(graph)
    return OnePass(outputs, graph, roles, row_atoms, recorder.records, gradients)


def _conservative(
    outputs_of: OutputFunction, graph: AtomGraph, records: list[Record], derivatives: Derivatives
) -> tuple[Outputs, list[Tensor]]:
    """Outputs, and dE/dz of all records, from the backward pass of the forces."""
    return differentiate(
        lambda strained: outputs_of(strained)[keys.ENERGIES],
        graph,
        inner=lambda: [record.z for record in records],
        **derivatives,
    )


def _direct(
    outputs_of: OutputFunction, graph: AtomGraph, records: list[Record], derivatives: Derivatives
) -> tuple[Outputs, list[Tensor]]:
    """The same for a model that predicts forces itself, by a backward pass of the energy alone."""
    with torch.enable_grad():
        leaf = replace(graph, positions=graph.positions.detach().requires_grad_())
        outputs = asked_for(outputs_of(leaf), leaf, derivatives)
        if keys.ENERGY not in outputs:
            raise InputError(
                "one pass needs a model of energies: their gradients are what the variance is "
                f'made of, but this one predicts {", ".join(outputs)}; use method="mc"'
            )
        gradients = torch.autograd.grad(
            outputs[keys.ENERGY].sum(),
            [record.z for record in records],
            materialize_grads=True,  # a head of the forces alone
        )
    return {name: value.detach() for name, value in outputs.items()}, list(gradients)
