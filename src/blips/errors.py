"""Errors meant for users: each says what is wrong, what was expected and what to do."""

from collections.abc import Iterable


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


def refuse_unknown(what: str, value: object, valid: Iterable[str]) -> None:
    """Raise an error with all that is valid, unless `value` is one of it."""
    known = list(valid)
    if value not in known:
        raise InputError(f"unknown {what} {value!r}; use one of {', '.join(known)}")
