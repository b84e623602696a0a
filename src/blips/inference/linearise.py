r"""Outputs of a model to first order in the noise of chosen weights.

With weights w = theta + sqrt(coef) |theta| (P v) of the chosen maps,

    y(x; v) = y(x) + B(x) v + O(v^2),        B = dy/dv at v = 0

B is taken through the maps as they run: for a map z = h W^T on rows with coefficients `coef`, and
g = dE/dz, the energy has dE/d(P v) = |W| * sum_rows sqrt(coef) g h^T. The value of y, forces
included, is the plain model's, bit for bit: the maps run as they are, and are only watched.

Forces are -dE/dr, so their rows and the forces of members are derivatives of the energy's by r:

    rows        b_u = -u . db_E/dr        (a double backward pass for each direction u)
    members     F_k = F - d(b_E . v_k)/dr     (a backward pass for each k over one forward pass)

In the readout everything else of the network is differentiated once only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.backbones.derivatives import (
    Derivatives,
    asked_for,
    differentiable,
    energy_and_derivatives,
    first_derivatives_only,
)
from blips.bayes.linear import Product
from blips.data.graph import AtomGraph, Graph
from blips.errors import ConversionError, InputError
from blips.inference.maps import STRUCTURE, ChosenMaps
from blips.inference.watch import Call, gradients, watched
from blips.prediction import Outputs

Noise = Tensor | Mapping[str, Tensor]  # v [K, d], or P v [K, out, in] of each matrix
Depth = Literal["energies", "members", "rows"]
CoefficientFunction = Callable[[Graph], Mapping[str, Tensor]]


class _Source(NamedTuple):
    """Where the first-order change of a quantity comes from: dT/d(leaf) / divisor."""

    products: list[Product]
    leaf: Tensor
    divisor: Tensor | float


class Linearised:
    """A pass over a batch of structures, and its derivatives by the noise of chosen weights.

    Args:
        backbone: the model.
        graph: S structures.
        maps: whose weights have noise.
        coefficients: graph -> [rows] by map name, where noise depends on the rows (and so on the
            positions); elsewhere it is 1.
        forces: whether forces will be asked for.
        stress: whether the stress will be asked for.
        depth: what will be asked for: changes of "energies" alone, which take no backward pass of
            their own; "members" with their forces; or "rows" of forces and stress.
    """

    def __init__(
        self,
        backbone: Backbone,
        graph: AtomGraph,
        maps: ChosenMaps,
        *,
        coefficients: CoefficientFunction | None = None,
        forces: bool = True,
        stress: bool = False,
        depth: Depth = "members",
    ) -> None:
        self.graph, self.maps = graph, maps
        self._backbone, self._depth = backbone, depth
        self._row_atoms = backbone.row_atoms(graph)
        with torch.enable_grad():
            moved, inputs = differentiable(graph, forces=forces or not stress, stress=stress)
            once = depth == "energies" or (maps.last and depth == "members")
            with first_derivatives_only(once), watched(backbone, list(maps.roles)) as calls:
                outputs = backbone(moved)
            if not calls:
                raise ConversionError("none of the chosen maps ran; choose maps that are used")
            found = coefficients(moved) if coefficients else {}
            self._scale = {name: coef.sqrt() for name, coef in found.items()}
            if keys.ENERGIES in outputs:
                outputs[keys.ENERGY] = graph.sum_over_structures(outputs[keys.ENERGIES])
            self._total = outputs[keys.ENERGY].sum()
            if backbone.conservative:
                self._sources = self._of_energy(inputs, calls, forces, stress)
            else:
                outputs = asked_for(outputs, graph, Derivatives(forces=forces, stress=stress))
                self._sources = self._of_outputs(outputs, calls, forces, stress)
        self._known: Outputs = {name: value.detach() for name, value in outputs.items()}

    def _of_energy(
        self, inputs: Mapping[str, Tensor], calls: Sequence[Call], forces: bool, stress: bool
    ) -> dict[str, _Source]:
        """Sources of forces and stress that are derivatives of the energy."""
        leaves: dict[str, tuple[Tensor, Tensor | float]] = {}
        if forces:
            leaves[keys.FORCES] = inputs["positions"], -1.0
        if stress:
            leaves[keys.STRESS] = inputs["strain"], self.graph.volumes()[:, None, None]
        alone = self._depth == "energies"
        also = [leaf for leaf, _ in leaves.values()] if alone else []
        self._energy, found = gradients(self._total, calls, also, differentiable=not alone)
        self._derived = {
            name: gradient / divisor
            for (name, (_, divisor)), gradient in zip(leaves.items(), found, strict=False)
        }
        return {name: _Source(self._energy, *leaf) for name, leaf in leaves.items()}

    def _of_outputs(
        self, outputs: Outputs, calls: Sequence[Call], forces: bool, stress: bool
    ) -> dict[str, _Source]:
        """Sources of forces and stress that the model predicts directly."""
        self._energy, _ = gradients(self._total, calls, differentiable=True)
        sources: dict[str, _Source] = {}
        for name, asked in ((keys.FORCES, forces), (keys.STRESS, stress)):
            if asked and self._depth != "energies":
                leaf = torch.zeros_like(outputs[name]).requires_grad_()
                products, _ = gradients((leaf * outputs[name]).sum(), calls, differentiable=True)
                sources[name] = _Source(products, leaf, 1.0)
        return sources

    @cached_property
    def outputs(self) -> Outputs:
        """Energy, energies, forces and stress of the plain model, bit for bit."""
        if not self._backbone.conservative:
            return self._known
        if self._depth == "energies":
            return self._known | self._derived
        if self.maps.last:
            return self._known | self._derivatives(self._total)
        wanted = {name: name in self._sources for name in (keys.FORCES, keys.STRESS)}
        return energy_and_derivatives(  # as the plain model runs: with compiled first derivatives
            lambda graph: self._backbone(graph)[keys.ENERGIES], self.graph, **wanted
        )

    def _derivatives(self, energy: Tensor) -> Outputs:
        """Forces and stress of a total energy, as far as they are asked for."""
        leaves = [source.leaf for source in self._sources.values()]
        if not leaves:
            return {}
        found = torch.autograd.grad(energy, leaves, retain_graph=True, materialize_grads=True)
        return {
            name: gradient / source.divisor
            for (name, source), gradient in zip(self._sources.items(), found, strict=True)
        }

    def energy_rows(self) -> Tensor:
        """Rows b of the energies, [S, d] per unit of noise, eV."""
        return self._rows(self._energy).detach()

    def rows_along(self, quantity: str, directions: Iterable[Tensor]) -> Iterator[Tensor]:
        """Rows b of u . y for one quantity and each direction u, [S, d].

        Args:
            quantity: "forces" or "stress".
            directions: u in the shape of the quantity, [N, 3] or [S, 3, 3]; u . y is summed over
                each structure.
        """
        source = self._sources[quantity]
        with torch.enable_grad():
            rows = self._rows(source.products)  # [S, d]
            dual = torch.zeros_like(rows).requires_grad_()
            (change,) = torch.autograd.grad(
                (dual * rows).sum(), source.leaf, create_graph=True, materialize_grads=True
            )
            change = change / source.divisor  # linear in the dual
            for direction in directions:
                (row,) = torch.autograd.grad(
                    (change * direction.to(change)).sum(),
                    dual,
                    retain_graph=True,
                    materialize_grads=True,
                )
                yield row

    @torch.enable_grad()
    def members(self, v: Noise) -> Outputs:
        """First-order changes of all outputs for noise v [K, d], [K, ...] of each output."""
        noise = self._weight_noise(v)
        of_atoms = self._tangents(self._energy, noise)
        changes = self._energies_of(of_atoms.detach())
        for name, source in self._sources.items():
            own = source.products is not self._energy
            tangents = self._tangents(source.products, noise) if own else of_atoms
            changes[name] = _backward_each(tangents.sum(dim=0), source.leaf) / source.divisor
        return changes

    def energy_changes(self, v: Noise) -> Outputs:
        """First-order changes of the energies for noise v [K, d], of atoms too where possible."""
        with torch.no_grad():
            return self._energies_of(self._tangents(self._energy, self._weight_noise(v)))

    def _energies_of(self, of_rows: Tensor) -> Outputs:
        """Energy [K, S], and energies [K, N] where rows are those of atoms, of [N or S, K]."""
        if not self._by_atom:
            return {keys.ENERGY: of_rows.T}
        energy = self.graph.sum_over_structures(of_rows)
        return {keys.ENERGY: energy.T, keys.ENERGIES: of_rows.T}

    @torch.enable_grad()
    def member(self, v: Tensor) -> Outputs:
        """Outputs of the member with noise v [d], E + b . v: one backward pass, as the model's."""
        if not self._backbone.conservative:
            changes = self.members(v[None])
            return {name: self.outputs[name] + change[0] for name, change in changes.items()}
        of_rows = self._tangents(self._energy, self._weight_noise(v[None]))  # [N or S, 1]
        changes = self._energies_of(of_rows.detach())
        found = {name: self._known[name] + change[0] for name, change in changes.items()}
        return found | self._derivatives(self._total + of_rows.sum())

    @property
    def _by_atom(self) -> bool:
        """Whether the change of an atom's energy is the sum over its own rows."""
        return self.maps.last and all(role == keys.NODE for role in self.maps.roles.values())

    def _weight_noise(self, v: Noise) -> Mapping[str, Tensor]:
        """P v of each matrix, [K, out, in]."""
        return v if isinstance(v, Mapping) else self.maps.sketch.gather_all(v)

    def _tangents(self, products: list[Product], noise: Mapping[str, Tensor]) -> Tensor:
        """B . v_k, shared out to atoms where that is possible, else to structures, [N or S, K]."""
        count = self.graph.num_nodes if self._by_atom else self.graph.num_structures
        total: Tensor | None = None
        for product in products:
            eps = noise[product.name].to(product.weight)  # [K, out, in]
            of_rows = (_along(product, eps) * self._row_scale(product)).double()  # [rows, K]
            total = of_rows.new_zeros(count, len(eps)) if total is None else total
            total = total.index_add(0, self._owner(product), of_rows)
        if total is None:
            raise InputError("none of the chosen maps was applied to these structures")
        return total

    def _rows(self, products: list[Product]) -> Tensor:
        """P^T of |W| sum_rows sqrt(coef) g h^T of each structure, [S, d]."""
        sums: dict[str, Tensor] = {}
        for product in products:
            structure = self._structure_of_rows(product)
            g = product.gradient * self._row_scale(product).view(-1, *[1] * (product.h.ndim - 1))
            moved = _sum_of_outer(g, product.h, structure, self.graph.num_structures)
            moved = moved * product.weight.detach().abs()
            sums[product.name] = sums.get(product.name, 0.0) + moved
        return self.maps.sketch.scatter(sums)

    def _row_scale(self, product: Product) -> Tensor:
        """Root of the coefficients of the rows, [rows, 1]; 1 where there are none."""
        scale = self._scale.get(product.name.partition("[")[0])
        return product.h.new_ones(1, 1) if scale is None else scale[:, None]

    def _role(self, product: Product) -> str:
        return self.maps.roles[product.name.partition("[")[0]]

    def _structure_of_rows(self, product: Product) -> Tensor:
        """The structure of each row, [rows]."""
        role = self._role(product)
        if role == STRUCTURE:
            return torch.arange(self.graph.num_structures, device=product.h.device)
        return self.graph.structure.index_select(0, self._row_atoms[role])

    def _owner(self, product: Product) -> Tensor:
        """What `_tangents` shares a row out to, [rows]."""
        return self._row_atoms[keys.NODE] if self._by_atom else self._structure_of_rows(product)


