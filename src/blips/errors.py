"""Errors meant for users: each says what is wrong, what was expected and what to do."""

import importlib
import sys
import warnings
from collections.abc import Iterable
from types import ModuleType


class BlipsError(ValueError):
    """Base class of every error that blips raises on purpose."""

    exit_code = 2  # of the command; 1 where a run failed that was well asked for


class InputError(BlipsError):
    """Structures, graphs, arrays or arguments that cannot be used as given."""


class TooLargeError(InputError):
    """Structures that need more memory than may be used."""


class ConfigError(BlipsError):
    """A configuration with unknown keys, wrong types or impossible values."""


class CheckpointError(BlipsError):
    """A checkpoint that is missing, damaged, foreign or of another version."""


class ConversionError(BlipsError):
    """A model whose maps could not be made Bayesian, or not as asked."""


class MissingPackageError(BlipsError, ImportError):
    """An optional package that is not installed."""


def require(module: str, pip_line: str) -> ModuleType:
    """Import a package that blips does not depend on, or say how to install it.

    What a package warns of while it is imported concerns its authors, and is not shown.
    """
    try:
        if module in sys.modules:  # often, and from many threads
            return importlib.import_module(module)
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"this needs the package {module.split('.')[0]!r}, which cannot be imported "
            f"({error}); install it with: {pip_line}"
        ) from error


def refuse_below(least: float, **given: float) -> None:
    """Raise an error that names the first number which is not `least` or more."""
    for name, value in given.items():
        if not value >= least:  # NaN is not
            raise InputError(f"{name} is {value}; expected {least} or more")


def refuse_unknown(what: str, value: object, valid: Iterable[str]) -> None:
    """Raise an error with all that is valid, unless `value` is one of it."""
    known = list(valid)
    if value not in known:
        raise InputError(f"unknown {what} {value!r}; use one of {', '.join(known)}")
