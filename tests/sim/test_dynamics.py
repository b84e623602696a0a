"""Molecular dynamics that stops before it leaves what the potential knows."""

import ase.io
import numpy as np
import pytest
from ase.build import molecule
from ase.calculators.emt import EMT
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import thermalize_momenta
from ase.md.verlet import VelocityVerlet
from ase.units import fs

import blips
from blips.data.ammonia import load_ammonia
from blips.errors import InputError
from blips.sim.dynamics import run_guarded
from blips.sim.guard import Guard


def force_std(potential, structures):
    """Largest atomic force sigma of each structure, eV/A."""
    prediction = potential.predict(structures, samples=32)
    return np.array(
        [np.linalg.norm(prediction[k].forces_std, axis=1).max() for k in range(len(structures))]
    )


def heated(potential, temperature, seed=1):
    """Ammonia at its minimum, given velocities of this temperature (K)."""
    atoms = min(load_ammonia("train"), key=lambda a: a.get_potential_energy()).copy()
    thermalize_momenta(atoms, temperature, exact_temperature=True, rng=np.random.default_rng(seed))
    atoms.calc = blips.Calculator(potential, method="map", samples=32)
    return atoms


@pytest.fixture(scope="module")
def limit(ammonia_potential):
    """Above every sigma of validation data, below most of distorted geometries."""
    known = force_std(ammonia_potential, load_ammonia("valid"))
    return 1.5 * known.max()


def test_heated_ammonia_stops_at_the_guard_and_the_mean_alone_goes_on(
    ammonia_potential, limit, tmp_path
):
    file = tmp_path / "uncertain.extxyz"
    steps = 400

    def heating(atoms):
        return Langevin(
            atoms,
            0.5 * fs,
            temperature_K=6000,
            friction=0.05 / fs,
            fixcm=False,
            rng=np.random.default_rng(2),
        )

    atoms = heated(ammonia_potential, 300)
    guard = Guard(force_std=limit, farthest=2.0)
    outcome = run_guarded(heating(atoms), steps, guard, every=5, frames_file=file)
    assert outcome.stopped
    assert outcome.steps < steps
    assert [event.finding.limit for event in outcome.events] == ["force_std"]  # not exploded yet
    frame = ase.io.read(file)
    assert frame.info["step"] == outcome.steps
    assert "exceeds" in frame.info["guard"]
    saved = np.linalg.norm(frame.arrays["forces_uncertainty"], axis=1).max()
    assert saved == pytest.approx(outcome.events[0].finding.value, rel=1e-5)

    unguarded = heated(ammonia_potential, 300)
    heating(unguarded).run(outcome.steps + 50)  # nothing holds it
    assert np.isfinite(unguarded.positions).all()


def test_ammonia_near_its_minimum_is_left_alone(ammonia_potential, limit):
    atoms = heated(ammonia_potential, 150)
    dynamics = VelocityVerlet(atoms, 0.5 * fs)
    seen = []
    outcome = run_guarded(
        dynamics, 40, Guard(force_std=limit, farthest=2.0), every=10, progress=seen.append
    )
    assert not outcome.stopped
    assert outcome.events == []
    assert outcome.reason == ""
    assert seen == [0, 10, 20, 30, 40]


def test_log_goes_on_and_keeps_the_frames(ammonia_potential):
    atoms = heated(ammonia_potential, 300)
    guard = Guard(force_std=1e-6)
    outcome = run_guarded(VelocityVerlet(atoms, 0.5 * fs), 6, guard, every=2, action="log")
    assert not outcome.stopped
    assert outcome.steps == 6
    assert [frame.info["step"] for frame in outcome.frames] == [0, 2, 4, 6]


def test_ask_lets_a_reference_decide(ammonia_potential):
    """Asked, the potential itself has no error; EMT has a large one."""
    guard = Guard(force_std=1e-6)
    itself = blips.Calculator(ammonia_potential, method="map")
    atoms = heated(ammonia_potential, 300)
    outcome = run_guarded(
        VelocityVerlet(atoms, 0.5 * fs), 4, guard, every=2, action="ask", reference=itself
    )
    assert not outcome.stopped
    assert all(event.reference_error < 1e-4 for event in outcome.events)
    atoms = heated(ammonia_potential, 300)
    outcome = run_guarded(
        VelocityVerlet(atoms, 0.5 * fs), 4, guard, every=2, action="ask", reference=EMT()
    )
    assert outcome.stopped
    assert outcome.steps == 0
    assert outcome.events[0].reference_error > 0.5


def test_errors_name_the_remedy(ammonia_potential):
    atoms = molecule("NH3")
    atoms.calc = blips.Calculator(ammonia_potential)
    dynamics = VelocityVerlet(atoms, 0.5 * fs)
    with pytest.raises(InputError, match="stop, log, ask"):
        run_guarded(dynamics, 1, Guard(), action="warn")
    with pytest.raises(InputError, match="reference="):
        run_guarded(dynamics, 1, Guard(), action="ask")
    with pytest.raises(InputError, match="every"):
        run_guarded(dynamics, 1, Guard(), every=0)
