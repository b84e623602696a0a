"""Defaults that several places have in common."""

import os
from pathlib import Path

SAMPLES = 16  # posterior samples, wherever a number of them can be given


def cache_folder() -> Path:
    """Return the folder of cached downloads: $BLIPS_CACHE, else ~/.cache/blips."""
    chosen = os.environ.get("BLIPS_CACHE") or Path.home() / ".cache" / "blips"
    return Path(chosen).expanduser()
