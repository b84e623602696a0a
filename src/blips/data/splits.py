"""Splits of a data set into training and validation parts, and their files."""

import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from blips.errors import InputError
from blips.files import write_atomically


@dataclass(frozen=True)
class Split:
    """Indices of the parts of a data set; each of 0 to count - 1 is in one of them."""

    count: int  # size of the data set
    train: tuple[int, ...]
    valid: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.train + self.valid) != list(range(self.count)):
            raise InputError(f"the parts are not the numbers 0 to {self.count - 1}, each once")

    def save(self, path: str | Path) -> None:
        """Write as JSON, whole or not at all."""
        write_atomically(Path(path), (json.dumps(asdict(self)) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        try:
            content = json.loads(Path(path).read_text())
            return cls(content["count"], tuple(content["train"]), tuple(content["valid"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path}: cannot be read as a split ({error!r}); expected what Split.save writes"
            ) from error


def random_split(count: int, fraction: float, seed: int) -> Split:
    """Set a fraction of 0 to count - 1 aside at random; the same seed gives the same parts."""
    size = _training_size(count, fraction)
    order = np.random.default_rng(seed).permutation(count).tolist()
    return Split(count, tuple(sorted(order[:size])), tuple(sorted(order[size:])))


def group_split(groups: Sequence[Hashable], fraction: float, seed: int) -> Split:
    """Set whole groups (topologies, trajectories, compositions) aside; none is ever divided.

    Groups come in random order. Each part gets one first (the smaller of them goes to the smaller
    part), then every group goes to the part that lacks the most of its share.
    """
    size = _training_size(len(groups), fraction)
    wanted = [size, len(groups) - size]
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    used = sorted((part for part in (0, 1) if wanted[part]), key=lambda part: wanted[part])
    if len(members) < len(used):
        raise InputError(f"{len(members)} groups cannot fill {len(used)} parts; split at random")
    names = list(members)
    order = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    first = sorted(order[: len(used)], key=lambda name: len(members[name]))
    chosen: list[list[int]] = [[], []]
    for part, name in zip(used, first, strict=True):
        chosen[part] += members[name]
    for name in order[len(used) :]:
        train, valid = (share - len(part) for share, part in zip(wanted, chosen, strict=True))
        chosen[0 if train >= valid else 1] += members[name]
    return Split(len(groups), tuple(sorted(chosen[0])), tuple(sorted(chosen[1])))


def _training_size(count: int, fraction: float) -> int:
    """Return how many of `count` structures are left to train on."""
    if not 0 <= fraction <= 1:
        raise InputError(f"a fraction of {fraction} cannot be set aside; expected 0 to 1")
    size = round((1.0 - fraction) * count)
    if size == 0:
        raise InputError(
            f"a fraction of {fraction} of {count} structures leaves nothing to train on"
        )
    return size
