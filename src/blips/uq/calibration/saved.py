"""What saved calibrators have in common: a kind, and the keys of that kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blips.errors import InputError


def saved_entry(kind: str, saved: Mapping[str, Any], key: str) -> Any:
    """Read a key of a saved calibrator after checking its kind."""
    if saved.get("kind") != kind:
        raise InputError(
            f"the saved calibrator is of kind {saved.get('kind')!r}; expected {kind!r}. "
            "Load it with calibrator_from_dict, which chooses the class."
        )
    if key not in saved:
        raise InputError(f"the saved {kind} calibrator lacks {key!r}; it is damaged: fit it again.")
    return saved[key]
