"""Pools of structures and the command: real CHGNet, files, resuming, failures, kills."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from ase.build import bulk
from ase.constraints import FixAtoms
from ase.io import write
from typer.testing import CliRunner

import blips
from blips.active.executor import InlineExecutor, JobLost
from blips.backbones import PaiNN
from blips.cli import app
from blips.errors import BlipsError, InputError, TooLargeError
from blips.properties import Properties, PropertyError, barrier, formation_energy, run_pool
from blips.properties import pool as pools
from blips.train.released import load_once

pytest.importorskip("chgnet.model", reason="chgnet is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
SALT = bulk("NaCl", "rocksalt", a=5.64)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_finished_structures_are_not_computed_again(tmp_path, monkeypatch):
    oxide = bulk("MgO", "rocksalt", a=4.2)
    first = dict(run_pool("relax", "chgnet", [SALT, oxide], tmp_path, members=4))
    calls = []
    plain = pools.compute
    monkeypatch.setattr(pools, "compute", lambda job: calls.append(job.structure) or plain(job))
    moved = oxide.copy()
    moved.rattle(0.01)
    again = dict(run_pool("relax", "chgnet", [SALT, moved], tmp_path, members=4))
    assert calls == [moved]
    assert again[0]["energy"].value == first[0]["energy"].value
    assert again[0]["energy"].members == pytest.approx(first[0]["energy"].members)
    dict(run_pool("relax", "chgnet", [SALT], tmp_path, members=5))
    assert len(calls) == 2  # with other options it is another result


def test_one_that_fails_is_named_and_the_others_go_on(tmp_path):
    far = SALT.copy()
    far.set_cell(far.cell * 1.08, scale_atoms=True)
    options = {"members": 4, "steps": 1, "fmax": 0.2}
    found = dict(run_pool("relax", "chgnet", [far, SALT], tmp_path, InlineExecutor(), **options))
    assert isinstance(found[0], PropertyError)
    assert isinstance(found[1], Properties)
    assert "after 1 steps" in json.loads((tmp_path / "relax-0000.json").read_text())["error"]
    with pytest.raises(InputError, match="unknown property 'hardness'"):
        dict(run_pool("hardness", "chgnet", [SALT], tmp_path))


def test_a_refused_structure_has_a_file_and_is_not_tried_again(tmp_path, monkeypatch):
    twice = SALT.copy()
    twice.positions[1] = twice.positions[0]
    structures = [twice, SALT, twice]
    found = dict(run_pool("relax", "chgnet", structures, tmp_path, members=2))
    assert isinstance(found[1], Properties)
    for number in (0, 2):
        assert "at the same place" in str(found[number])
        kept = json.loads((tmp_path / f"relax-{number:04d}.json").read_text())
        assert kept["error"] == str(found[number])
    monkeypatch.setattr(pools, "compute", lambda job: pytest.fail("computed again"))
    again = dict(run_pool("relax", "chgnet", structures, tmp_path, members=2))
    assert {number: str(one) for number, one in again.items()} == {
        number: str(one) for number, one in found.items()
    }


def test_a_refused_option_is_raised_and_earlier_results_stay(tmp_path):
    dict(run_pool("relax", "chgnet", [SALT], tmp_path, members=2))
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    with pytest.raises(InputError, match="members is 1; expected 2 or more"):
        dict(run_pool("relax", "chgnet", [SALT, SALT], tmp_path, members=1))
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == before


def test_a_structure_that_is_too_large_here_is_tried_again(tmp_path, monkeypatch):
    def too_large(potential, structure, **options):
        raise TooLargeError("needs 900 GB")

    with monkeypatch.context() as small:
        small.setitem(pools.KINDS, "relax", too_large)
        ((_, found),) = run_pool("relax", "chgnet", [SALT], tmp_path, members=2)
    assert "900 GB" in str(found)
    ((_, again),) = run_pool("relax", "chgnet", [SALT], tmp_path, members=2)
    assert isinstance(again, Properties)


def test_a_lost_job_is_named_and_tried_again(tmp_path):
    class Losing(InlineExecutor):
        def run(self, work, jobs):
            yield from ((number, JobLost("three times")) for number, _ in enumerate(jobs))

    ((number, found),) = run_pool("relax", "chgnet", [SALT], tmp_path, Losing(), members=2)
    assert number == 0
    assert "three times" in str(found)
    ((_, again),) = run_pool("relax", "chgnet", [SALT], tmp_path, members=2)
    assert isinstance(again, Properties)


def test_a_moved_reference_is_another_result(tmp_path):
    def digest(references):
        options = {"references": references}
        return pools.Job("formation", "chgnet", SALT, options, tmp_path / "x").digest()

    metal = bulk("Na")
    moved = bulk("Na", a=4.3)
    assert digest({"Na": metal, "Cl": -1.8}) == digest({"Cl": -1.8, "Na": metal})
    assert digest({"Na": metal, "Cl": -1.8}) != digest({"Na": moved, "Cl": -1.8})


def test_a_copy_of_the_model_has_the_same_results_another_model_has_not(tmp_path):
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).write_bytes(content)
    first, copy, other = (
        pools.Job("relax", str(tmp_path / name), SALT, {}, tmp_path / "x").digest()
        for name in "abc"
    )
    assert first == copy != other


def test_a_model_that_was_trained_again_is_loaded_again(tmp_path):
    file = tmp_path / "model.safetensors"
    for seed in range(2):
        torch.manual_seed(seed)
        potential = blips.bayesianize(PaiNN(cutoff=4.0, features=16, blocks=1))
        blips.save(potential, file)
        loaded = load_once(file)
        assert (
            loaded.predict(SALT, method="map").energy
            == potential.predict(SALT, method="map").energy
        )


def test_fixed_atoms_and_isotopes_are_another_result(tmp_path):
    fixed, heavy = SALT.copy(), SALT.copy()
    fixed.set_constraint(FixAtoms([0]))
    heavy.set_masses([22.0, 37.0])
    jobs = (pools.Job("relax", "m", one, {}, tmp_path / "x") for one in (SALT, fixed, heavy))
    assert len({job.digest() for job in jobs}) == 3


def test_the_command_writes_json_and_a_figure(tmp_path):
    write(tmp_path / "salt.cif", SALT)
    out = tmp_path / "out"
    result = invoke(
        "property", "equation_of_state", "chgnet", tmp_path / "salt.cif", "-o", out, "--json"
    )
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    volume = found["quantities"]["volume"]
    assert 42 < volume["value"] < 50  # 44.9 by experiment
    assert 0.1 < volume["std"] < 5
    saved = json.loads((out / "equation_of_state-0000.json").read_text())
    assert len(saved["quantities"]["volume"]["members"]) == 16
    assert (out / "equation_of_state-0000.png").stat().st_size > 10_000


def test_a_new_result_has_a_new_figure(tmp_path):
    write(tmp_path / "salt.cif", SALT)
    command = ("property", "relax", "chgnet", tmp_path / "salt.cif", "-o", tmp_path)
    figure = tmp_path / "relax-0000.png"
    invoke(*command, "--members", 2)
    first = figure.read_bytes()
    invoke(*command, "--members", 2)
    assert figure.read_bytes() == first
    invoke(*command, "--members", 4)
    assert figure.read_bytes() != first


def test_formation_by_the_command(tmp_path):
    oxide, metal = bulk("MgO", "rocksalt", a=4.2), bulk("Mg")
    write(tmp_path / "oxide.cif", oxide)
    write(tmp_path / "metals.extxyz", [metal])
    command = ("property", "formation", "chgnet", tmp_path / "oxide.cif", "-o", tmp_path / "out")
    references = ("--reference", tmp_path / "metals.extxyz", "--reference", "O=-4.95")
    result = invoke(*command, *references, "--members", 4, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)[0]["quantities"]["formation_energy"]
    expected = formation_energy(blips.load("chgnet"), oxide, {"Mg": metal, "O": -4.95}, members=4)[
        "formation_energy"
    ]
    assert found["value"] == pytest.approx(expected.value, abs=1e-4)
    assert found["std"] == pytest.approx(expected.std, rel=1e-2)
    assert -3.2 < found["value"] < -2.9  # -3.01 eV/atom in tables
    for wrong, why in (
        ((), "no reference for Mg, O"),
        (("--reference", "O=two"), "expected an energy, as in O=-4.95"),
        (("--reference", tmp_path / "oxide.cif"), "one structure of each element alone"),
        (("--temperature", 300), "--temperature is an option of dynamics, not of formation"),
    ):
        with pytest.raises(BlipsError, match=why):
            invoke(*command, *wrong)


def vacancy_hop():
    """Seven atoms of aluminium: a neighbour of the vacancy, before and after its hop."""
    crystal = bulk("Al", cubic=True).repeat((2, 1, 1))
    before, after = crystal.copy(), crystal.copy()
    after.positions[1] = crystal.positions[0]
    del before[0], after[0]
    return before, after


def test_barriers_by_the_command(tmp_path):
    before, after = vacancy_hop()
    for name, one in (("start", before), ("end", after), ("ends", [after, before])):
        write(tmp_path / f"{name}.extxyz", one)
    command = ("property", "barrier", "chgnet", tmp_path / "start.extxyz", "-o", tmp_path / "out")
    common = ("--members", 4, "--fmax", 0.2)
    result = invoke(*command, "--end", tmp_path / "end.extxyz", "--images", 5, *common, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)[0]["quantities"]
    assert 0.3 < found["barrier"]["value"] < 1.2  # 0.6 eV by experiment, in a large crystal
    assert abs(found["reaction_energy"]["value"]) < 1e-3  # both ends are the same crystal
    with pytest.raises(BlipsError, match="1 structures and 2 ends"):
        invoke(*command, "--end", tmp_path / "ends.extxyz")
    middle = before.copy()
    middle.positions = (before.positions + after.positions) / 2
    write(tmp_path / "scan.extxyz", [before, middle, after])
    command = ("property", "barrier", "chgnet", tmp_path / "scan.extxyz", "-o", tmp_path / "scan")
    result = invoke(*command, "--scan", "--members", 4, "--json")
    expected = barrier(blips.load("chgnet"), [before, middle, after], band=False, members=4)
    scanned = json.loads(result.stdout)[0]["quantities"]["barrier"]
    assert scanned["value"] == pytest.approx(expected["barrier"].value, abs=1e-4)
    assert scanned["value"] > found["barrier"]["value"]


def test_dynamics_by_the_command(tmp_path):
    write(tmp_path / "salt.cif", SALT)
    command = ("property", "dynamics", "chgnet", tmp_path / "salt.cif", "-o", tmp_path)
    result = invoke(*command, "--temperature", 50, "--steps", 400, "--members", 2, "--json")
    assert result.exit_code == 0, result.output
    pairs = json.loads(result.stdout)[0]["quantities"]["radial_distribution"]["value"]
    assert max(pairs[:26]) == 0.0 < max(pairs[26:30])  # neighbours at 2.8 A, none below 2.6
    assert (tmp_path / "dynamics-0000.png").stat().st_size > 10_000
    failed = invoke(*command, "--temperature", 300, "--timestep", 40, "--steps", 400)
    assert failed.exit_code == 1
    assert "flew apart" in failed.output
    with pytest.raises(BlipsError, match="expected positive numbers"):
        invoke(*command, "--temperature", -1)


def finished(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("relax-*.json")}


def wait_for(folder: Path, count: int, process: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while len(finished(folder)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, finished(folder)
        time.sleep(0.02)


@pytest.mark.slow
def test_a_pool_on_dask_survives_the_death_of_a_worker_and_its_own(tmp_path):
    crystals = [bulk("NaCl", "rocksalt", a=5.3 + 0.04 * k) for k in range(12)]
    write(tmp_path / "salts.extxyz", crystals)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "blips", "property", "relax", "chgnet"]
    command += [str(tmp_path / "salts.extxyz"), "-o", str(out), "--members", "4", "--workers", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes)
    wait_for(out, 1, process)
    workers = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline())
    ]
    assert len(workers) == 2
    workers[0].kill()
    wait_for(out, 4, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not psutil.wait_procs(workers, timeout=60)[1]  # they end with the command
    before = finished(out)
    assert 4 <= len(before) < 12
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    after = finished(out)
    assert len(after) == 12
    assert {name: after[name] for name in before} == before  # none was computed again
    expected = dict(run_pool("relax", "chgnet", crystals, tmp_path / "alone", members=4))
    for number, found in run_pool(
        "relax", "chgnet", crystals, out, members=4, method="linear", seed=0
    ):
        assert found["energy"].value == pytest.approx(expected[number]["energy"].value, abs=1e-5)
        assert found["energy"].std == pytest.approx(expected[number]["energy"].std, rel=1e-3)
    assert finished(out) == after
