"""Reference calculators by name, for guards and commands that ask one.

| name | calculator |
|---|---|
| `emt` | ASE's effective medium theory |
| `gfn2` | GFN2-xTB of the package tblite |
| `module:Class` | any ASE calculator that can be imported and made without arguments |
"""

from importlib import import_module
from typing import Any

from ase.calculators.calculator import BaseCalculator

from blips.errors import InputError

EXPECTED = "use emt, gfn2 or module:Class, such as ase.calculators.lj:LennardJones"


def reference_calculator(name: str) -> BaseCalculator:
    """The ASE calculator of that name."""
    if name == "emt":
        from ase.calculators.emt import EMT

        return EMT()
    if name == "gfn2":
        tblite = _module("tblite.ase", remedy="pip install tblite")
        return tblite.TBLite(method="GFN2-xTB", verbosity=0)
    module, separator, attribute = name.partition(":")
    if not (separator and module and attribute):
        raise InputError(f"unknown reference calculator {name!r}; {EXPECTED}")
    found = getattr(_module(module, remedy=EXPECTED), attribute, None)
    if not callable(found):
        raise InputError(f"{module} has no calculator {attribute!r}; {EXPECTED}")
    try:
        calculator = found()
    except Exception as error:
        raise InputError(
            f"{name} cannot be made without arguments ({type(error).__name__}: {error}); name a "
            "function of yours that makes it, my_module:make_calculator"
        ) from error
    if not isinstance(calculator, BaseCalculator):
        raise InputError(f"{name} makes a {type(calculator).__name__}, not an ASE calculator")
    return calculator


def _module(name: str, remedy: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(f"cannot import {name} ({error}); {remedy}") from error
