import pytest
from ase import Atoms

from helpers import morse_ammonia


@pytest.fixture(scope="session")
def structures() -> tuple[list[Atoms], list[Atoms]]:
    """Training and validation structures."""
    return morse_ammonia(12, seed=0), morse_ammonia(6, seed=1)
