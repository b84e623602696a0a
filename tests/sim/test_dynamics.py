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
from blips.sim.frames import FrameSaver
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
    guard = Guard(high=limit, farthest=2.0)
    outcome = run_guarded(heating(atoms), steps, guard, every=5, saver=FrameSaver(file))
    assert outcome.stopped
    assert outcome.steps < steps
    assert [event.limit for event in outcome.events] == ["force_std"]  # not exploded yet
    frame = ase.io.read(file)
    assert frame.info["step"] == outcome.steps
    assert "exceeds" in frame.info["guard"]
    saved = np.linalg.norm(frame.arrays["forces_uncertainty"], axis=1).max()
    assert saved == pytest.approx(outcome.events[0].value, rel=1e-5)

    unguarded = heated(ammonia_potential, 300)
    heating(unguarded).run(outcome.steps + 50)  # nothing holds it
    assert np.isfinite(unguarded.positions).all()


def test_ammonia_near_its_minimum_is_left_alone(ammonia_potential, limit):
    atoms = heated(ammonia_potential, 150)
    dynamics = VelocityVerlet(atoms, 0.5 * fs)
    seen = []
    outcome = run_guarded(
        dynamics, 40, Guard(high=limit, farthest=2.0), every=10, progress=seen.append
    )
    assert not outcome.stopped
    assert outcome.events == []
    assert outcome.reason == ""
    assert seen == [0, 10, 20, 30, 40]


def test_between_the_thresholds_frames_are_saved_and_the_run_goes_on(ammonia_potential, tmp_path):
    atoms = heated(ammonia_potential, 300)
    saver = FrameSaver(tmp_path / "frames.extxyz", every=4, distinct=0.0)
    outcome = run_guarded(
        VelocityVerlet(atoms, 0.5 * fs), 10, Guard(low=1e-6, high=1e6), every=2, saver=saver
    )
    assert not outcome.stopped
    assert outcome.steps == 10
    frames = ase.io.read(saver.file, ":")
    assert [frame.info["step"] for frame in frames] == [0, 4, 8]
    assert [event.step for event in outcome.events] == [0, 4, 8]
    std = np.linalg.norm(frames[1].arrays["forces_uncertainty"], axis=1).max()
    assert std == pytest.approx(outcome.events[1].value, rel=1e-5)


def test_the_frame_that_stops_a_run_is_saved_though_it_is_not_due(ammonia_potential, limit):
    """Two thresholds in one run: frames between them, then the end above the higher one."""
    atoms = heated(ammonia_potential, 300)
    rng = np.random.default_rng(2)
    dynamics = Langevin(
        atoms, 0.5 * fs, temperature_K=6000, friction=0.05 / fs, fixcm=False, rng=rng
    )
    guard = Guard(low=0.5 * limit, high=limit)
    saver = FrameSaver(every=40)
    outcome = run_guarded(dynamics, 400, guard, every=5, saver=saver)
    assert outcome.stopped
    values = [event.value for event in outcome.events]
    assert all(guard.low < value <= guard.high for value in values[:-1])
    assert values[-1] > guard.high
    steps = [frame.info["step"] for frame in outcome.frames]
    assert len(steps) >= 2
    assert np.diff(steps[:-1]).min(initial=40) >= 40
    assert steps[-1] == outcome.steps


def test_a_reference_decides_above_the_higher_threshold(ammonia_potential):
    """Asked, the potential itself has no error; EMT has a large one."""
    guard = Guard(high=1e-6)
    itself = blips.Calculator(ammonia_potential, method="map")
    atoms = heated(ammonia_potential, 300)
    outcome = run_guarded(VelocityVerlet(atoms, 0.5 * fs), 4, guard, every=2, reference=itself)
    assert not outcome.stopped
    assert all(event.reference_error < 1e-4 for event in outcome.events)
    atoms = heated(ammonia_potential, 300)
    outcome = run_guarded(VelocityVerlet(atoms, 0.5 * fs), 4, guard, every=2, reference=EMT())
    assert outcome.stopped
    assert outcome.steps == 0
    assert outcome.events[0].reference_error > 0.5


def test_no_reference_is_asked_about_an_exploded_geometry(ammonia_potential):
    class Picky(EMT):
        def calculate(self, *_):
            raise AssertionError("no self-consistent field converges here")

    atoms = heated(ammonia_potential, 300)
    atoms.positions[1] = atoms.positions[0] + 0.1
    guard, dynamics = Guard(high=1e-6), VelocityVerlet(atoms, 0.5 * fs)
    outcome = run_guarded(dynamics, 4, guard, reference=Picky())
    assert outcome.stopped
    assert "covalent radii" in outcome.reason


def test_errors_name_the_remedy(ammonia_potential):
    atoms = molecule("NH3")
    atoms.calc = blips.Calculator(ammonia_potential)
    dynamics = VelocityVerlet(atoms, 0.5 * fs)
    with pytest.raises(InputError, match="every"):
        run_guarded(dynamics, 1, Guard(), every=0)
