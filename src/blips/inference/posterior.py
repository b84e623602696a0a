r"""The posterior that has seen the data: what it is made of, and how it is kept.

    Var[y*] = tau^2 b*^T (I + G / r)^-1 b*  +  floor^2  (+ relative^2 F*^2 for forces)

The first term is epistemic: what the data leave open. The others are the misfit that remains where
the data leave nothing open (labels that no weights of this model would fit; forces that are too
soft everywhere), and are reported as the aleatoric part. The relative part has the covariance
relative^2 F F^T of an atom's force F, so that it turns with the structure. Outside of the domain
(atoms torn apart, say) a small predicted force is no reason for a small error: atoms there have
typical^2 on top, the mean square of a force component near the data.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from blips import keys
from blips.bayes.condition import Evidence, Spectrum, normals
from blips.bayes.sketch import Sketch
from blips.errors import CheckpointError, InputError
from blips.inference.domain import Domain
from blips.inference.maps import ChosenMaps

Coefficients = Literal["constant", "network"]


@dataclass(frozen=True)
class Scale:
    """The few numbers that labels decide."""

    ratio: float  # r = s^2 / tau^2, in units of the square of the rows (eV, eV/A)
    scale: float  # tau, std of the relative noise of a weight before data
    floor: Mapping[str, float]  # std of the misfit, by quantity (eV/atom, eV/A)
    energy_factor: float = 1.0  # what deviations of energies are multiplied with
    relative: float = 0.0  # std of the misfit of forces over the force itself
    # root mean square of predicted force components near the data where there is a relative misfit:
    # the least misfit of forces outside of the domain (eV/A)
    typical: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what makes no error bar."""
        positive = [self.ratio, self.scale, self.energy_factor, *self.floor.values()]
        finite = all(0 <= value < math.inf for value in (*positive, self.relative, self.typical))
        if not (finite and all(positive) and self.floor.keys() <= {keys.ENERGY, keys.FORCES}):
            raise InputError(f"no scale of a posterior: {self}")


