"""Charged particles: the five-body data set of the EGNN paper, made on the spot and cached.

Five particles of charge ±1 start from normal positions with speed 0.5 and attract or repel each
other. From positions and velocities at frame 30, a model predicts the positions at frame 40.

One legacy Mersenne Twister stream (seed 43) yields 10000 training, 2000 validation and 2000 test
simulations. Integration (`studies.nbody.dynamics`) uses no random numbers, so all initial states
are drawn first and the simulations are integrated together. Reference: Satorras, Hoogeboom and
Welling, "E(n) Equivariant Graph Neural Networks" (ICML 2021), data set `nbody_small`.

Reproducibility: on one machine the frames equal those of the original generator bit for bit.
Between machines NumPy's `power` may differ in the last bit (its AVX-512 version does). That moves
most frames by 1e-14, but about 4 % of the simulations have close encounters that amplify it beyond
1e-3: compare models on one copy of the data.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal, get_args
from zipfile import BadZipFile

import numpy as np

from blips.defaults import cache_folder
from blips.errors import InputError
from studies.nbody.dynamics import PARTICLES, integrate

Split = Literal["train", "valid", "test"]

STREAM_SIZES = {"train": 10_000, "valid": 2_000, "test": 2_000}
TRAIN_SIZE = 3_000
SEED = 43

SPEED = 0.5
HALF_BOX = 5.0
INPUT_FRAME, TARGET_FRAME = 30, 40

_UNUSED_NORMALS = 2 * 49 * 3 * PARTICLES  # observation noise of the original, multiplied by zero
_CACHE_FILE = "nbody_small_seed43_v1.npz"


@dataclass(frozen=True)
class Simulations:
    """States of S simulations at the input and the target frame (axis 1), float64."""

    positions: np.ndarray  # [S, 2, 5, 3]
    velocities: np.ndarray  # [S, 2, 5, 3]
    charges: np.ndarray  # [S, 5]

    def __len__(self) -> int:
        return len(self.charges)


@dataclass(frozen=True)
class NBodySplit:
    """Inputs (frame 30) and targets (frame 40) of M simulations, float64."""

    positions: np.ndarray  # [M, 5, 3]
    velocities: np.ndarray  # [M, 5, 3]
    charges: np.ndarray  # [M, 5]
    target_positions: np.ndarray  # [M, 5, 3]

    def __len__(self) -> int:
        return len(self.charges)


def load_nbody(
    split: Split,
    cache: str | os.PathLike[str] | None = None,
    *,
    size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> NBodySplit:
    """Load input and target frames of one split, generated at the first call and cached.

    Args:
        split: "train", "valid" or "test".
        cache: folder of the cached file. Default: $BLIPS_CACHE, else ~/.cache/blips.
        size: number of simulations from the start of the split. Default: 3000 for training, all
            2000 for validation and test.
        progress: called as progress(done, total) while the data set is generated.
    """
    if split not in get_args(Split):
        raise InputError(f"unknown n-body split {split!r}; use one of {', '.join(get_args(Split))}")
    if size is None:
        size = TRAIN_SIZE if split == "train" else STREAM_SIZES[split]
    if not 0 < size <= STREAM_SIZES[split]:
        raise InputError(f"size must be within 1..{STREAM_SIZES[split]} for {split}, got {size}")
    path = Path(cache or cache_folder()) / _CACHE_FILE
    if not path.exists():
        _write(path, generate(progress=progress))
    simulations = _read(path, split)
    return NBodySplit(
        positions=simulations.positions[:size, 0],
        velocities=simulations.velocities[:size, 0],
        charges=simulations.charges[:size],
        target_positions=simulations.positions[:size, 1],
    )


def generate(
    num_train: int = STREAM_SIZES["train"],
    num_valid: int = STREAM_SIZES["valid"],
    num_test: int = STREAM_SIZES["test"],
    seed: int = SEED,
    progress: Callable[[int, int], None] | None = None,
    *,
    first: int | None = None,
    threads: int = 2,
) -> dict[str, Simulations]:
    """Draw and integrate all splits of one random stream.

    Args:
        num_train: simulations drawn for training.
        num_valid: simulations drawn for validation, after those for training.
        num_test: simulations drawn for testing, after those for validation.
        seed: seed of the stream.
        progress: called as progress(done, total) after each block of simulations.
        first: integrate and return only the first so many of each split. The others are drawn and
            dropped, so the values are those of the full data set, at a small part of its cost.
        threads: blocks integrated at the same time; results do not depend on it.
    """
    sizes = {"train": num_train, "valid": num_valid, "test": num_test}
    if min(sizes.values()) < 0 or (first is not None and first < 0) or threads < 1:
        raise InputError("num_train, num_valid, num_test, first must be >= 0 and threads >= 1")
    generator = np.random.RandomState(seed)
    counts = {name: size if first is None else min(first, size) for name, size in sizes.items()}
    drawn = [_draw(generator, sizes[name], counts[name]) for name in sizes]
    x, v, charges = (np.concatenate(arrays) for arrays in zip(*drawn, strict=True))
    frames = (INPUT_FRAME, TARGET_FRAME)
    positions, velocities = integrate(x, v, charges, frames, threads, progress)
    ends = np.cumsum(list(counts.values()))
    return {
        name: Simulations(
            positions[end - n : end], velocities[end - n : end], charges[end - n : end]
        )
        for (name, n), end in zip(counts.items(), ends, strict=True)
    }


def _draw(
    generator: np.random.RandomState, size: int, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw `size` initial states; positions [S, 3, 5], velocities, charges of the first `count`."""
    positions = np.empty((count, 3, PARTICLES))
    velocities = np.empty((count, 3, PARTICLES))
    charges = np.empty((count, PARTICLES))
    for index in range(size):
        charge = generator.choice([-1.0, 0.0, 1.0], size=PARTICLES, p=[0.5, 0.0, 0.5])
        normal = generator.standard_normal(2 * 3 * PARTICLES + _UNUSED_NORMALS)
        if index < count:
            charges[index] = charge
            positions[index] = normal[:15].reshape(3, PARTICLES)
            velocities[index] = normal[15:30].reshape(3, PARTICLES)
    norms = np.sqrt((velocities**2).sum(axis=1, keepdims=True))  # [S, 1, 5]
    velocities = velocities * SPEED / norms
    return *_reflect(positions, velocities), charges


def _reflect(positions: np.ndarray, velocities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mirror what starts outside the box at its wall, moving inwards."""
    outside = np.abs(positions) > HALF_BOX
    wall = np.copysign(2 * HALF_BOX, positions)
    inwards = np.copysign(velocities, -positions)
    return np.where(outside, wall - positions, positions), np.where(outside, inwards, velocities)


def _write(path: Path, splits: Mapping[str, Simulations]) -> None:
    """Write all splits to one npz file that appears complete or not at all."""
    arrays = {
        f"{name}_{field}": getattr(simulations, field)
        for name, simulations in splits.items()
        for field in ("positions", "velocities", "charges")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            np.savez(file, **arrays)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _read(path: Path, split: str) -> Simulations:
    try:
        with path.open("rb") as file, np.load(file) as stored:
            return Simulations(
                *(stored[f"{split}_{field}"] for field in Simulations.__annotations__)
            )
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise InputError(
            f"the cached n-body data {path} cannot be read ({error}); "
            "delete the file and load again to make it anew"
        ) from error
