"""Barriers and averages of dynamics against closed forms."""

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.constraints import FixAtoms
from scipy.optimize import minimize_scalar

from blips import properties
from blips.errors import InputError
from blips.properties import PropertyError
from blips.properties.dynamics import mean_squared_displacement, slope, time_std
from properties.models import DISTANCE, EPSILON, crystal, lennard_jones, relative_changes

MEMBERS = 4
APART = 5.8  # A between two fixed atoms; a third one between them is bound to either


def hop(position: float) -> Atoms:
    atoms = Atoms("Cu3", [[0, 0, 0], [position, 0, 0], [APART, 0, 0]])
    atoms.set_constraint(FixAtoms([0, 2]))
    return atoms


def powers(position: float) -> np.ndarray:
    """(s/r)^12 and (s/r)^6, summed over both bonds."""
    near = DISTANCE / np.array([position, APART - position])
    return np.array([(near**12).sum(), (near**6).sum()])


def energy(position: float, p: float, q: float) -> float:
    return p * powers(position)[0] - 2 * q * powers(position)[1]


def lowest(p: float, q: float) -> float:
    found = minimize_scalar(energy, bounds=(2.3, 2.8), args=(p, q), method="bounded")
    return float(found.x)


@pytest.fixture(scope="module")
def potential():
    return lennard_jones(tau=1e-2, cutoff=4.0)


@pytest.mark.parametrize("method", ["linear", "members"])
def test_a_barrier_errs_by_what_its_two_ends_do_not_share(potential, method):
    options = {"images": 5, "members": MEMBERS, "fmax": 1e-4, "method": method}
    found = properties.barrier(potential, [hop(2.55), hop(APART - 2.55)], **options)
    dp, dq = relative_changes(potential, MEMBERS)
    start, top = lowest(EPSILON, EPSILON), APART / 2
    exact = energy(top, EPSILON, EPSILON) - energy(start, EPSILON, EPSILON)
    assert exact > 0.02
    assert found["barrier"].value == pytest.approx(exact, abs=1e-5)
    assert found["reverse_barrier"].value == pytest.approx(exact, abs=1e-5)
    assert found["reaction_energy"].std < 1e-5  # by symmetry all of its error is shared
    if method == "linear":
        difference = powers(top) - powers(start)
        expected = exact + EPSILON * (dp * difference[0] - 2 * dq * difference[1])
    else:
        pairs = EPSILON * (1 + np.stack([dp, dq], axis=1))
        expected = [energy(top, p, q) - energy(lowest(p, q), p, q) for p, q in pairs]
    np.testing.assert_allclose(found["barrier"].members, expected, atol=2e-5)
    single = EPSILON * np.abs(dp * powers(top)[0] - 2 * dq * powers(top)[1]).max()
    assert found["barrier"].std < single
    assert not found.failures
    assert len(found.plot().axes) == 4


def test_a_scan_is_taken_as_it_is(potential):
    scan = [hop(x) for x in (2.6, 2.7, 2.9, 3.1)]
    found = properties.barrier(potential, scan, band=False, members=MEMBERS)
    expected = energy(2.9, EPSILON, EPSILON) - energy(2.6, EPSILON, EPSILON)
    assert found["barrier"].value == pytest.approx(expected)
    assert found.details["member_energies"].shape == (MEMBERS, 4)


def test_bands_that_do_not_converge_are_named(potential):
    ends = [hop(2.55), hop(APART - 2.55)]
    with pytest.raises(PropertyError, match="the band did not converge after 12 steps"):
        properties.barrier(potential, ends, steps=12, fmax=1e-6, members=MEMBERS)
    wild = lennard_jones(tau=0.8, cutoff=4.0)  # some members bind nothing
    options = {"images": 5, "members": 8, "method": "members", "steps": 60}
    found = properties.barrier(wild, ends, **options)
    assert found.failures
    assert len(found["barrier"].members) == 8 - len(found.failures)


def test_misfit_adds_up_along_a_path_wherever_its_images_are_wrapped(potential):
    floor = potential.conditioned().scale.floor["forces"]
    path = [crystal() for _ in range(4)]
    for number, atoms in enumerate(path):
        atoms.positions[0] += np.array([0.3, 0.4, 0.0]) * number  # 0.5 A each
    path[2].positions[0] += path[2].cell[1]  # the same atom in the next cell
    found = properties.barrier(potential, path, band=False, members=2)
    assert found.details["misfit_std"] == pytest.approx(floor * np.array([0, 0.5, 1, 1.5]))
    assert "misfit of the forces along the path" in str(found)


def test_a_path_that_leaves_the_data_says_so(potential):
    def notes(*distances):
        path = [Atoms("Cu2", [[0, 0, 0], [distance, 0, 0]]) for distance in distances]
        return str(properties.barrier(potential, path, band=False, members=2))

    assert "leaves the data's domain" in notes(2.5, 9.0)
    assert "leaves the data's domain" not in notes(2.5, 2.6)