def _along(product: Product, eps: Tensor) -> Tensor:
    """g^T (|W| eps_k) h of each row, summed over irreps, [rows, K]."""
    weight = product.weight.abs()
    if len(product.h) < len(eps):  # fewer rows than draws: the outer product g h^T first
        g, h = (
            x.flatten(1, -2) if x.ndim > 2 else x[:, None] for x in (product.gradient, product.h)
        )
        outer = torch.einsum("nao,nai->noi", g, h) * weight
        return outer.flatten(1) @ eps.flatten(1).T
    moved = torch.nn.functional.linear(product.h, (weight * eps).flatten(0, 1))
    moved = moved.unflatten(-1, eps.shape[:2]) * product.gradient.unsqueeze(-2)
    return moved.flatten(1, -3).sum(dim=(1, 3)) if moved.ndim > 3 else moved.sum(dim=2)


def _sum_of_outer(g: Tensor, h: Tensor, structure: Tensor, count: int) -> Tensor:
    """Sum over the rows of each structure, and over irreps, of g h^T, [S, out, in]."""
    if count == 1:
        return (g.flatten(0, -2).T @ h.flatten(0, -2))[None]
    order = structure.argsort(stable=True)
    sizes = torch.bincount(structure, minlength=count).tolist()
    parts = zip(g[order].split(sizes), h[order].split(sizes), strict=True)
    return torch.stack([a.flatten(0, -2).T @ b.flatten(0, -2) for a, b in parts])


def _backward_each(scalars: Tensor, leaf: Tensor) -> Tensor:
    """d(scalar_k)/d(leaf), [K] -> [K, *leaf], a backward pass for each."""
    return torch.stack(
        [
            torch.autograd.grad(scalar, leaf, retain_graph=True, materialize_grads=True)[0]
            for scalar in scalars
        ]
    )
