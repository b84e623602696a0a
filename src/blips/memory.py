"""How much memory there is, and what the C library does with freed memory."""

import ctypes
import os
from functools import cache
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LARGEST_MMAP_THRESHOLD = 2**25  # that glibc takes


@cache
def keep_freed_memory(most_bytes: int = 2**30) -> bool:
    """Ask glibc to keep freed memory for the next tensors, up to a bound; return whether it will.

    Every pass over a model allocates and frees the same tensors. By default much of their memory
    goes back to the kernel, which hands it out again page by page and zeroed: a plain training
    step of PaiNN on four cells of 36 atoms then takes 1.4 to 1.6 times as long
    (results/benchmarks/ablation.md). Other C libraries are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, most_bytes)
    )


def available_bytes() -> float:
    """Return the memory that is left for programs; infinite where it is unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return float("inf")