def test_bad_paths_are_refused(potential):
    with pytest.raises(InputError, match="at least two structures with the same atoms"):
        properties.barrier(potential, [hop(2.55), Atoms("Cu2")])
    with pytest.raises(InputError, match="at least 3"):
        properties.barrier(potential, [hop(2.55), hop(3.2)], images=2)
    with pytest.raises(InputError, match="members need a structure"):  # its interval is not known
        properties.dynamics(potential, [hop(2.55)] * 40, method="members")


def walk(rng, diffusion: float, frames: int = 600, atoms: int = 60) -> list[Atoms]:
    """Random walkers with <x^2> = 2 D t for each component, D in A^2 per frame."""
    steps = rng.normal(scale=np.sqrt(2 * diffusion), size=(frames, atoms, 3))
    return [Atoms("Cu60", positions) for positions in steps.cumsum(axis=0)]


def test_diffusion_of_random_walkers_and_its_two_errors():
    rng = np.random.default_rng(0)
    mean = walk(rng, 0.01)
    same = properties.averages(mean, [walk(rng, 0.01) for _ in range(8)], interval=10.0)
    exact = 0.01 / 10.0 * 0.1  # A^2/fs -> cm^2/s
    one, error = same["diffusion"], float(same.details["time_std"]["diffusion"])
    assert one.value == pytest.approx(exact, abs=4 * error)
    assert 0.02 * exact < error < 0.4 * exact
    assert f"finite time, on top: diffusion ± {error:.2g} cm^2/s" in str(same)
    assert one.std < 1.5 * error  # members that agree: all of their spread is that of time
    scales = np.linspace(0.2, 1.8, 8)
    differ = properties.averages(mean, [walk(rng, 0.01 * s) for s in scales], interval=10.0)
    spread = exact * scales.std(ddof=1)
    assert differ["diffusion"].std == pytest.approx(spread, rel=0.3)
    assert len(differ.plot().axes) == 2
    with pytest.raises(InputError, match="at least 2 members"):
        properties.averages(mean, [mean], 10.0)


def test_dynamics_of_a_crystal_by_members_and_reweighted():
    potential = lennard_jones(cutoff=4.0)
    options = {"temperature": 100.0, "steps": 400, "members": 2, "seed": 3}
    found = properties.dynamics(potential, crystal().repeat(2), method="members", **options)
    assert not found.failures
    pairs = found["radial_distribution"]
    near = found.details["distances"] < 1.2 * DISTANCE  # the first shell
    nearest = np.average(found.details["distances"][near], weights=pairs.value[near])
    assert nearest == pytest.approx(DISTANCE, abs=0.1)
    assert pairs.members.shape == (2, 60)
    assert np.isfinite(pairs.std).all()
    assert len(found.plot().axes) == 3  # g(r), displacement, diffusion
    quick = properties.dynamics(potential, crystal().repeat(2), **options)["radial_distribution"]
    assert quick.value == pytest.approx(pairs.value)  # the same trajectory of the mean
    again = properties.dynamics(potential, crystal().repeat(2), **{**options, "seed": 4})
    assert again["radial_distribution"].value != pytest.approx(pairs.value)
    hot = {**options, "timestep": 200.0, "method": "members"}
    with pytest.raises(PropertyError, match="flew apart"):
        properties.dynamics(potential, crystal().repeat(2), **hot)


def test_displacement_of_a_drift_alone_is_none():
    frames = np.arange(40.0)[:, None, None] * np.ones((1, 5, 3))
    assert mean_squared_displacement(frames, 19) == pytest.approx(np.zeros(19), abs=1e-12)
    assert slope(np.arange(1, 20) * 0.3) == pytest.approx(0.3)


def test_the_error_of_time_is_that_of_a_mean():
    """Frames that repeat n times have the error of one n-th of them."""
    rng = np.random.default_rng(1)
    independent = rng.normal(size=(4000, 200))
    assert time_std(independent).mean() == pytest.approx(1 / np.sqrt(4000), rel=0.05)
    correlated = np.repeat(independent[:400], 10, axis=0)
    assert time_std(correlated).mean() == pytest.approx(1 / np.sqrt(400), rel=0.05)


def test_a_radial_distribution_has_both_errors():
    potential = lennard_jones(tau=1e-3)
    frames = []
    for seed in range(40):
        frame = bulk("Cu", "fcc", a=DISTANCE * np.sqrt(2), cubic=True).repeat((2, 1, 1))
        frame.rattle(0.02, seed=seed)
        frames.append(frame)
    found = properties.dynamics(potential, frames, temperature=300.0, members=4)
    one = found["radial_distribution"]
    assert set(np.flatnonzero(one.value[:30] > 1)) == {24, 25}  # both sides of 2.5 A
    assert one.std.max() > 0
    assert found.details["time_std"]["radial_distribution"].max() > 0
    cold = properties.dynamics(potential, frames, temperature=1e-2, members=4)
    assert len(cold.failures) + len(cold["radial_distribution"].members) == 4
    assert "effective frames" in next(iter(cold.failures.values()))
    with pytest.raises(InputError, match="at least 32"):
        properties.dynamics(potential, frames[:10])
