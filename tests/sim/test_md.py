"""`blips md`: dynamics with a guard, as a command."""

import json
import os
import signal
import subprocess
import sys
import time

import ase.io
import numpy as np
import pytest
from ase.md.langevin import Langevin
from typer.testing import CliRunner

import blips
from blips.cli import app
from blips.data.ammonia import load_ammonia
from blips.errors import BlipsError, ConfigError, InputError
from blips.sim.dynamics import MDSettings
from blips.sim.reference import make_calculator

HEATING = [
    "--temperature", 300, "--to", 8000, "--friction", 50, "--steps", 500, "--every", 5, "--seed", 2,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(ammonia_potential, tmp_path_factory):
    """A model and a structure at its minimum."""
    folder = tmp_path_factory.mktemp("md")
    blips.save(ammonia_potential, folder / "model.safetensors")
    start = min(load_ammonia("train"), key=lambda atoms: atoms.get_potential_energy())
    ase.io.write(folder / "start.extxyz", start)
    return folder


@pytest.fixture(scope="module")
def limit(ammonia_potential):
    """Above every sigma of validation data."""
    prediction = ammonia_potential.predict(load_ammonia("valid"), samples=32)
    return 1.5 * np.linalg.norm(prediction.array("forces_std"), axis=1).max()


def md(folder, *arguments, code=0):
    start = [folder / "model.safetensors", folder / "start.extxyz"]
    command = ["md", *start, *arguments, "--json"]
    result = CliRunner().invoke(app, [str(a) for a in command], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def longest_bond(atoms):
    return atoms.get_distances(0, [1, 2, 3]).max()


def test_heated_ammonia_stops_before_it_breaks_and_the_means_alone_go_on(folder, limit, tmp_path):
    guarded = md(folder, *HEATING, "--high", limit, "--folder", tmp_path / "guarded")
    assert guarded["stopped"]
    assert 0 < guarded["steps"] < 500
    assert {event["limit"] for event in guarded["events"]} == {"force_std"}
    offending = ase.io.read(guarded["files"]["uncertain"])
    assert offending.info["step"] == guarded["steps"]
    saved = np.linalg.norm(offending.arrays["forces_uncertainty"], axis=1).max()
    assert saved == pytest.approx(guarded["events"][0]["value"], rel=1e-5)
    trajectory = ase.io.read(guarded["files"]["trajectory"], ":")
    assert [frame.info["step"] for frame in trajectory] == list(range(0, guarded["steps"] + 1, 5))
    assert max(longest_bond(frame) for frame in trajectory) < 1.6  # nothing is broken yet

    alone = md(folder, *HEATING, "--closest", 0.01, "--folder", tmp_path / "alone")
    assert not alone["stopped"]
    assert alone["steps"] == 500
    frames = ase.io.read(alone["files"]["trajectory"], ":")
    assert longest_bond(frames[-1]) > 2.0  # it has left what the potential was trained on
    same = frames[len(trajectory) - 1]
    np.testing.assert_allclose(same.positions, trajectory[-1].positions, atol=1e-5)


def test_a_run_goes_on_from_the_trajectory_of_another(folder, tmp_path):
    nve = ["--ensemble", "nve", "--every", 5]
    first = md(folder, *nve, "--steps", 10, "--folder", tmp_path / "first")
    whole = md(folder, *nve, "--steps", 20, "--folder", tmp_path / "whole")
    command = ["md", folder / "model.safetensors", first["files"]["trajectory"], *nve]
    command += ["--steps", 10, "--folder", tmp_path / "second"]
    CliRunner().invoke(app, [str(a) for a in command], catch_exceptions=False)
    second = ase.io.read(tmp_path / "second" / "trajectory.extxyz", -1)
    expected = ase.io.read(whole["files"]["trajectory"], -1)
    np.testing.assert_allclose(second.positions, expected.positions, atol=1e-4)


def test_saving_and_asking(folder, tmp_path):
    short = ["--steps", 4, "--every", 2, "--distinct", 0]
    saving = [*short, "--low", 1e-6, "--high", 1e6, "--folder", tmp_path / "saved"]
    often = md(folder, *saving, "--save-every", 2)
    assert (often["stopped"], often["steps"], len(often["events"])) == (False, 4, 3)
    assert not any(event["stops"] for event in often["events"])
    seldom = md(folder, *saving, "--save-every", 4, "--overwrite")
    frames = ase.io.read(seldom["files"]["uncertain"], ":")
    assert [frame.info["step"] for frame in frames] == [0, 4]
    asking = [*short, "--high", 1e-6, "--reference", "emt"]
    asked = md(folder, *asking, "--folder", tmp_path / "ask")
    assert asked["stopped"]
    assert asked["events"][0]["reference_error"] > 0.5


def test_ctrl_c_ends_with_everything_saved(folder, tmp_path):
    program = "import torch; torch.set_num_threads(1); from blips.cli import main; main()"
    output = tmp_path / "run"
    process = subprocess.Popen(
        [
            sys.executable, "-c", program, "md", folder / "model.safetensors",
            folder / "start.extxyz", "--steps", "1000000", "--every", "2",
            "--folder", output, "--json",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    wait_for(output / "trajectory.extxyz")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    outcome = json.loads(stdout)
    assert outcome["interrupted"]
    assert outcome == json.loads((output / "outcome.json").read_text())
    frames = ase.io.read(output / "trajectory.extxyz", ":")
    assert frames[-1].info["step"] == outcome["steps"]
    assert "Traceback" not in stderr


def wait_for(path, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", 500, "--ensemble", "nve"], "thermostat"),
        (["--ensemble", "nvt"], "'langevin', 'nve' or 'npt'"),
        (["--timestep", -1], "timestep: Input should be greater than 0"),
        (["--high", "5%", "--error", 0.5], "blips calibrate"),
        (["--high", 1, "--error", 0.5], "either both in eV/A"),
        (["--low", "1%", "--high", 1], "either both in eV/A"),
        (["--high", "5%"], "either both in eV/A"),
        (["--high", "much"], "expected a number"),
        (["--low", 2, "--high", 1], "low < high"),
        (["--save-every", 0], "every is 0; expected 1 or more"),
        (["--reference", "vasp"], "package.module:Name"),
        (["--method", "committee"], "frozen, onepass, map"),
        (["--frame", 3], "no frame 3"),
    ],
)
def test_mistakes_name_the_remedy_and_leave_nothing(folder, tmp_path, arguments, message):
    with pytest.raises(BlipsError, match=message):
        md(folder, *arguments, "--folder", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_earlier_run_is_kept_unless_told_otherwise(folder, tmp_path):
    arguments = ["--steps", 0, "--folder", tmp_path / "run"]
    md(folder, *arguments)
    with pytest.raises(InputError, match="--overwrite"):
        md(folder, *arguments)
    md(folder, *arguments, "--overwrite")
    assert len(ase.io.read(tmp_path / "run" / "trajectory.extxyz", ":")) == 1


def test_a_ramp_is_linear(folder, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(
        Langevin, "set_temperature", lambda self, *, temperature_K: told.append(temperature_K)
    )
    options = ["--temperature", 300, "--steps", 4]
    md(folder, *options, "--folder", tmp_path / "level")
    assert not told
    md(folder, *options, "--to", 500, "--folder", tmp_path / "ramp")
    assert list(dict.fromkeys(told)) == [300, 350, 400, 450, 500]


def test_references_by_name():
    assert type(make_calculator("emt")).__name__ == "EMT"
    for name in ("ase.calculators.lj:LennardJones", "ase.calculators.lj.LennardJones"):
        assert type(make_calculator(name, trust=True)).__name__ == "LennardJones"
    for name, message in (
        ("ase.calculators.lj:Absent", "cannot be imported"),
        ("no_such_module:Thing", "cannot be imported"),
        ("builtins:dict", "makes a dict"),
        ("math:pi", "do not fit math:pi .*not callable"),
        ("blips:Calculator", "options do not fit blips:Calculator"),
        ("vasp2000", "unknown calculator"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_calculator(name, trust=True)


def test_an_error_rate_becomes_a_limit_on_a_calibrated_sigma(folder, tmp_path, ammonia_potential):
    from blips.sim.guard import std_for
    from blips.uq.calibrate import ScaleCalibrator

    ammonia_potential.calibration = {"forces": ScaleCalibrator(2.0)}
    try:
        blips.save(ammonia_potential, tmp_path / "model.safetensors")
    finally:
        ammonia_potential.calibration = {}
    (tmp_path / "start.extxyz").write_bytes((folder / "start.extxyz").read_bytes())
    rates = ["--low", "1%", "--high", "10%", "--error", 0.4]
    found = md(tmp_path, *rates, "--steps", 0, "--folder", tmp_path / "run")
    assert found["guard"]["low"] == pytest.approx(std_for(0.4, 0.01))
    assert found["guard"]["high"] == pytest.approx(std_for(0.4, 0.1))


def test_the_volume_follows_the_pressure(folder, tmp_path):
    """A crystal of a pair potential is smaller under 20 GPa, and the same seed gives the same."""
    from ase.build import bulk
    from ase.calculators.emt import EMT
    from ase.units import GPa

    from blips.sim.dynamics import _dynamics

    volumes = {}
    for pressure in (0.0, 20.0, 20.0):
        atoms = bulk("Cu", cubic=True) * (2, 2, 2)
        atoms.calc = EMT()
        settings = MDSettings(ensemble="npt", pressure=pressure, friction=50.0, timestep=2.0)
        dynamics = _dynamics(atoms, settings, np.random.default_rng(0))
        dynamics.run(300)
        found = []
        for _ in range(80):
            dynamics.run(10)
            found.append((atoms.get_volume(), -atoms.get_stress(include_ideal_gas=True)[:3].mean()))
        volume, mean_pressure = np.mean(found, axis=0)
        assert volumes.setdefault(pressure, volume) == volume
        assert mean_pressure / GPa == pytest.approx(pressure, abs=1.5)
        np.testing.assert_allclose(atoms.cell.array, atoms.cell[0, 0] * np.eye(3), atol=1e-9)
    assert 0.85 < volumes[20.0] / volumes[0.0] < 0.93  # Cu: bulk modulus about 140 GPa


def test_the_command_runs_npt_and_refuses_what_it_cannot(folder, tmp_path):
    with pytest.raises(InputError, match="periodic along all three"):
        md(folder, "--ensemble", "npt", "--folder", tmp_path / "a")
    with pytest.raises(ConfigError, match="with npt alone"):
        md(folder, "--pressure", 1.0, "--folder", tmp_path / "a")
    atoms = ase.io.read(folder / "start.extxyz")
    atoms.set_cell([9.0, 9.0, 9.0])
    atoms.pbc = True
    ase.io.write(tmp_path / "start.extxyz", atoms)
    command = ["md", folder / "model.safetensors", tmp_path / "start.extxyz", "--ensemble", "npt"]
    command += ["--pressure", 5.0, "--steps", 5, "--every", 5, "--to", 400, "--folder", tmp_path]
    result = CliRunner().invoke(app, [str(a) for a in command], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    first, last = ase.io.read(tmp_path / "trajectory.extxyz", ":")
    assert last.get_volume() != first.get_volume()
