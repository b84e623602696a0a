"""Small models of every kind, in double precision, and independent derivatives by their weights."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from torch import Tensor

import blips
from blips import keys
from blips.backbones import PaiNN, SchNet, build
from blips.backbones.derivatives import energy_and_derivatives
from blips.bayes import noise
from blips.bayes.noise import Noise
from blips.bayes.sketch import Sketch
from blips.data.graph import AtomGraph
from blips.inference.maps import ChosenMaps, chosen_roles
from helpers import TINY, quartz, small_orb

SMALL_CHGNET = {
    **{f"{part}_fea_dim": 8 for part in ("atom", "bond", "angle")},
    **{f"{part}_conv_hidden_dim": 8 for part in ("atom", "bond")},
    "mlp_hidden_dims": [8, 8],
    "num_radial": 9,
    "num_angular": 9,
    "n_conv": 2,
}
SMALL_SEVENNET = {
    "cutoff": 3.5,
    "channel": 4,
    "lmax": 1,
    "num_convolution_layer": 2,
    "is_parity": True,
    "self_connection_type": "linear",
    "use_bias_in_linear": True,
    "weight_nn_hidden_neurons": [8],
    "radial_basis": {"radial_basis_name": "bessel", "bessel_basis_num": 4},
    "conv_denominator": 3.0,
}
PACKAGES = {
    "chgnet": "chgnet.model",
    "sevennet": "sevenn.util",
    "orb": "orb_models.forcefield.pretrained",
    "orb-direct": "orb_models.forcefield.pretrained",
}


def small(name: str, dtype: torch.dtype = torch.float64) -> blips.BayesianPotential:
    """A random model of that name."""
    with warnings.catch_warnings():  # of what packages' own dependencies lack
        warnings.simplefilter("ignore")
        if name in PACKAGES:
            pytest.importorskip(PACKAGES[name])
    torch.manual_seed(0)
    if name in ("painn", "schnet"):
        backbone = {"painn": PaiNN, "schnet": SchNet}[name](**TINY)
    elif name == "chgnet":
        backbone = build("chgnet", architecture=SMALL_CHGNET)
    elif name == "sevennet":
        backbone = build("sevennet", settings=SMALL_SEVENNET, numbers=[7, 1, 8, 14])
    else:
        backbone = small_orb(name)
    return blips.bayesianize(backbone.to(dtype))


def with_wide_coefficients(potential: blips.BayesianPotential) -> blips.BayesianPotential:
    """Its inference network tells rows apart."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in potential.encoder.parameters():
            parameter += 0.08 * torch.randn_like(parameter)
    return potential


def boxed_ammonia(seed: int = 0) -> Atoms:
    atoms = molecule("NH3")
    atoms.rattle(0.05, seed=seed)
    atoms.set_cell([5.0, 5.5, 6.0])
    atoms.center()
    atoms.pbc = True
    return atoms


def periodic() -> list[Atoms]:
    """Two structures of different size, with volumes."""
    return [quartz(rattle=0.1), boxed_ammonia()]


def labelled(structures: list[Atoms], seed: int = 0, forces: bool = True) -> list[Atoms]:
    """Copies with random labels."""
    rng = np.random.default_rng(seed)
    found = []
    for atoms in structures:
        one = atoms.copy()
        labels = {"energy": float(rng.normal())}
        if forces:
            labels["forces"] = rng.normal(size=(len(one), 3))
        one.calc = SinglePointCalculator(one, **labels)
        found.append(one)
    return found


def chosen(
    potential: blips.BayesianPotential,
    maps: str | Sequence[str],
    dimension: int = 10**6,
    seed: int = 0,
) -> ChosenMaps:
    roles, last = chosen_roles(potential.backbone, potential.roles, maps)
    return ChosenMaps.of(potential.backbone, roles, dimension, seed, last=last)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# ---- the model with other weights ----


def with_linear_weights(
    potential: blips.BayesianPotential, maps: ChosenMaps, v: Tensor, step: float
) -> blips.BayesianPotential:
    """A copy with theta + step |theta| (P v) as weights of its `nn.Linear` layers."""
    changed, first = copy.deepcopy(potential), 0
    for name in maps.sketch.shapes:
        weight = changed.backbone.get_submodule(name).weight
        if maps.sketch.size == maps.sketch.num_weights:  # P is the identity
            own = v[first : first + weight.numel()].view_as(weight)
        else:
            own = maps.sketch.gather(v[None])[name][0]
        first += weight.numel()
        with torch.no_grad():
            weight += step * weight.abs() * own
    return changed


@dataclass
class Shift:
    """Noise of a frozen draw: step sign(theta) (P v) in the chosen maps, none elsewhere."""

    sketch: Sketch
    v: Tensor
    step: float

    def normal_like(self, name: str, weight: Tensor) -> Tensor:
        if name not in self.sketch.shapes:
            return torch.zeros_like(weight)
        return self.step * weight.sign() * self.sketch.gather(self.v[None])[name][0]


def with_frozen_noise(
    potential: blips.BayesianPotential,
    maps: ChosenMaps,
    graph: AtomGraph,
    v: Tensor,
    step: float,
    network: bool = False,
    **derivatives: bool,
) -> dict[str, Tensor]:
    """Outputs for theta + step sqrt(coef) |theta| (P v), coef 1 or the inference network's."""
    roles, counts = potential.conversion.roles, potential.backbone.row_counts(graph)

    def energies_of(graph: AtomGraph) -> Tensor:
        ones = {name: torch.ones(counts[role]).double() for name, role in roles.items()}
        coefficients = potential.coefficients(graph) if network else ones
        with noise.use(Noise(coefficients, [Shift(maps.sketch, v, step)])):
            return potential.backbone(graph)[keys.ENERGIES]

    return energy_and_derivatives(energies_of, graph, **derivatives)


def central(above: dict[str, Tensor], below: dict[str, Tensor], step: float) -> dict[str, Tensor]:
    return {name: (above[name] - below[name]) / (2 * step) for name in above}
