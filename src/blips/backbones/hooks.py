"""What modules inside a model are given, without a change to the model."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def inputs_of(module: nn.Module | None) -> Iterator[list[Tensor]]:
    """The inputs of `module` in the block, one for each call; none where there is no module."""
    seen: list[Tensor] = []
    if module is None:
        yield seen
        return
    handle = module.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    try:
        yield seen
    finally:
        handle.remove()
