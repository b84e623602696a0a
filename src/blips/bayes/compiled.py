"""Compiled code: where it is, and when it is the best way.

C files are compiled when the package is installed on a machine with a C compiler, and called by
ctypes. Everything that they do is also written with torch.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

MANY_THREADS = 4
"""With more, torch's passes over a large tensor beat one pass on one thread."""

LARGE = 2**17
"""Elements of a tensor that torch spreads over threads with profit."""


def is_for_compiled(x: Tensor) -> bool:
    """Whether compiled code, on one thread, is the best way to handle x, where there is any."""
    if x.dtype is not torch.float32 or not x.is_cpu:
        return False
    return x.numel() <= LARGE or torch.get_num_threads() <= MANY_THREADS


def load_library(
    folder: Path, name: str, declare: Callable[[ctypes.CDLL], None]
) -> ctypes.CDLL | None:
    """A compiled library of this package; None where it was not built.

    Args:
        folder: where it is.
        name: that its file begins with.
        declare: gives its functions the types of their arguments.
    """
    for path in folder.glob(f"{name}*.so"):
        try:
            found = ctypes.CDLL(str(path))
            declare(found)
        except (OSError, AttributeError):  # of another machine, of another version
            continue
        return found
    return None


def address(x: Tensor | None) -> int | None:
    """Where the elements of x are; x has to live as long as that is used."""
    return None if x is None else x.data_ptr()
