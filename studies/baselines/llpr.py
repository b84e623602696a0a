"""Last-layer prediction rigidity: how far a structure is from the features of the training set.

Bigi, Chong, Ceriotti, Grasselli, "A prediction rigidity formalism for low-cost uncertainties in
trained neural networks" (2024). The energy is linear in the summed last-layer features Phi, its
forces in -dPhi/dr (see `last_layer`). As in Bayesian linear regression on these features,

    sigma^2 = alpha^2 f^T ( F^T F + sigma0^2 I )^-1 f

with f = Phi for an energy and f = dPhi/dr for a force component. The rows of F are those of the
training labels: the Phi of the structures and, times `forces_weight`, the dPhi/dr of the atoms.
alpha and sigma0 are chosen for energies and forces each on validation data: sigma0 from a grid,
alpha^2 = mean( error^2 / q ), q the form above with alpha = 1, which for a given sigma0 has the
least Gaussian NLL.

The trained model is not touched. Biases do not count as features.
"""

from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.data.dataset import TrainingData
from blips.data.graph import Graph
from studies.baselines.last_layer import summed_features
from studies.baselines.learned import QUANTITIES, Learned, data_batches

GRID = np.logspace(-10.0, 2.0, 37)  # sigma0^2 in units of the mean eigenvalue of F^T F
FORM_FLOOR = 1e-12  # of q, in units of its mean: components that vanish by symmetry


class Rigidity(NamedTuple):
    """The quadratic form q(f) = f^T (F^T F + sigma0^2 I)^-1 f, by the eigenvectors of F^T F."""

    eigenvalues: Tensor  # [D]
    eigenvectors: Tensor  # [D, D], columns

    @classmethod
    def of(cls, matrix: Tensor) -> "Rigidity":
        """Diagonalise F^T F, [D, D]."""
        eigenvalues, eigenvectors = torch.linalg.eigh(matrix)
        return cls(eigenvalues.clamp(min=0.0), eigenvectors.contiguous())  # as a file has it

    def grid(self) -> Tensor:
        """Return candidates for sigma0^2, [G]."""
        return self.eigenvalues.mean() * torch.as_tensor(GRID).to(self.eigenvalues)

    def form(self, rows: Tensor, sigma0_square: Tensor) -> Tensor:
        """Compute q of rows [..., D] for every sigma0^2 [G], [..., G]."""
        projected = (rows @ self.eigenvectors).square()  # [..., D]
        return projected @ (1.0 / (self.eigenvalues[:, None] + sigma0_square))

    def covariance(self, rows: Tensor, sigma0_square: float) -> Tensor:
        """Compute rows (F^T F + sigma0^2 I)^-1 rows^T, [..., R, D] -> [..., R, R]."""
        projected = rows @ self.eigenvectors
        scaled = projected / (self.eigenvalues + sigma0_square)
        return scaled @ projected.transpose(-1, -2)

    def best_scale(self, form: Tensor, error: Tensor) -> tuple[float, float]:
        """Choose alpha^2 and sigma0^2 of least NLL, for forms [R, G] of the grid, errors [R]."""
        form = form.clamp(min=FORM_FLOOR * form.mean(dim=0))
        alpha_square = (error.square()[:, None] / form).mean(dim=0)  # [G]
        nll = alpha_square.log() + form.log().mean(dim=0)  # [G], but for factor and constant
        best = int(nll.argmin())
        return float(alpha_square[best]), float(self.grid()[best])


class LastLayerRigidity(Learned):
    """Error bars for a trained potential from its last-layer features.

    Args:
        backbone: the plain potential; `fit` trains it, `condition` takes it as it is.
        forces_weight: of the force components among the rows of F; 0 for energies alone.
    """

    kind: ClassVar = "llpr"
    learned: ClassVar = ("eigenvalues", "eigenvectors")
    eigenvalues: Tensor
    eigenvectors: Tensor

    def __init__(self, backbone: Backbone, forces_weight: float = 1.0) -> None:
        super().__init__(backbone, {"forces_weight": forces_weight})
        self.forces_weight = forces_weight

    @property
    def rigidity(self) -> Rigidity:
        """The quadratic form of the training set."""
        return Rigidity(self.eigenvalues, self.eigenvectors)

    @rigidity.setter
    def rigidity(self, value: Rigidity) -> None:
        self.eigenvalues, self.eigenvectors = value

    def learn(self, train: TrainingData) -> None:
        """Build F^T F."""
        matrix: Tensor | float = 0.0
        for batch in data_batches(self.backbone, train):
            energy_rows, force_rows = summed_features(self.backbone, batch.graph)
            flat = force_rows.flatten(end_dim=-2)
            matrix = matrix + energy_rows.T @ energy_rows + self.forces_weight * flat.T @ flat
        self.rigidity = Rigidity.of(torch.as_tensor(matrix))

    def features(self, graph: Graph) -> dict[str, Tensor]:
        """Compute q of every label for every sigma0^2 of the grid."""
        rigidity = self.rigidity
        rows = zip(QUANTITIES, summed_features(self.backbone, graph), strict=True)
        return {name: rigidity.form(row, rigidity.grid()) for name, row in rows}

    def best_scale(self, features: Tensor, error: Tensor) -> tuple[float, float]:
        """Choose alpha^2 and sigma0^2."""
        return self.rigidity.best_scale(features, error)

    def stds(self, graph: Graph, *, forces: bool) -> dict[str, Tensor]:
        """Compute std of energies and of force components; energies alone are cheap."""
        scales, found = self.scales, {}
        forces = forces and keys.FORCES in scales
        energy_rows, force_rows = summed_features(self.backbone, graph, gradients=forces)
        if keys.ENERGY in scales:
            alpha_square, sigma0_square = scales[keys.ENERGY]
            cov = self.rigidity.covariance(energy_rows[:, None], sigma0_square)  # [S, 1, 1]
            found["energy_std"] = (alpha_square * cov[:, 0, 0]).sqrt()
        if forces:
            alpha_square, sigma0_square = scales[keys.FORCES]
            cov = alpha_square * self.rigidity.covariance(force_rows, sigma0_square)
            found["forces_std"] = cov.diagonal(dim1=-2, dim2=-1).sqrt()  # cov [N, 3, 3]
        return found
