"""Rows that a Bayesian map can take apart before they are a tensor."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class LazyRows:
    """To torch it is the tensor of its rows; a Bayesian map takes it as it is."""

    @property
    def shape(self) -> torch.Size:
        """[rows, channels]."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Rows and channels."""
        return 2

    def rows(self) -> Tensor:
        """The tensor, [rows, channels]."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Any operation of torch on the tensor of the rows."""
        plain = [x.rows() if isinstance(x, LazyRows) else x for x in args]
        return function(*plain, **(kwargs or {}))
