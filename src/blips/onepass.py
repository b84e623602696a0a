"""Energy uncertainty at first order, from the one backward pass that forces need anyway.

The model runs at its posterior means, the gradients dE/dz of every Bayesian map come with those by
the positions, and `blips.bayes.moments` makes a variance of them: no sampling, and a share of it
for every edge and atom. Noise of a size that bends the energy is beyond first order: compare with
`method="mc"` where it matters.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones.derivatives import Derivatives, differentiate
from blips.backbones.hooks import inputs_of
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
    features: Tensor | None = None  # [N, D] that direct forces are made of, where they are known

    @cached_property
    def row_variances(self) -> list[Tensor]:
        """Of every record, [rows] eV^2, for rows with noise of their own."""
        return [row_variances(*pair) for pair in zip(self.records, self.gradients, strict=True)]

    def attribution(self) -> Attribution:
        """Variance for rows with noise of their own (as Monte-Carlo samples have)."""
        row_var = self._by_role(range(len(self.records)))
        atom_var = self._of_atoms(row_var)
        return Attribution(self.graph.sum_over_structures(atom_var), row_var, atom_var)

    def shares(self, groups: int) -> Tensor:
        """Share of every atom in the variance, for groups of maps, [N, G] eV^2.

        The maps are cut into (at most) `groups` groups in the order in which they were applied.
        """
        order = {name: k for k, name in enumerate(dict.fromkeys(r.map_name for r in self.records))}
        groups = min(groups, len(order))
        members: list[list[int]] = [[] for _ in range(groups)]
        for k, record in enumerate(self.records):
            members[order[record.map_name] * groups // len(order)].append(k)
        return torch.stack([self._of_atoms(self._by_role(part)) for part in members], dim=1)

    def atom_coef(self) -> Tensor:
        """Mean coefficient of the rows of each atom, over all maps, [N]."""
        total: dict[str, Tensor] = {}
        count: dict[str, Tensor] = {}
        for record in self.records:
            role = self.roles[record.map_name]
            total[role] = total.get(role, 0.0) + record.coef
            count[role] = count.get(role, 0.0) + torch.ones_like(record.coef)
        return self._of_atoms(total) / self._of_atoms(count).clamp_min(1.0)

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
    watch: AbstractContextManager[Any],
    **derivatives: Unpack[Derivatives],
) -> OnePass:
    """Evaluate a conservative model once.

    Args:
        energies_of: the backbone.
        coefficients_of: the inference network on a graph.
        graph: a batch of structures.
        roles: row type of each Bayesian map.
        row_atoms: the atom of each row, by row type.
        watch: active while the model runs (`blips.bayes.gathered`).
        derivatives: forces, stress.
    """
    recorder = _recorder(coefficients_of, graph)

    def energies(strained: AtomGraph) -> Tensor:
        with noise_context.use(recorder), watch:
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
    watch: AbstractContextManager[Any],
    force_head: nn.Module | None = None,
) -> OnePass:
    """Evaluate a model once that predicts forces beside the energy; arguments as for `one_pass`.

    The inputs of `force_head`, if there is one, are kept as features of the atoms.
    """
    recorder = _recorder(coefficients_of, graph)
    with torch.enable_grad():
        leaf = replace(graph, positions=graph.positions.detach().requires_grad_())
        with noise_context.use(recorder), watch, inputs_of(force_head) as seen:
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
    features = seen[-1].detach() if seen else None
    found = (detached, graph, roles, row_atoms, recorder.records, list(gradients))
    return OnePass(*found, features=features)


def _recorder(
    coefficients_of: Callable[[AtomGraph], Mapping[str, Tensor]], graph: AtomGraph
) -> RecordedMeans:
    with torch.no_grad():
        return RecordedMeans({k: v.detach() for k, v in coefficients_of(graph).items()})
