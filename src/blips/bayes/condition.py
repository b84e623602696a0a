r"""The Gaussian posterior of weights that have seen data, in closed form.

Outputs are linear in the noise v of the weights, y(x; v) = y(x) + b(x) . v, with the prior
v ~ N(0, tau^2 I). Rows b of the data, seen with noise of variance s^2, leave

    Lambda = I / tau^2 + sum_rows b b^T / s^2,        Var[y*] = b*^T Lambda^-1 b*

Only r = s^2 / tau^2 decides the shape, and tau the size. With the eigenvalues l_j and eigenvectors
u_j of G = sum_rows b b^T,

    Lambda^-1 = tau^2 ( I - sum_j u_j u_j^T  l_j / (l_j + r) )

so one decomposition serves every r, and directions that no row reaches keep the prior's tau.

| symbol | variable |
|---|---|
| b, rows of the data | `rows`, [n, d] |
| G | `Evidence.gram()`, [d, d] |
| l_j, u_j | `Spectrum.values` [m], `Spectrum.vectors` [m, d] |
| r | `ratio` |
| tau | `scale` |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from blips.bayes import estimators
from blips.bayes.noise import seeded_generator
from blips.errors import InputError

NEGLIGIBLE = 1e-15  # eigenvalues below this share of the largest are rounding


class Evidence:
    """What rows b say about the weights: G = sum b b^T, in at most d^2 numbers.

    Fewer rows than dimensions are kept as they are (the kernel form), more as their sum. Sums of
    two are the evidence of both sets of rows, so it streams, and runs in parallel by adding.
    """

    def __init__(self, dimension: int, gram: Tensor | None = None, count: int = 0) -> None:
        self.dimension = dimension
        self.count = count  # rows that were added
        self._gram = gram  # [d, d], once there are as many rows
        self._rows: list[Tensor] = []  # [n, d] each, until then

    def add(self, rows: Tensor) -> None:
        """Add rows b, [n, d]."""
        if rows.ndim != 2 or rows.shape[1] != self.dimension:
            raise InputError(
                f"rows of shape {tuple(rows.shape)} do not fit a posterior of {self.dimension} "
                "coordinates; condition with the same maps and dimension as before"
            )
        if not bool(torch.isfinite(rows).all()):
            raise InputError(
                "the derivatives of the model by its weights are not finite; do atoms of a "
                "conditioning structure overlap?"
            )
        rows = rows.detach().double()
        self.count += len(rows)
        if self._gram is not None:
            self._gram += rows.T @ rows
            return
        self._rows.append(rows)
        if self.count >= self.dimension:
            self._gram, self._rows = self.gram(), []

    def merge(self, other: "Evidence") -> None:
        """Add all rows of another evidence."""
        self.add(other.rows() if other.keeps_rows else torch.zeros(0, other.dimension))
        if not other.keeps_rows:
            self._gram, self._rows = self.gram() + other.gram(), []
            self.count += other.count

    def gram(self) -> Tensor:
        """Return G, [d, d] float64."""
        if self._gram is not None:
            return self._gram
        rows = self.rows()
        return rows.T @ rows

    def rows(self) -> Tensor:
        """Return rows whose sum of b b^T is G, [n, d]; those that were added, if kept."""
        if not self.keeps_rows:
            raise InputError("the rows were summed; ask for gram()")
        return torch.cat(self._rows) if self._rows else torch.zeros(0, self.dimension).double()

    @property
    def keeps_rows(self) -> bool:
        """Whether the rows are kept as they are."""
        return self._gram is None

    @property
    def mean_square(self) -> float:
        """Mean of |b|^2 over the rows."""
        if not self.count:
            return 1.0
        total = self.rows().square().sum() if self.keeps_rows else self.gram().trace()
        return float(total) / self.count or 1.0

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save; G as its lower triangle."""
        if self.keeps_rows:
            return {"rows": self.rows()}
        lower = torch.tril_indices(self.dimension, self.dimension)
        return {"gram": self.gram()[lower[0], lower[1]]}

    @classmethod
    def from_state(cls, dimension: int, count: int, state: dict[str, Tensor]) -> "Evidence":
        """Restore what `state` returned."""
        if "rows" in state:
            evidence = cls(dimension)
            evidence.add(state["rows"])
            return evidence
        row, column = torch.tril_indices(dimension, dimension)
        gram = torch.zeros(dimension, dimension, dtype=torch.float64)
        gram[row, column] = gram[column, row] = state["gram"].double()
        return cls(dimension, gram, count)

    def spectrum(self) -> "Spectrum":
        """Compute eigenvalues and eigenvectors of G."""
        if self.keeps_rows:
            rows = self.rows()
            values, left = _eigh(rows @ rows.T)  # the kernel form, [n, n]
            return Spectrum(values, (left / values.sqrt()).T @ rows)
        values, vectors = _eigh(self.gram())
        return Spectrum(values, vectors.T.contiguous())


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues [m] that are more than rounding and, in columns, eigenvectors [n, m]."""
    eigh = cast(Callable[[Tensor], tuple[Tensor, Tensor]], getattr(torch.linalg, "eigh"))  # noqa: B009
    values, vectors = eigh(matrix)  # in ascending order
    kept = values > NEGLIGIBLE * values[-1:].clamp_min(torch.finfo(values.dtype).tiny)
    return values[kept], vectors[:, kept]


@dataclass(frozen=True)
class Spectrum:
    """G = sum_j l_j u_j u_j^T, without the directions that no row reaches."""

    values: Tensor  # [m] float64, positive
    vectors: Tensor  # [m, d]

    def variances(self, rows: Tensor, ratios: Tensor) -> Tensor:
        """Compute Var[b . v] / tau^2 of rows [n, d] for each ratio [R], [R, n]."""
        rows = rows.double()
        along = (rows @ self.vectors.T).square()  # [n, m]
        removed = self.values / (self.values + ratios[:, None].double())  # [R, m]
        whole = rows.square().sum(dim=1)  # [n]
        return (whole - removed @ along.T).clamp_min(0.0)

    def var(self, rows: Tensor, ratio: float, scale: float) -> Tensor:
        """Compute Var[b . v] of rows [n, d] for a ratio r and a scale tau, [n]."""
        (var,) = self.variances(rows, torch.tensor([ratio], dtype=torch.float64))
        return scale**2 * var

    def draws(self, normals: Tensor, ratio: float) -> Tensor:
        """Turn standard normals into samples of N(0, Lambda^-1) / tau, [K, d] -> [K, d]."""
        shrunk = 1.0 - (ratio / (self.values + ratio)).sqrt()  # [m]
        return normals - (normals @ self.vectors.T * shrunk) @ self.vectors


def normals(dimension: int, count: int, seed: int) -> Tensor:
    """Draw standard normal vectors number 0, 1, ..., [K, d] float64."""
    generators = [seeded_generator("conditioned", seed, number) for number in range(count)]
    return estimators.normals((dimension,), generators, torch.float64)
