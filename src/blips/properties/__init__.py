"""Properties of materials with error bars, by the members of the posterior or to first order.

    found = properties.elastic(potential, atoms)
    print(found["bulk_modulus"])                  # bulk_modulus = 98.3 ± 4.1 GPa

Every function returns `Properties`: by quantity the value of the plain model, its std, the members'
values and the units, with what failed by the member's number. `Calculation` has the options that
all of them take: method, members, seed, fmax and steps.
"""

from blips.properties.barrier import barrier
from blips.properties.calculation import Calculation
from blips.properties.dynamics import averages, dynamics
from blips.properties.elastic import elastic
from blips.properties.energies import formation_energy, relax
from blips.properties.eos import equation_of_state
from blips.properties.phonons import phonons
from blips.properties.pool import run_pool
from blips.properties.result import Properties, Property, PropertyError

__all__ = [
    "Calculation",
    "Properties",
    "Property",
    "PropertyError",
    "averages",
    "barrier",
    "dynamics",
    "elastic",
    "equation_of_state",
    "formation_energy",
    "phonons",
    "relax",
    "run_pool",
]
