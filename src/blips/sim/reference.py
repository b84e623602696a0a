"""Make reference calculators by name, for `blips md --reference` and the labels of campaigns.

| name | calculator |
|---|---|
| `gfn2-xtb`, `gfn1-xtb` | tight binding, of the package tblite |
| `pyscf` | Kohn-Sham density functional theory of molecules (`blips.sim.pyscf`) |
| `espresso` | Quantum ESPRESSO |
| `emt` | ASE's effective medium theory |
| `package.module:Name` | any class or function that gives an ASE calculator |

Trust: a class to import, a command to run and a path to read or write are code in disguise. Where a
file chooses them, whoever runs it has to say that the file is trusted; what a person types is
trusted as it is. `check_trust` decides, for every calculator and every caller.
"""

import importlib
import shlex
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ase.calculators.calculator import BaseCalculator

from blips.errors import BlipsError, ConfigError, require

ESPRESSO_SAFE = ("input_data", "kpts", "koffset", "kspacing", "pseudopotentials")
ESPRESSO_PATHS = ("pseudo_dir", "outdir", "wfcdir", "prefix")  # in input_data


def make_calculator(
    name: str, options: Mapping[str, Any] | None = None, *, trust: bool = False
) -> BaseCalculator:
    """Make one of `CALCULATORS`, or "package.module:Name" (a dot will do in place of the colon).

    `trust` is whether name and options may choose what runs: True for what a person typed.
    """
    options = options or {}
    check_trust(name, options, trust)
    chosen = CALCULATORS.get(name, name)
    make = _imported(chosen) if isinstance(chosen, str) else chosen
    try:
        calculator = make(**options)
    except BlipsError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the options do not fit {name} ({type(error).__name__}: {error}); for a calculator "
            "that needs more than options, name a function of yours that makes it, module:function"
        ) from error
    if not isinstance(calculator, BaseCalculator):
        raise ConfigError(f"{name} makes a {type(calculator).__name__}, not an ASE calculator")
    return calculator


def check_trust(name: str, options: Mapping[str, Any], trust: bool) -> None:
    """Raise unless a calculator is trusted or cannot do harm."""
    if name not in CALCULATORS and "." not in name and ":" not in name:
        known = ", ".join(CALCULATORS)
        raise ConfigError(f"unknown calculator {name!r}; use {known}, or package.module:Name")
    chosen = needs_trust(name, options)
    if chosen and not trust:
        raise ConfigError(
            f"{', '.join(chosen)} of a file choose what runs on this machine, or which paths it "
            "reads and writes; set label.trust to true if you trust the file, or type them on the "
            "command line"
        )


def needs_trust(name: str, options: Mapping[str, Any]) -> list[str]:
    """List the settings that choose code, commands or paths, such as "options.command"."""
    if name not in CALCULATORS:
        return ["calculator", *(f"options.{key}" for key in options)]
    if name != "espresso":
        return []  # their constructors take numbers and names of methods alone
    found = [f"options.{key}" for key in options if key not in ESPRESSO_SAFE]
    pseudopotentials = options.get("pseudopotentials") or {}
    if any(Path(str(file)).name != str(file) for file in dict(pseudopotentials).values()):
        found.append("options.pseudopotentials")
    if any(key in ESPRESSO_PATHS for key in _keys_within(options.get("input_data"))):
        found.append("options.input_data")
    return found


def _keys_within(settings: Any) -> list[str]:
    """List the keys of nested mappings, in lower case as Fortran reads them."""
    if not isinstance(settings, Mapping):
        return []
    inner = [key for value in settings.values() for key in _keys_within(value)]
    return [*(str(key).strip().lower() for key in settings), *inner]


def _imported(path: str) -> Callable[..., Any]:
    module, _, attribute = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the calculator {path!r} cannot be imported ({error}); expected package.module:Name, "
            "such as ase.calculators.lj:LennardJones"
        ) from error


def _tight_binding(method: str, verbosity: int = 0, **options: Any) -> Any:
    TBLite = require("tblite.ase", "pip install 'blips-mlip[active]'").TBLite

    class FromGuess(TBLite):
        """TBLite whose results depend on the structure alone, not on the one before."""

        def calculate(self, *arguments: Any, **options: Any) -> None:
            self._res = None  # the wave function that the last calculation ended with
            super().calculate(*arguments, **options)

    return FromGuess(method=method, verbosity=verbosity, **options)


def _espresso(
    command: str = "pw.x",
    pseudo_dir: str = "/usr/share/espresso/pseudo",
    directory: str = "espresso",
    input_data: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Make Quantum ESPRESSO by ASE's profile; pseudopotentials, input_data, kpts as ASE takes them.

    Forces and stress come with the energy, in one run of pw.x, unless `input_data` says otherwise.
    """
    from ase.calculators.espresso import Espresso, EspressoProfile
    from ase.io.espresso_namelist.namelist import Namelist

    program = shlex.split(command)[:1]
    if not program or shutil.which(program[0]) is None:
        raise ConfigError(
            f"options.command: {command!r} is no program here; install Quantum ESPRESSO "
            "(Debian: quantum-espresso), or give the path of its pw.x"
        )
    if not Path(pseudo_dir).is_absolute() or not Path(pseudo_dir).is_dir():
        raise ConfigError(
            f"options.pseudo_dir: {pseudo_dir!r} is not the full path of a folder with "
            "pseudopotentials"
        )
    settings = Namelist(input_data)
    settings.to_nested("pw")
    for name in ("tprnfor", "tstress"):
        settings["control"].setdefault(name, True)
    profile = EspressoProfile(command=command, pseudo_dir=pseudo_dir)
    return Espresso(profile=profile, directory=directory, input_data=settings, **options)


CALCULATORS: dict[str, str | Callable[..., Any]] = {
    "gfn2-xtb": partial(_tight_binding, "GFN2-xTB"),
    "gfn1-xtb": partial(_tight_binding, "GFN1-xTB"),
    "pyscf": "blips.sim.pyscf:PySCF",
    "espresso": _espresso,
    "emt": "ase.calculators.emt:EMT",
}
