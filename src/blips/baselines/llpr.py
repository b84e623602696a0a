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

from dataclasses import astuple, dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from blips import keys
from blips.backbones.base import Backbone
from blips.baselines.base import QUANTITIES, Learned, data_batches
from blips.baselines.last_layer import summed_features
from blips.data.batch import TrainingData
from blips.data.graph import Graph
from blips.errors import InputError
from blips.prediction import Prediction, point_prediction
from blips.train.objective import plain_outputs

GRID = np.logspace(-10.0, 2.0, 37)  # sigma0^2 in units of the mean eigenvalue of F^T F
FORM_FLOOR = 1e-12  # of q, in units of its mean: components that vanish by symmetry


@dataclass(frozen=True)
class Rigidity:
    """The quadratic form q(f) = f^T (F^T F + sigma0^2 I)^-1 f, by the eigenvectors of F^T F."""

    eigenvalues: Tensor  # [D]
    eigenvectors: Tensor  # [D, D], columns

    @classmethod
    def of(cls, matrix: Tensor) -> "Rigidity":
        """Diagonalise F^T F, [D, D]."""
        eigenvalues, eigenvectors = torch.linalg.eigh(matrix)
        return cls(eigenvalues.clamp(min=0.0), eigenvectors)

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


@dataclass(frozen=True)
class Scale:
    """alpha^2 and sigma0^2 of a quantity."""

    alpha_square: float
    sigma0_square: float

    @classmethod
    def best(cls, form: Tensor, error: Tensor, sigma0_square: Tensor) -> "Scale":
        """Choose the scale of least NLL, for forms [R, G] and errors [R] of validation data."""
        form = form.clamp(min=FORM_FLOOR * form.mean(dim=0))
        alpha_square = (error.square()[:, None] / form).mean(dim=0)  # [G]
        nll = alpha_square.log() + form.log().mean(dim=0)  # [G], but for factor and constant
        best = int(nll.argmin())
        return cls(float(alpha_square[best]), float(sigma0_square[best]))


class LastLayerRigidity(Learned):
    """Error bars for a trained potential from its last-layer features.

    Args:
        backbone: the plain potential; `fit` trains it, `condition` takes it as it is.
        forces_weight: of the force components among the rows of F; 0 for energies alone.
    """

    kind: ClassVar = "llpr"
    learned: ClassVar = ("eigenvalues", "eigenvectors")
    eigenvalues: Tensor | None
    eigenvectors: Tensor | None

    def __init__(self, backbone: Backbone, forces_weight: float = 1.0) -> None:
        super().__init__(backbone, {"forces_weight": forces_weight})
        self.forces_weight = forces_weight

    @property
    def rigidity(self) -> Rigidity:
        """The quadratic form of the training set; an error where it is not known yet."""
        if self.eigenvalues is None or self.eigenvectors is None:
            raise InputError("the rigidity is not known yet; call fit or condition first")
        return Rigidity(self.eigenvalues, self.eigenvectors)

    @rigidity.setter
    def rigidity(self, value: Rigidity) -> None:
        self.eigenvalues = value.eigenvalues
        self.eigenvectors = value.eigenvectors.contiguous()  # as a file has it: the same bits

    @property
    def scales(self) -> dict[str, Scale]:
        """alpha^2 and sigma0^2 by quantity."""
        return {name: Scale(*pair) for name, pair in self.scale_pairs.items()}

    @scales.setter
    def scales(self, value: dict[str, Scale]) -> None:
        self.scale_pairs = {name: astuple(scale) for name, scale in value.items()}

    def condition(self, train: TrainingData, valid: TrainingData) -> None:
        """Build F^T F from training data; choose alpha and sigma0 on validation data."""
        matrix: Tensor | float = 0.0
        for batch in data_batches(self.backbone, train):
            energy_rows, force_rows = summed_features(self.backbone, batch.graph)
            flat = force_rows.flatten(end_dim=-2)
            matrix = matrix + energy_rows.T @ energy_rows + self.forces_weight * flat.T @ flat
        self.rigidity = Rigidity.of(torch.as_tensor(matrix))
        self.scales = self._choose_scales(self.rigidity, valid)

    def _choose_scales(self, rigidity: Rigidity, valid: TrainingData) -> dict[str, Scale]:
        """Choose the scales of least NLL."""
        grid = rigidity.grid()
        forms: dict[str, list[Tensor]] = {name: [] for name in QUANTITIES}
        found: dict[str, list[Tensor]] = {name: [] for name in QUANTITIES}
        for graph, errors in self.errors(valid):
            rows = dict(zip(QUANTITIES, summed_features(self.backbone, graph), strict=True))
            for name, error in errors.items():
                forms[name].append(rigidity.form(rows[name], grid).reshape(-1, len(grid)))
                found[name].append(error.flatten())
        return {
            name: Scale.best(torch.cat(parts), torch.cat(found[name]), grid)
            for name, parts in forms.items()
            if parts
        }

    def predict_graph(
        self, graph: Graph, *, seed: int = 0, forces: bool = True, stress: bool = False
    ) -> Prediction:
        """Predict with std and the covariance of each atom's force; energies alone are cheap."""
        rigidity, scales = self.rigidity, self.scales
        with torch.no_grad():
            arrays = dict(plain_outputs(self.backbone, graph, forces=forces, stress=stress))
        with_forces = forces and keys.FORCES in scales
        energy_rows, force_rows = summed_features(self.backbone, graph, gradients=with_forces)
        if keys.ENERGY in scales:
            scale = scales[keys.ENERGY]
            cov = rigidity.covariance(energy_rows[:, None], scale.sigma0_square)  # [S, 1, 1]
            arrays["energy_std"] = (scale.alpha_square * cov[:, 0, 0]).sqrt()
        if with_forces:
            scale = scales[keys.FORCES]
            cov = scale.alpha_square * rigidity.covariance(force_rows, scale.sigma0_square)
            arrays["forces_cov"] = cov  # [N, 3, 3]
            arrays["forces_std"] = cov.diagonal(dim1=-2, dim2=-1).sqrt()
        return point_prediction(arrays, graph, method=self.kind)
