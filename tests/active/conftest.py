"""Labellers of these tests import calculators from this folder; each module shares one."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _labeller():
    from campaigns import importable

    from blips.active.labeller import close_labeller

    importable()
    yield
    close_labeller()
