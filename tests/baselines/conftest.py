import pytest
import torch
from ase import Atoms

from blips.backbones import PaiNN
from blips.data.graph import AtomGraph
from helpers import TINY, morse_ammonia


@pytest.fixture(scope="session")
def structures() -> tuple[list[Atoms], list[Atoms]]:
    """Training and validation structures."""
    return morse_ammonia(12, seed=0), morse_ammonia(6, seed=1)


@pytest.fixture
def painn() -> PaiNN:
    """An untrained potential in double precision, with an energy scale."""
    torch.manual_seed(0)
    backbone = PaiNN(**TINY).double()
    backbone.reference.set({1: -1.0, 7: -3.0}, scale=2.0)
    return backbone


@pytest.fixture
def graph(painn: PaiNN, structures) -> AtomGraph:
    """Four structures."""
    return painn.graph(structures[0][:4])
