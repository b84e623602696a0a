"""The backbone contract as importable checks: run them on your own model.

    from blips import testing
    testing.check_contract(my_backbone)

An `AtomisticBackbone` is checked as a copy in double precision. A check that fails raises
AssertionError and says by how much. Lengths in A, energies in eV.
"""

from blips.testing.atoms import (
    check_batching,
    check_contract,
    check_forces,
    check_permutation,
    check_precision,
    check_reflection,
    check_rotation,
    check_second_derivatives,
    check_smoothness,
    check_stress,
    check_translation,
    random_structure,
)
from blips.testing.compare import assert_close
from blips.testing.declarations import check_declarations

__all__ = [
    "assert_close",
    "check_batching",
    "check_contract",
    "check_declarations",
    "check_forces",
    "check_permutation",
    "check_precision",
    "check_reflection",
    "check_rotation",
    "check_second_derivatives",
    "check_smoothness",
    "check_stress",
    "check_translation",
    "random_structure",
]
