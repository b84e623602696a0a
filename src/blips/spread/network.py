r"""A small equivariant network that corrects the force covariances of `tensors`.

They are made of first derivatives of the energy; what second ones add, a
network learns. With T_i = trace Cov_i of the tensors, unit vectors u_ij of the bonds and arrows
f_i along the forces, of length x / sqrt(1 + x^2) with x^2 = coef_i |F_i|^2 / T_i, the corrected
covariance is again a sum of positive tensors,

    Cov'_i = e^{s_i} Cov_i + T_i ( sum_c b_ci b_ci^T + sum_j p_ij^2 u_ij u_ij^T + a_i 1 )
    b_ci = k_ci f_i + sum_j ( m_cij u_ij + q_cij f_j )

The factors s, a, k (of atoms) and m, q, p (of bonds) come from one step of message passing over
invariants: element, distance, f_i . u_ij, and logarithms of v_gi / T_i, x_i^2 and T_j / T_i. These
stay as they are when all coefficients grow by one factor, so the covariance grows by that factor.
`distil` trains the network against the model's own samples; no labels are needed.

A model without symmetry (ORB) may be less sure along one axis than along another. Its network is
free: it also sees the directions u_ij themselves and the features from which the model makes the
force of an atom, and adds T_i L_i L_i^T with any lower triangular L_i.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from blips.spread.geometry import Geometry, outer

CUTOFF = 5.0  # A, of the bonds that it sees
WIDTH = 0.4  # A, of the Gaussians of distances
NUM_GAUSSIANS = 12
FARTHEST = 4.0  # standard deviations over the lessons that an input may be from its mean
NUM_ELEMENTS = 119
SMALLEST = 1e-12
LEAST_EVEN = 0.003  # a_i before training


@dataclass(frozen=True)
class Scene:
    """What the network sees of structures.

    Attributes:
        numbers: atomic, [N].
        invariants: log v_g / T and log x^2, [N, G + 1].
        arrows: f, [N, 3].
        cov: of the tensors, [N, 3, 3] (eV/A)^2.
        bonds: within the cutoff.
        features: of a model without symmetry, [N, D]; None for others.
    """

    numbers: Tensor
    invariants: Tensor
    arrows: Tensor
    cov: Tensor
    bonds: Geometry
    features: Tensor | None = None

    @classmethod
    def of(
        cls,
        numbers: Tensor,
        shares: Tensor,
        forces: Tensor,
        coef: Tensor,
        cov: Tensor,
        bonds: Geometry,
        features: Tensor | None = None,
    ) -> Self:
        """Out of the ingredients of the tensors and their sum."""
        trace = _trace(cov).clamp_min(SMALLEST)[:, None]  # [N, 1]
        arrows = (coef[:, None] / trace).sqrt() * forces
        squares = arrows.square().sum(dim=1, keepdim=True)
        invariants = torch.log(torch.cat([shares / trace, squares], dim=1) + SMALLEST)
        arrows = arrows / (1 + squares).sqrt()
        return cls(numbers, invariants, arrows, cov, bonds.within(CUTOFF), features)

    @property
    def trace(self) -> Tensor:
        """T, [N]."""
        return _trace(self.cov)

    @property
    def inputs(self) -> Tensor:
        """Of the network for every atom, [N, G + 1 + D]."""
        if self.features is None:
            return self.invariants
        return torch.cat([self.invariants, self.features], dim=1)

    def to(self, dtype: torch.dtype) -> Self:
        """With numbers of that type."""
        return type(self)(
            self.numbers,
            self.invariants.to(dtype),
            self.arrows.to(dtype),
            self.cov.to(dtype),
            self.bonds.to(dtype),
            None if self.features is None else self.features.to(dtype),
        )

    @classmethod
    def join(cls, scenes: Sequence[Self]) -> Self:
        """One scene of several."""
        features = [one.features for one in scenes if one.features is not None]
        return cls(
            torch.cat([one.numbers for one in scenes]),
            torch.cat([one.invariants for one in scenes]),
            torch.cat([one.arrows for one in scenes]),
            torch.cat([one.cov for one in scenes]),
            Geometry.join([one.bonds for one in scenes]),
            torch.cat(features) if features else None,
        )


class Refinement(nn.Module):
    """The network; `forward` gives the corrected covariances of a scene, [N, 3, 3].

    Atoms of elements that no lesson had keep the covariance of the tensors.
    """

    centre: Tensor
    width: Tensor
    row: Tensor

    def __init__(
        self,
        elements: Sequence[int],
        inputs: int,
        hidden: int = 32,
        channels: int = 6,
        free: bool = False,
    ) -> None:
        super().__init__()
        self.settings = {
            "elements": [int(z) for z in elements],
            "inputs": inputs,
            "hidden": hidden,
            "channels": channels,
            "free": free,
        }
        self.channels = channels
        self.free = free
        row = torch.zeros(NUM_ELEMENTS, dtype=torch.long)
        row[list(elements)] = torch.arange(1, 1 + len(elements))
        self.register_buffer("row", row, persistent=False)
        self.register_buffer("centre", torch.zeros(inputs))
        self.register_buffer("width", torch.ones(inputs))
        self.element = nn.Embedding(1 + len(elements), hidden, padding_idx=0)
        nn.init.zeros_(self.element.weight)  # an unknown element stays there
        self.atom = nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.of_sender, self.of_receiver = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.of_bond = nn.Linear(NUM_GAUSSIANS + (5 if free else 2), hidden)
        self.message = nn.Linear(hidden, hidden)
        self.bond_factors = _read_out(hidden, 1 + 2 * channels)
        self.atom_factors = _read_out(hidden, 2 + channels + (6 if free else 0))

    def forward(self, scene: Scene) -> Tensor:
        """Cov', [N, 3, 3] (eV/A)^2."""
        bonds, channels = scene.bonds, self.channels
        features = self._features(scene)  # [N, hidden]
        messages = self._messages(scene, features)  # [E, hidden]
        window = _window(bonds.distance)[:, None]
        along, unit_factor, arrow_factor = (self.bond_factors(messages) * window).split(
            [1, channels, channels], dim=1
        )
        heard = bonds.sum(F.silu(messages) * window)
        factors = self.atom_factors(features + self.message(heard))
        grown, even, own, lower = factors.tensor_split([1, 2, 2 + channels], dim=1)
        vectors = bonds.sum(
            unit_factor[:, :, None] * bonds.unit[:, None, :]
            + arrow_factor[:, :, None] * scene.arrows.index_select(0, bonds.sender)[:, None, :]
        )
        vectors = vectors + own[:, :, None] * scene.arrows[:, None, :]  # b, [N, channels, 3]
        added = torch.einsum("nci,ncj->nij", vectors, vectors)
        added = added + bonds.sum(along.square()[:, :, None] * outer(bonds.unit))
        if self.free:
            added = added + _square_of_lower(lower)
        unit = torch.eye(3, dtype=added.dtype, device=added.device)
        added = added + LEAST_EVEN * even.exp()[:, :, None] * unit
        cov = grown.exp()[:, :, None] * scene.cov + scene.trace[:, None, None] * added
        return torch.where((self.row[scene.numbers] > 0)[:, None, None], cov, scene.cov)

    def _features(self, scene: Scene) -> Tensor:
        inputs = ((scene.inputs - self.centre) / self.width).clamp(-FARTHEST, FARTHEST)
        return self.atom(inputs) + self.element(self.row[scene.numbers])

    def _messages(self, scene: Scene, features: Tensor) -> Tensor:
        bonds = scene.bonds
        log_trace = torch.log(scene.trace.clamp_min(SMALLEST))
        change = log_trace.index_select(0, bonds.sender) - log_trace.index_select(0, bonds.receiver)
        angle = (scene.arrows.index_select(0, bonds.receiver) * bonds.unit).sum(dim=1)
        of_bond = [_gaussians(bonds.distance), change.clamp(-FARTHEST, FARTHEST)[:, None]]
        of_bond += [angle[:, None], bonds.unit] if self.free else [angle[:, None]]
        return (
            self.of_sender(features).index_select(0, bonds.sender)
            + self.of_receiver(features).index_select(0, bonds.receiver)
            + self.of_bond(torch.cat(of_bond, dim=1))
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description, with its weights."""
        tensors = {name: value.float().contiguous() for name, value in self.state_dict().items()}
        return {**self.settings, "tensors": base64.b64encode(to_safetensors(tensors)).decode()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """What `to_dict` described."""
        settings = {name: value for name, value in saved.items() if name != "tensors"}
        network = cls(**settings)
        network.load_state_dict(from_safetensors(base64.b64decode(saved["tensors"])))
        return network.double().eval()


def _read_out(hidden: int, count: int) -> nn.Sequential:
    """Factors that begin small."""
    last = nn.Linear(hidden, count)
    nn.init.normal_(last.weight, std=0.02)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), last)


def _gaussians(distance: Tensor) -> Tensor:
    """[E] -> [E, NUM_GAUSSIANS]."""
    centres = torch.linspace(0.8, CUTOFF, NUM_GAUSSIANS).to(distance)
    return torch.exp(-(((distance[:, None] - centres) / WIDTH) ** 2))


def _window(distance: Tensor) -> Tensor:
    """From 1 smoothly to 0 at the cutoff, [E]."""
    return (1 - (distance / CUTOFF).clamp(max=1.0) ** 6) ** 2


def _square_of_lower(elements: Tensor) -> Tensor:
    """L L^T of lower triangular L, [N, 6] -> [N, 3, 3]; zeros give 1 / 3, whose trace is one."""
    x, y, z = (elements[:, :3].exp() / math.sqrt(3)).unbind(1)  # the diagonal of L
    yx, zx, zy = elements[:, 3:].unbind(1)
    none = torch.zeros_like(x)
    lower = torch.stack([x, none, none, yx, y, none, zx, zy, z], dim=1).view(-1, 3, 3)
    return lower @ lower.mT


def _trace(cov: Tensor) -> Tensor:
    return cov.diagonal(dim1=1, dim2=2).sum(dim=1)
