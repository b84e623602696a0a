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
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from blips import keys
from blips.backbones.base import Backbone
from blips.backbones.derivatives import (
    Derivatives,
    asked_for,
    differentiable,
    first_derivatives_only,
    plain_outputs,
)
from blips.bayes.linear import Product
from blips.data.graph import AtomGraph, Graph
from blips.errors import ConversionError, InputError
from blips.inference.maps import STRUCTURE, Call, ChosenMaps, gradients, watched
from blips.prediction import Outputs

Noise = Tensor | Mapping[str, Tensor]  # v [K, d], or P v [K, out, in] of each matrix
Depth = Literal["energies", "members", "rows"]
CoefficientFunction = Callable[[Graph], Mapping[str, Tensor]]


@dataclass(frozen=True)
class LinearModel:
    """A model to first order in the noise of chosen weights.

    The variance of the noise is that of `coefficients` where these are given, [rows] by map name,
    functions of the graph and so of the positions; else it is 1.
    """

    backbone: Backbone
    maps: ChosenMaps
    coefficients: CoefficientFunction | None = None

    def __call__(
        self, graph: Graph, *, forces: bool = True, stress: bool = False, depth: Depth = "members"
    ) -> "Linearised":
        """Run the model over a batch; the options are those of `Linearised`."""
        return Linearised(self, graph, forces=forces, stress=stress, depth=depth)


class _Source(NamedTuple):
    """Where quantities come from: y = dT/d(leaf) / divisor, T a scalar that `products` change."""

    products: list[Product]
    leaves: Mapping[str, tuple[Tensor, Tensor | float]]  # quantity -> leaf, divisor


