"""Rows that a model gathered from its nodes: multiplied on the nodes, in one pass.

The first map of a message network acts on rows h = [c_ij, a_i, a_j], gathered and concatenated.
With the columns of the weight split in the same way, W = [W_1 W_2 W_3],

    h W^T        = c W_1^T       + (a W_2^T)_i       + (a W_3^T)_j
    h^2 (W^2)^T  = c^2 (W_1^2)^T + (a^2 (W_2^2)^T)_i + (a^2 (W_3^2)^T)_j

are products with N rows in place of E, forward and backward. `WatchedGathers` sees what a model
gathers and concatenates, with no word about the model; all else is multiplied as it is.
(`blips.bayes.pairs` is for sampled passes of models that say what their rows are made of.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LEAST_CHANNELS = 128
"""Of a node: with fewer, gathering what was multiplied may cost more than the products spared."""

LEAST_ROWS_PER_NODE = 2

LEAST_ROWS = 256
"""Of all edges: to watch takes microseconds for each operation of a model."""

_GATHER = (torch.index_select, Tensor.index_select)
_CONCATENATE = (torch.cat, torch.concat, torch.concatenate)
_PARTS = "_blips_parts"


@dataclass(frozen=True)
class Part:
    """Columns of a matrix: rows [N, channels] gathered by an index [E], or the rows themselves.

    The version counts changes in place: rows that were changed are not those that were gathered.
    """

    rows: Tensor
    index: Tensor | None
    version: int

    @property
    def is_as_it_was(self) -> bool:
        """Whether nothing was written into the rows since."""
        return self.rows._version == self.version

    def squared(self) -> "Part":
        """The squares, without a gradient."""
        rows = self.rows.detach().square()
        return Part(rows, self.index, rows._version)


def watched_where_it_pays(
    layers: Iterable[nn.Module], rows: int
) -> "AbstractContextManager[WatchedGathers | None]":
    """`WatchedGathers`, or nothing where no map takes two wide nodes or rows are few.

    Args:
        layers: maps of edges.
        rows: number of edges.
    """
    matrices = (p for layer in layers for p in layer.parameters() if p.ndim == 2)
    pays = rows >= LEAST_ROWS and any(p.shape[1] > 2 * LEAST_CHANNELS for p in matrices)
    return WatchedGathers() if pays else nullcontext()


class WatchedGathers(TorchFunctionMode):
    """While active, matrices that are gathered or concatenated know what they were made of."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The operation itself, and a note on what it returns."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func is Tensor.__getitem__:
            _note_rows(found, *args)
        elif func in _GATHER:
            _note_selection(found, *args, **kwargs)
        elif func in _CONCATENATE:
            _note_columns(found, *args, **kwargs)
        return found


def _note_rows(found: Tensor, rows: Tensor, index: object) -> None:
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype != torch.int64:
        return
    if rows.ndim != 2 or rows.shape[1] < LEAST_CHANNELS:
        return
    if len(index) >= LEAST_ROWS_PER_NODE * len(rows):
        index = index.remainder(len(rows))  # brackets count from the end below zero
        _note(found, [Part(rows, index, rows._version)])


def _note_selection(found: Tensor, input: Tensor, dim: int, index: Tensor, **_: object) -> None:
    if dim == 0:
        _note_rows(found, input, index)


def _note_columns(found: Tensor, tensors: Sequence[Tensor], dim: int = 0, **_: object) -> None:
    is_of_columns = dim in (1, -1) and all(tensor.ndim == 2 for tensor in tensors)
    if is_of_columns and any(hasattr(tensor, _PARTS) for tensor in tensors):
        _note(found, [part for tensor in tensors for part in parts_of(tensor)])


def _note(found: Tensor, parts: list[Part]) -> None:
    setattr(found, _PARTS, (found._version, parts))


def parts_of(h: Tensor) -> list[Part]:
    """What the columns of h were made of, in their order; h itself where nothing is known."""
    noted: tuple[int, list[Part]] | None = getattr(h, _PARTS, None)
    if noted is not None:
        version, parts = noted
        if version == h._version and all(part.is_as_it_was for part in parts):
            return parts
    return [Part(h, None, h._version)]


def linear_of_parts(parts: Sequence[Part], weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Output of a linear map, h W^T + b, for the matrix h that the parts make up, [E, out]."""
    if len(parts) == 1 and parts[0].index is None:
        return F.linear(parts[0].rows, weight, bias)
    columns = weight.split_with_sizes([part.rows.shape[1] for part in parts], dim=1)
    terms = zip(parts, columns, strict=True)
    first, *others = (_gathered(F.linear(part.rows, block), part) for part, block in terms)
    for term in others:
        first += term
    return first if bias is None else first.add_(bias)


def _gathered(z: Tensor, part: Part) -> Tensor:
    return z if part.index is None else z.index_select(0, part.index)
