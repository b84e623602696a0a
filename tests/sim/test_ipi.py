"""i-PI with a committee of members: over a socket, for real."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase.units import Bohr, Hartree

import blips
from blips.backbones import PaiNN
from blips.data.ammonia import load_ammonia
from blips.errors import InputError

pytest.importorskip("ipi")
from blips.sim import ipi_driver
from blips.sim.ipi_driver import Committee

INPUT = """<simulation verbosity='low'>
  <output prefix='run'>
    <properties stride='1' filename='out'>
      [ step, potential{electronvolt}, kinetic_md{electronvolt}, conserved{electronvolt} ]
    </properties>
    <trajectory filename='spread' extra_type='committee_uncertainty'> extras </trajectory>
    <trajectory filename='pos' format='ase'> positions{ase} </trajectory>
  </output>
  <total_steps>STEPS</total_steps>
  <prng><seed>31</seed></prng>
  <ffcommittee name='committee'>
    <ffsocket name='members' mode='unix' pbc='false'>
      <address>ADDRESS</address> <latency>1e-3</latency> <timeout>60</timeout>
    </ffsocket>
    <parse_json> True </parse_json>
    <active_thresh units='electronvolt'> THRESHOLD </active_thresh>
    <active_output> active </active_output>
  </ffcommittee>
  <system>
    <initialize nbeads='BEADS'>
      <file mode='ase' units='angstrom'> start.xyz </file>
      <velocities mode='thermal' units='kelvin'> 300 </velocities>
    </initialize>
    <forces> <force forcefield='committee'> </force> </forces>
    <motion mode='dynamics'>
      <dynamics mode='nvt'>
        <timestep units='femtosecond'> 0.25 </timestep>
        <thermostat mode='THERMOSTAT'> <tau units='femtosecond'> 100 </tau> </thermostat>
      </dynamics>
    </motion>
    <ensemble> <temperature units='kelvin'> 300 </temperature> </ensemble>
  </system>
</simulation>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A conditioned model and a molecule in a box."""
    folder = tmp_path_factory.mktemp("ipi")
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=4.0, features=16, blocks=2)).double()
    potential.condition(load_ammonia("train")[:16], valid=load_ammonia("valid"))
    blips.save(potential, folder / "model.safetensors")
    atoms = load_ammonia("valid")[0].copy()
    atoms.center(vacuum=6.0)
    atoms.info.clear()
    ase.io.write(folder / "start.xyz", atoms)
    return folder


def simulate(folder, threshold, steps=8, beads=1, thermostat="langevin"):
    """Run i-PI and its driver, which meet at a unix socket; the folder of the outputs."""
    run = folder / f"run-{threshold}-{beads}"
    run.mkdir()
    address = f"blips-{os.getpid()}-{time.monotonic_ns()}"
    text = INPUT.replace("ADDRESS", address).replace("THRESHOLD", str(threshold))
    text = text.replace("STEPS", str(steps)).replace("BEADS", str(beads))
    (run / "input.xml").write_text(text.replace("THERMOSTAT", thermostat))
    (run / "start.xyz").write_bytes((folder / "start.xyz").read_bytes())
    programs = Path(sys.prefix) / "bin"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, programs / "i-pi", "input.xml"],
        cwd=run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    socket = Path(f"/tmp/ipi_{address}")
    for _ in range(600):
        if socket.exists() or server.poll() is not None:
            break
        time.sleep(0.1)
    driver = subprocess.Popen(
        [
            sys.executable, programs / "i-pi-py_driver", "-u", "-a", address, "-m", "custom",
            "-P", ipi_driver.__file__,
            "-o", f"model={folder / 'model.safetensors'},template={run / 'start.xyz'},members=4",
        ],
        cwd=run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = server.communicate(timeout=120)
    finally:  # a driver waits for ever where its server has died
        for process in (driver, server):
            process.kill()
        words, _ = driver.communicate()
    assert server.returncode == 0, output + words
    return run


def test_a_thermostatted_run_with_a_committee(folder):
    """Energies are the plain model's; the spread is that of its members; a low threshold saves."""
    run = simulate(folder, threshold=1e-9)
    potential = blips.load(folder / "model.safetensors")
    frames = ase.io.read(run / "run.pos_0.extxyz", ":")
    out = np.loadtxt(run / "run.out")
    assert len(out) == len(frames) == 9
    expected = potential.predict(frames, method="map").array("energy")
    np.testing.assert_allclose(out[:, 1], expected, atol=1e-6)
    assert np.ptp(out[:, 3]) < 0.05 * out[:, 2].mean()  # energy, less what the thermostat gave
    spread = [
        float(line) for line in (run / "run.spread_0").read_text().splitlines() if "#" not in line
    ]
    members = np.stack([m.predict(frames).array("energy") for m in potential.draw(4)])
    np.testing.assert_allclose(np.array(spread) * Hartree, members.std(axis=0, ddof=1), rtol=1e-5)
    saved = (run / "run.active").read_text().count("uncertainty")
    assert saved >= 9  # older versions evaluate the start twice


def test_a_high_threshold_saves_nothing_and_beads_are_as_many_structures(folder):
    run = simulate(folder, threshold=1e3, steps=3, beads=4, thermostat="pile_g")
    assert (run / "run.active").read_text() == ""
    potential = blips.load(folder / "model.safetensors")
    beads = [ase.io.read(run / f"run.pos_{bead}.extxyz", -1) for bead in range(4)]
    assert np.ptp([bead.positions[1, 0] for bead in beads]) > 1e-3  # delocalised
    energies = potential.predict(beads, method="map").array("energy")
    assert np.loadtxt(run / "run.out")[-1, 1] == pytest.approx(energies.mean(), abs=1e-6)


def test_members_are_shifted_and_in_atomic_units(folder):
    driver = Committee(folder / "start.xyz", folder / "model.safetensors", members=3, seed=5)
    atoms = ase.io.read(folder / "start.xyz")
    atoms.rattle(0.05, seed=0)
    energy, forces, virial, extras = driver(atoms.cell.array.T / Bohr, atoms.positions / Bohr)
    atoms.calc = blips.Calculator(driver.potential, "map")
    assert energy * Hartree == pytest.approx(atoms.get_potential_energy())
    np.testing.assert_allclose(forces * Hartree / Bohr, atoms.get_forces(), atol=1e-9)
    stress = atoms.get_stress(voigt=False) * atoms.get_volume()
    np.testing.assert_allclose(virial * Hartree, -stress, atol=1e-9)
    committee = json.loads(extras)
    np.testing.assert_allclose(np.mean(committee["committee_pot"]), energy, rtol=1e-9)
    np.testing.assert_allclose(
        np.mean(committee["committee_force"], axis=0), forces.ravel(), atol=1e-9
    )
    members = driver.potential.draw(3, seed=5)
    spread = np.std([m.predict(atoms).forces for m in members], axis=0, ddof=1) * Bohr / Hartree
    found = np.std(committee["committee_force"], axis=0, ddof=1)
    np.testing.assert_allclose(found, spread.ravel(), rtol=1e-6)
    assert np.shape(committee["committee_virial"]) == (3, 9)


def test_a_committee_of_one_is_refused(folder):
    with pytest.raises(InputError, match="members is 1; expected 2 or more"):
        Committee(folder / "start.xyz", folder / "model.safetensors", members=1)
