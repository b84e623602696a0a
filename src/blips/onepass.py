"""Energy uncertainty at first order, from the one backward pass that forces need anyway.

The model runs at its posterior means, the gradients dE/dz of every Bayesian map come with those by
the positions, and `blips.bayes.moments` makes a variance of them: no sampling, and a share of it
for every edge and atom. Noise of a size that bends the energy is beyond first order: compare with
`method="mc"` where it matters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from blips import keys
from blips.backbones.derivatives import Derivatives, differentiate
from blips.bayes import noise as noise_context
from blips.bayes.moments import Record, RecordedMeans, row_variances, shared_variances
from blips.data.graph import AtomGraph
from blips.errors import InputError
from blips.predict import Outputs


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

    def attribution(self) -> Attribution:
        """Variance for rows with noise of their own (as Monte-Carlo samples have)."""
        graph = self.graph
        row_var: dict[str, Tensor] = {}
        for record, gradient in zip(self.records, self.gradients, strict=True):
            role = self.roles[record.map_name]
            added = row_variances(record, gradient).double()
            row_var[role] = row_var[role] + added if role in row_var else added
        atom_var = torch.zeros(graph.num_nodes, dtype=torch.float64, device=graph.numbers.device)
        for role, variances in row_var.items():
            atom_var = atom_var.index_add(0, self.row_atoms[role], variances)
        return Attribution(graph.sum_over_structures(atom_var), row_var, atom_var)

    def shares(self) -> dict[str, Tensor]:
        """Share of every atom in the variance, by map in the order of application, [N] eV^2."""
        zeros = torch.zeros(
            self.graph.num_nodes, dtype=torch.float64, device=self.graph.numbers.device
        )
        found: dict[str, Tensor] = {}
        for record, gradient in zip(self.records, self.gradients, strict=True):
            atoms = self.row_atoms[self.roles[record.map_name]]
            before = found.get(record.map_name, zeros)
            added = row_variances(record, gradient).double()
            found[record.map_name] = before.index_add(0, atoms, added)
        return found

    def atom_coef(self) -> Tensor:
        """Mean coefficient of the rows of each atom, over all maps, [N]."""
        size, device = self.graph.num_nodes, self.graph.numbers.device
        total = torch.zeros(size, dtype=torch.float64, device=device)
        count = torch.zeros(size, dtype=torch.float64, device=device)
        for record in self.records:
            atoms = self.row_atoms[self.roles[record.map_name]]
            total = total.index_add(0, atoms, record.coef.double())
            count = count.index_add(0, atoms, torch.ones_like(record.coef).double())
        return total / count.clamp_min(1.0)

    def shared_energy_var(self) -> Tensor:
        """Variance for noise that all rows share (as frozen draws have), [S] eV^2."""
        blocks: dict[str, list[tuple[Record, Tensor, Tensor]]] = {}
        for record, gradient in zip(self.records, self.gradients, strict=True):
            atoms = self.row_atoms[self.roles[record.map_name]]
            structure = self.graph.structure.index_select(0, atoms)
            blocks.setdefault(record.block_name, []).append((record, gradient, structure))
        count = self.graph.num_structures
        variances = [shared_variances(applied, count).double() for applied in blocks.values()]
        return torch.stack(variances).sum(dim=0)


def one_pass(
    energies_of: Callable[[AtomGraph], Outputs],
    coefficients_of: Callable[[AtomGraph], Mapping[str, Tensor]],
    graph: AtomGraph,
    roles: Mapping[str, str],
    row_atoms: Mapping[str, Tensor],
    **derivatives: Unpack[Derivatives],
) -> OnePass:
    """Evaluate a conservative model once.

    Args:
        energies_of: the backbone.
        coefficients_of: the inference network on a graph.
        graph: a batch of structures.
        roles: row type of each Bayesian map.
        row_atoms: the atom of each row, by row type.
        derivatives: forces, stress.
    """
    recorder = _recorder(coefficients_of, graph)

    def energies(strained: AtomGraph) -> Tensor:
        with noise_context.use(recorder):
            return energies_of(strained)[keys.ENERGIES]

    outputs, gradients = differentiate(
        energies, graph, inner=lambda: [record.z for record in recorder.records], **derivatives
    )
    return OnePass(outputs, graph, roles, row_atoms, recorder.records, gradients)


def direct_one_pass(
    outputs_of: Callable[[AtomGraph], Outputs],
    coefficients_of: Callable[[AtomGraph], Mapping[str, Tensor]],
    graph: AtomGraph,
    roles: Mapping[str, str],
    row_atoms: Mapping[str, Tensor],
) -> OnePass:
    """Evaluate a model once that predicts forces beside the energy; arguments as for `one_pass`."""
    recorder = _recorder(coefficients_of, graph)
    with torch.enable_grad():
        leaf = replace(graph, positions=graph.positions.detach().requires_grad_())
        with noise_context.use(recorder):
            outputs = outputs_of(leaf)
        if keys.ENERGY not in outputs:
            raise InputError(
                "one pass needs a model of energies: their gradients are what the variance is "
                f'made of, but this one predicts {", ".join(outputs)}; use method="mc"'
            )
        gradients = torch.autograd.grad(
            outputs[keys.ENERGY].sum(),
            [record.z for record in recorder.records],
            materialize_grads=True,  # a head of the forces alone
        )
    detached = {name: value.detach() for name, value in outputs.items()}
    return OnePass(detached, graph, roles, row_atoms, recorder.records, list(gradients))


def _recorder(
    coefficients_of: Callable[[AtomGraph], Mapping[str, Tensor]], graph: AtomGraph
) -> RecordedMeans:
    with torch.no_grad():
        return RecordedMeans({k: v.detach() for k, v in coefficients_of(graph).items()})