class Linearised:
    """A pass over a batch of S structures, and its derivatives by the noise of chosen weights.

    `depth` says what will be asked for: changes of "energies" alone, which take no backward pass of
    their own; "members" with their forces; or "rows" of forces and stress.
    """

    products: list[Product]  # all applications of the maps, with the gradients of the energy

    def __init__(
        self, model: LinearModel, graph: Graph, *, forces: bool, stress: bool, depth: Depth
    ) -> None:
        if not isinstance(graph, AtomGraph):
            raise InputError(
                "error bars at first order need a potential of atoms (an AtomGraph), not a "
                f'{type(graph).__name__}; use method="mc"'
            )
        backbone, maps = model.backbone, model.maps
        self.graph, self.maps = graph, maps
        self._backbone, self._depth = backbone, depth
        with torch.enable_grad():
            moved, inputs = differentiable(graph, forces=forces or not stress, stress=stress)
            once = depth == "energies" or (maps.last and depth == "members")
            with first_derivatives_only(once), watched(backbone, list(maps.roles)) as calls:
                outputs = backbone(moved)
            if not calls:
                raise ConversionError("none of the chosen maps ran; choose maps that are used")
            found = model.coefficients(moved) if model.coefficients else {}
            self._scale = {name: coef.sqrt() for name, coef in found.items()}
            if keys.ENERGIES in outputs:
                outputs[keys.ENERGY] = graph.sum_over_structures(outputs[keys.ENERGIES])
            self._total = outputs[keys.ENERGY].sum()
            if backbone.conservative:
                self._sources, found = self._of_energy(inputs, calls, forces, stress)
                outputs |= found
            else:
                outputs = asked_for(outputs, graph, Derivatives(forces=forces, stress=stress))
                self._sources = self._of_outputs(outputs, calls, forces, stress)
        self._known: Outputs = {name: value.detach() for name, value in outputs.items()}

    def _of_energy(
        self, inputs: Mapping[str, Tensor], calls: Sequence[Call], forces: bool, stress: bool
    ) -> tuple[list[_Source], Outputs]:
        """Return one source of forces and stress; and these, where only energies are to change."""
        leaves: dict[str, tuple[Tensor, Tensor | float]] = {}
        if forces:
            leaves[keys.FORCES] = inputs["positions"], -1.0
        if stress:
            leaves[keys.STRESS] = inputs["strain"], self.graph.volumes()[:, None, None]
        alone = self._depth == "energies"
        also = [leaf for leaf, _ in leaves.values()] if alone else []
        self.products, found = gradients(self._total, calls, also, differentiable=not alone)
        sources = [_Source(self.products, leaves)] if leaves else []
        return sources, _divided(leaves, found) if alone else {}

    def _of_outputs(
        self, outputs: Outputs, calls: Sequence[Call], forces: bool, stress: bool
    ) -> list[_Source]:
        """Return sources of forces and stress that the model predicts directly, one each."""
        self.products, _ = gradients(self._total, calls, differentiable=True)
        sources: list[_Source] = []
        for name, asked in ((keys.FORCES, forces), (keys.STRESS, stress)):
            if asked and self._depth != "energies":
                leaf = torch.zeros_like(outputs[name]).requires_grad_()
                products, _ = gradients((leaf * outputs[name]).sum(), calls, differentiable=True)
                sources.append(_Source(products, {name: (leaf, 1.0)}))
        return sources

    @cached_property
    def outputs(self) -> Outputs:
        """Energy, energies, forces and stress of the plain model, bit for bit."""
        if not self._backbone.conservative or self._depth == "energies":
            return self._known
        if self.maps.last:
            return self._known | self._derivatives(self._total)
        asked = [name for source in self._sources for name in source.leaves]
        forces, stress = keys.FORCES in asked, keys.STRESS in asked
        return plain_outputs(self._backbone, self.graph, forces=forces, stress=stress)

    def _derivatives(self, energy: Tensor) -> Outputs:
        """Compute forces and stress of a total energy, as far as they are asked for."""
        return _differentiated(energy, self._sources[0]) if self._sources else {}

    def energy_rows(self) -> Tensor:
        """Compute rows b of the energies, [S, d] per unit of noise, eV."""
        return self._rows(self.products).detach()

    def rows_along(self, quantity: str, directions: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield rows b of u . y for "forces" or "stress" y and each direction u, [S, d].

        Directions have the shape of y, [N, 3] or [S, 3, 3]; u . y is summed over each structure.
        """
        source = next(one for one in self._sources if quantity in one.leaves)
        leaf, divisor = source.leaves[quantity]
        with torch.enable_grad():
            rows = self._rows(source.products)  # [S, d]
            dual = torch.zeros_like(rows).requires_grad_()
            (change,) = torch.autograd.grad(
                (dual * rows).sum(), leaf, create_graph=True, materialize_grads=True
            )
            change = change / divisor  # linear in the dual
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
        """Compute first-order changes [K, ...] of all outputs for noise v [K, d]."""
        noise = self._weight_noise(v)
        changes = self.energy_changes(noise)
        count = len(changes[keys.ENERGY])
        for source in self._sources:
            totals = self._total_changes(source.products, noise, count)
            found = [_differentiated(total, source) for total in totals]
            changes |= {name: torch.stack([one[name] for one in found]) for name in source.leaves}
        return changes

    @torch.no_grad()
    def energy_changes(self, v: Noise) -> Outputs:
        """Compute first-order changes of the energies for noise v [K, d], without backward passes.

        Energy [K, S]; and energies [K, N] where the rows of the maps are those of atoms.
        """
        of_rows = self._tangents(self.products, self._weight_noise(v))  # [N or S, K]
        if not self._by_atom:
            return {keys.ENERGY: of_rows.T}
        return {keys.ENERGY: self.graph.sum_over_structures(of_rows).T, keys.ENERGIES: of_rows.T}

    @torch.enable_grad()
    def member(self, v: Tensor) -> Outputs:
        """Compute E + b . v and its derivatives for noise v [d], with one backward pass."""
        noise = self._weight_noise(v[None])
        if not self._backbone.conservative:
            changes = self.members(noise)
            return {name: self.outputs[name] + change[0] for name, change in changes.items()}
        changes = self.energy_changes(noise)
        found = {name: self._known[name] + change[0] for name, change in changes.items()}
        (change,) = self._total_changes(self.products, noise, 1)
        return found | self._derivatives(self._total + change)

    @property
    def _by_atom(self) -> bool:
        """Whether the change of an atom's energy is the sum over its own rows."""
        return self.maps.last and all(role == keys.NODE for role in self.maps.roles.values())

    def _weight_noise(self, v: Noise) -> Mapping[str, Tensor]:
        """Compute P v of each matrix, [K, out, in]."""
        return v if isinstance(v, Mapping) else self.maps.sketch.gather(v)

    def _total_changes(
        self, products: list[Product], noise: Mapping[str, Tensor], count: int
    ) -> Iterator[Tensor]:
        """Yield b . v_k summed over all rows, differentiable, one k at a time.

        A backward pass of one of them does not meet the products of the others.
        """
        parts = [
            (noise[one.name].to(one.weight), one.weight.abs(), one.h, self._scaled_gradient(one))
            for one in products
        ]
        for k in range(count):
            yield torch.stack(
                [(linear(h, weight * eps[k]) * g).sum() for eps, weight, h, g in parts]
            ).sum()

    def _tangents(self, products: list[Product], noise: Mapping[str, Tensor]) -> Tensor:
        """Compute b . v_k of atoms where that is possible, else of structures, [N or S, K]."""
        total = torch.zeros((), dtype=torch.float64, device=self.graph.positions.device)
        for product in products:
            eps = noise[product.name].to(product.weight)  # [K, out, in]
            g = self._scaled_gradient(product)
            of_rows = _along(product.h, product.weight.abs(), g, eps).double()  # [rows, K]
            if not self._by_atom:
                of_structures = of_rows.new_zeros(self.graph.num_structures, len(eps))
                of_rows = of_structures.index_add(0, self._structure_of_rows(product), of_rows)
            total = total + of_rows
        return total

    def _rows(self, products: list[Product]) -> Tensor:
        """Compute P^T of |W| sum_rows sqrt(coef) g h^T of each structure, [S, d]."""
        sums: dict[str, Tensor] = {}
        for product in products:
            structure = self._structure_of_rows(product)
            g = self._scaled_gradient(product)
            moved = _sum_of_outer(g, product.h, structure, self.graph.num_structures)
            moved = moved * product.weight.detach().abs()
            sums[product.name] = sums.get(product.name, 0.0) + moved
        return self.maps.sketch.scatter(sums)

    def _scaled_gradient(self, product: Product) -> Tensor:
        """Scale each row's gradient by the root of its coefficient, [rows, *irrep, out]."""
        scale = self._scale.get(product.name.partition("[")[0])
        if scale is None:
            return product.gradient
        return product.gradient * scale.view(-1, *[1] * (product.h.ndim - 1))

    def _structure_of_rows(self, product: Product) -> Tensor:
        """Return the structure of each row, [rows]."""
        role = self.maps.roles[product.name.partition("[")[0]]
        if role == STRUCTURE:
            return torch.arange(self.graph.num_structures, device=product.h.device)
        atoms = self._backbone.row_atoms(self.graph)[role]
        return self.graph.structure.index_select(0, atoms)


def _along(h: Tensor, weight: Tensor, g: Tensor, eps: Tensor) -> Tensor:
    """Compute g^T (|W| eps_k) h of each row, summed over irreps, [rows, K]."""
    moved = linear(h, (weight * eps).flatten(0, 1))
    moved = moved.unflatten(-1, eps.shape[:2]) * g.unsqueeze(-2)
    return moved.flatten(1, -3).sum(dim=(1, 3)) if moved.ndim > 3 else moved.sum(dim=2)


def _sum_of_outer(g: Tensor, h: Tensor, structure: Tensor, count: int) -> Tensor:
    """Sum over the rows of each structure, and over irreps, of g h^T, [S, out, in]."""
    if count == 1:
        return (g.flatten(0, -2).T @ h.flatten(0, -2))[None]
    order = structure.argsort(stable=True)
    sizes = torch.bincount(structure, minlength=count).tolist()
    parts = zip(g[order].split(sizes), h[order].split(sizes), strict=True)
    return torch.stack([a.flatten(0, -2).T @ b.flatten(0, -2) for a, b in parts])


def _differentiated(scalar: Tensor, source: _Source) -> Outputs:
    """Compute d(scalar)/d(leaf) / divisor of each quantity, in one backward pass."""
    leaves = [leaf for leaf, _ in source.leaves.values()]
    found = torch.autograd.grad(scalar, leaves, retain_graph=True, materialize_grads=True)
    return _divided(source.leaves, found)


def _divided(
    leaves: Mapping[str, tuple[Tensor, Tensor | float]], gradients: Sequence[Tensor]
) -> Outputs:
    return {
        name: gradient / divisor
        for (name, (_, divisor)), gradient in zip(leaves.items(), gradients, strict=True)
    }
