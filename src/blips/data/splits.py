"""Splits of a data set into training, validation and test parts, and their files."""

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from blips.errors import InputError
from blips.files import write_atomically

PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Split:
    """Indices of the parts of a data set, disjoint and within 0 to count - 1."""

    count: int  # size of the data set
    train: tuple[int, ...]
    valid: tuple[int, ...] = ()
    test: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        owner: dict[int, str] = {}
        for part in PARTS:
            for index in getattr(self, part):
                if not isinstance(index, int):
                    raise InputError(f"{part} has index {index!r}; expected a whole number")
                if not 0 <= index < self.count:
                    raise InputError(f"{part} has index {index}, outside 0 to {self.count - 1}")
                if index in owner:
                    raise InputError(f"index {index} is in {owner[index]} and again in {part}")
                owner[index] = part

    def save(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all."""
        write_atomically(Path(path), (json.dumps(asdict(self)) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        try:
            content = json.loads(Path(path).read_text())
            return cls(content["count"], *(tuple(content[part]) for part in PARTS))
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path}: cannot be read as a split ({error!r}); expected what Split.save writes"
            ) from error


def random_split(count: int, fractions: Sequence[float], seed: int) -> Split:
    """Split 0 to count - 1 at random; the same seed gives the same parts.

    Fractions are those of train, valid and test. Missing ones are empty; what is left over is in
    no part.
    """
    parts = _part_sizes(count, fractions)
    order = np.random.default_rng(seed).permutation(count)
    ends = np.cumsum([0, *parts])
    indices = [sorted(order[a:b].tolist()) for a, b in pairwise(ends)]
    return Split(count, *map(tuple, indices))


def group_split(groups: Sequence[Hashable], fractions: Sequence[float], seed: int) -> Split:
    """Split whole groups (topologies, trajectories, compositions); none is ever divided.

    Groups come in random order. Each part gets one first (the smaller of them go to the smaller
    parts), then every group goes to the part that lacks the most of its share. Fractions are those
    of train, valid and test; their sum is 1.
    """
    count = len(groups)
    wanted = np.array(_part_sizes(count, fractions), dtype=float)
    used = np.flatnonzero(wanted)
    if abs(sum(fractions) - 1) > 1e-9:
        raise InputError(f"fractions {tuple(fractions)} of a split by groups must add up to 1")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    if len(members) < len(used):
        raise InputError(
            f"{len(members)} groups cannot fill {len(used)} parts; use fewer parts or split at "
            "random"
        )
    names = list(members)
    order = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    first = sorted(order[: len(used)], key=lambda name: len(members[name]))
    chosen: list[list[int]] = [[] for _ in wanted]
    for part, name in zip(used[np.argsort(wanted[used], kind="stable")], first, strict=True):
        chosen[part] += members[name]
    for name in order[len(used) :]:
        lacking = [share - len(part) for share, part in zip(wanted, chosen, strict=True)]
        chosen[int(np.argmax(lacking))] += members[name]
    return Split(count, *(tuple(sorted(part)) for part in chosen))


def _part_sizes(count: int, fractions: Sequence[float]) -> list[int]:
    """Return numbers of structures; fractions that sum to 1 use every structure."""
    given = tuple(fractions)
    if not 1 <= len(given) <= len(PARTS) or min(given) < 0 or sum(given) > 1 + 1e-9:
        raise InputError(f"fractions {given} must be one to three that are >= 0, at most 1 in all")
    ends = np.rint(np.cumsum([0, *given]) * count).astype(int)
    parts = np.diff(ends).tolist()
    if parts[0] == 0:
        raise InputError(f"fractions {given} of {count} structures leave nothing to train on")
    return parts
