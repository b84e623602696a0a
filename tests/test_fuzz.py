"""A few hundred of the inputs that `make fuzz` has ten thousand of, for every reader."""

import pytest

from fuzzing import TARGETS, outcome, run, seeds


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_files_are_refused_with_our_errors(target):
    assert all(outcome(target, seed) == "accepted" for seed in seeds()[target])
    found = run(target, 150)
    assert found["inputs"] >= 100
    assert found.get("refused", 0) > 0
