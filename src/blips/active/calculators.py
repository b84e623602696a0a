"""Reference calculators by name; the only place where a campaign meets foreign codes."""

import importlib
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blips.errors import ConfigError, MissingPackageError


def make_calculator(name: str, options: Mapping[str, Any], *, trust: bool = False) -> Any:
    """An ASE calculator.

    Args:
        name: one of `CALCULATORS`, or "package.module.Class" with `trust`.
        options: of its constructor.
        trust: allow a class from outside this list, whose code then runs.
    """
    if name in CALCULATORS:
        make: Callable[..., Any] = CALCULATORS[name]
    elif "." not in name:
        known = ", ".join(CALCULATORS)
        raise ConfigError(f"unknown calculator {name!r}; use {known}, or package.module.Class")
    elif not trust:
        raise ConfigError(f"{name} is a class from outside blips; set label.trust to use it")
    else:
        make = _imported(name)
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"label.options do not fit {name}: {error}") from error


def _imported(path: str) -> Callable[..., Any]:
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"label.calculator {path!r} cannot be imported: {error}") from error


def _tight_binding(method: str) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        try:
            from tblite.ase import TBLite
        except ImportError as error:
            raise _missing("tblite", "active") from error
        return TBLite(method=method, **{"verbosity": 0, **options})

    return make


def _pyscf(**options: Any) -> Any:
    from blips.active.pyscf import PySCF

    return PySCF(**options)


def _espresso(
    command: str = "pw.x",
    pseudo_dir: str = "/usr/share/espresso/pseudo",
    directory: str = "espresso",
    input_data: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Quantum ESPRESSO by ASE's profile: pseudopotentials, input_data, kpts as ASE takes them.

    Forces and stress come with the energy, in one run of pw.x, unless `input_data` says otherwise.
    """
    from ase.calculators.espresso import Espresso, EspressoProfile
    from ase.io.espresso_namelist.namelist import Namelist

    program = shlex.split(command)[:1]
    if not program or shutil.which(program[0]) is None:
        raise ConfigError(
            f"label.options.command: {command!r} is no program here; install Quantum ESPRESSO "
            "(Debian: quantum-espresso), or give the path of its pw.x"
        )
    if not Path(pseudo_dir).is_absolute() or not Path(pseudo_dir).is_dir():
        raise ConfigError(
            f"label.options.pseudo_dir: {pseudo_dir!r} is not the full path of a folder with "
            "pseudopotentials"
        )
    settings = Namelist(input_data)
    settings.to_nested("pw")
    for name in ("tprnfor", "tstress"):
        settings["control"].setdefault(name, True)
    profile = EspressoProfile(command=command, pseudo_dir=pseudo_dir)
    return Espresso(profile=profile, directory=directory, input_data=settings, **options)


def _emt(**options: Any) -> Any:
    from ase.calculators.emt import EMT

    return EMT(**options)


def _missing(package: str, extra: str) -> MissingPackageError:
    return MissingPackageError(
        f"this calculator needs the package {package!r}; install it with: "
        f"pip install 'blips[{extra}]'"
    )


CALCULATORS: dict[str, Callable[..., Any]] = {
    "gfn2-xtb": _tight_binding("GFN2-xTB"),
    "gfn1-xtb": _tight_binding("GFN1-xTB"),
    "pyscf": _pyscf,
    "espresso": _espresso,
    "emt": _emt,
}