@dataclass(frozen=True)
class ConditionedPosterior:
    """A Gaussian posterior of the weights of some maps, conditioned on structures."""

    maps: ChosenMaps  # with the coordinates v of their weights
    scale: Scale
    coefficients: Coefficients  # "network": rows have the inference network's
    structures: int  # how many it has seen
    domain: Domain  # elements and distances in them
    evidence: Evidence | None  # what they say about the weights; None where only draws were kept
    kept_draws: Tensor | None = None  # of v, [K, d], where there is no evidence
    _noise: dict[tuple[int, torch.dtype], dict[str, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def spectrum(self) -> Spectrum | None:
        """That of G; None where only draws were kept."""
        return None if self.evidence is None else self.evidence.spectrum()

    def draws(self, count: int, seed: int = 0) -> Tensor:
        """Draw v number 0, 1, ..., functions of (seed, number), [K, d].

        Where only draws were kept, seeds other than 0 give orthonormal mixtures of them.
        """
        if self.spectrum is not None:
            standard = normals(self.maps.sketch.size, count, seed)
            return self.scale.scale * self.spectrum.draws(standard, self.scale.ratio)
        kept = torch.empty(0, 0) if self.kept_draws is None else self.kept_draws
        if count > len(kept):
            raise InputError(
                f"{count} draws were asked for, but this posterior was kept as {len(kept)}; ask "
                f"for at most {len(kept)} samples, or condition the model on structures"
            )
        if seed == 0:
            return kept[:count].double()
        mixture, _ = torch.linalg.qr(normals(len(kept), len(kept), seed))
        return mixture[:count] @ kept.double()

    def weight_noise(self, count: int, seed: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Compute P v of draws 0, 1, ..., [K, out, in] by matrix; those of one seed are cached."""
        kept = self._noise.get((seed, dtype))
        if kept is None or len(next(iter(kept.values()))) < count:
            kept = self.maps.sketch.gather(self.draws(count, seed).to(dtype))
            self._noise.clear()
            self._noise[seed, dtype] = kept
        return {name: noise[:count] for name, noise in kept.items()}

    def prior_draws(self, count: int, seed: int = 0) -> Tensor:
        """Draw v from the prior, [K, d]."""
        return self.scale.scale * normals(self.maps.sketch.size, count, seed)

    def only_draws(self, count: int, seed: int = 0) -> "ConditionedPosterior":
        """Make a small copy that keeps `count` draws in place of the evidence."""
        return replace(self, evidence=None, kept_draws=self.draws(count, seed).float())

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tensors, JSON-able."""
        return {
            "roles": dict(self.maps.roles),
            "shapes": {name: list(shape) for name, shape in self.maps.sketch.shapes.items()},
            "dimension": self.maps.sketch.dimension,
            "seed": self.maps.sketch.seed,
            "last": self.maps.last,
            **asdict(self.scale),
            "coefficients": self.coefficients,
            "structures": self.structures,
            "numbers": sorted(self.domain.numbers),
            "distances": self.domain.to_dict(),
            "rows": None if self.evidence is None else self.evidence.count,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the posterior, by name."""
        if self.evidence is not None:
            return self.evidence.state()
        return {} if self.kept_draws is None else {"draws": self.kept_draws}

    @classmethod
    def from_dict(
        cls, content: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> "ConditionedPosterior":
        """Restore what `to_dict` and `tensors` returned."""
        shapes = {name: tuple(shape) for name, shape in content["shapes"].items()}
        sketch = Sketch(shapes, _count(content, "dimension"), int(content["seed"]))
        structures, evidence = _count(content, "structures"), None
        if content["rows"] is not None:
            rows = _count(content, "rows")
            evidence = Evidence.from_state(sketch.size, rows, dict(tensors))
            if not structures <= rows == evidence.count:
                raise CheckpointError(
                    f"{rows} rows of {structures} structures do not fit its tensors"
                )
        elif tensors["draws"].ndim != 2 or tensors["draws"].shape[1] != sketch.size:
            raise CheckpointError(f"the draws do not fit a posterior of {sketch.size} coordinates")
        return cls(
            maps=ChosenMaps(dict(content["roles"]), sketch, bool(content["last"])),
            scale=Scale(**{k: v for k, v in content.items() if k in Scale.__dataclass_fields__}),
            coefficients=content["coefficients"],
            structures=structures,
            domain=Domain.from_dict(content["numbers"], content.get("distances", {})),
            evidence=evidence,
            kept_draws=None if evidence is not None else tensors["draws"],
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ConditionedPosterior":
        """Return itself: it is immutable."""
        return self

    def __str__(self) -> str:
        """Summarise in one line."""
        sketch, floor = self.maps.sketch, self.scale.floor
        misfit = ", ".join(f"{name} {value:.2g}" for name, value in floor.items())
        misfit += f" and {100 * self.scale.relative:.0f} % of the force" * bool(self.scale.relative)
        return (
            f"conditioned on {self.structures} structures: {sketch.num_weights} weights of "
            f"{len(self.maps.roles)} maps in {sketch.size} dimensions, scale "
            f"{self.scale.scale:.3g}, ratio {self.scale.ratio:.2g}, misfit {misfit}"
        )


def _count(content: Mapping[str, Any], name: str) -> int:
    """Return a number of rows, structures or coordinates; an error where none has it."""
    value = content[name]
    if type(value) is not int or not 1 <= value <= 10**12:
        raise CheckpointError(f"{name}={value!r:.40} is no whole number from 1 to {10**12}")
    return value


class SeenWeights:
    """The weights of a model at the time when it was conditioned, to notice that they changed.

    Every prediction compares counters that torch keeps anyway: a tensor's place in memory and how
    often it was written to (but not through `.data`). Only where they differ are checksums
    compared, at single precision, so that copies, devices and precisions of the same weights pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counters, self._checksums = _counters(model), _checksums(model)

    def check(self, model: nn.Module) -> None:
        """Raise an error that names the weights which are no longer those that were seen."""
        counters = _counters(model)
        if counters == self._counters:
            return
        before, now = self._checksums, _checksums(model)
        changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
        if changed:
            some = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
            raise InputError(
                f"weights changed since the potential was conditioned ({len(changed)} of "
                f"{len(now)}: {some}), so its error bars are of another model; condition it "
                "again, after potential.posterior = None"
            )
        self._counters = counters


def _counters(model: nn.Module) -> list[tuple[int, int]]:
    """Return address and version counter of all parameters."""
    return [(own.data_ptr(), own._version) for own in model.parameters()]


def _checksums(model: nn.Module) -> dict[str, int]:
    """Compute a checksum of every parameter, by name."""
    return {
        name: zlib.crc32(value.detach().to("cpu", torch.float32).contiguous().numpy().data)
        for name, value in model.named_parameters()
    }
