"""Extreme structures: a prediction is finite with sigma >= 0, or refused in words."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from hypothesis import given
from hypothesis import strategies as st

import blips
from blips.backbones import PaiNN, SchNet
from blips.bayes.noise import generators
from blips.errors import BlipsError, InputError, TooLargeError
from blips.inference.memory import (
    SAFETY,
    MemoryGauge,
    is_large,
    passes_side_by_side,
    peak_bytes,
    rows_of,
)
from blips.prediction import Prediction
from helpers import TINY


@pytest.fixture(scope="module", params=[PaiNN, SchNet], ids=lambda c: c.__name__)
def potential(request):
    torch.manual_seed(0)
    return blips.bayesianize(request.param(**TINY), seed=0)


def check(potential, atoms, method="mc"):
    """Predict; whether it was refused."""
    try:
        found = potential.predict(atoms, samples=3, method=method)
    except BlipsError:
        return False
    for name in ("energy", "forces", "energy_std", "forces_std"):
        assert np.isfinite(getattr(found, name)).all(), name
    assert (found.energy_std >= 0).all()
    assert (found.forces_std >= 0).all()
    return True


SOUND = {
    "one atom": Atoms("H"),
    "no neighbours": Atoms("H2", positions=[[0, 0, 0], [0, 0, 50.0]]),
    "one atom in a periodic cell": bulk("Cu"),
    "atoms that overlap": Atoms("HC", positions=[[0, 0, 0], [0, 0, 1e-3]]),
    "huge cell": Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.8]], cell=[1e4] * 3, pbc=True),
    "chain": Atoms("C", cell=[1.4, 0, 0], pbc=[True, False, False]),
    "slab": Atoms("C2", positions=[[0, 0, 0], [1.2, 0.7, 0]], cell=[2.5, 2.5, 0], pbc=[1, 1, 0]),
    "far from the origin": Atoms("H2", positions=[[1e5, 0, 0], [1e5, 0, 0.8]]),
}


@pytest.mark.parametrize("method", ["mc", "frozen"])
@pytest.mark.parametrize("name", SOUND)
def test_unusual_structures_are_predicted(potential, name, method):
    assert check(potential, SOUND[name], method)


REFUSED = {
    "no atoms": Atoms(),
    "NaN": Atoms("H2", positions=[[0, 0, 0], [0, 0, np.nan]]),
    "infinite": Atoms("H2", positions=[[0, 0, 0], [0, 0, np.inf]]),
    "on one place": Atoms("H2", positions=[[0, 0, 0], [0, 0, 0]]),
    "atoms lost in space": Atoms("H2", positions=[[0, 0, 0], [0, 0, 4e5]]),
    "endless cell": Atoms("H", cell=[1e10, 3, 3], pbc=True),
    "flat cell": Atoms("H", cell=[1e-5, 1e-5, 3], pbc=True),
    "sheared cell": Atoms("H", cell=[[3.0, 0, 0], [1.9e4, 1e-5, 0], [0, 0, 3.0]], pbc=True),
    "periodic without cell": Atoms("H", pbc=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_structures_are_refused(potential, name):
    assert not check(potential, REFUSED[name])


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 6),
    scale=st.floats(1e-3, 30),
    periodic=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_no_sigma_is_negative_or_nan(seed, count, scale, periodic):
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**TINY), seed=0)
    rng = np.random.default_rng(seed)
    atoms = Atoms(
        numbers=rng.integers(1, 87, count),
        positions=rng.normal(scale=scale, size=(count, 3)),
        cell=np.diag(rng.uniform(1.5, 8, 3)) if any(periodic) else None,
        pbc=periodic,
    )
    check(potential, atoms)


@pytest.mark.parametrize("method", ["mc", "frozen", "map", "onepass"])
def test_a_hundred_thousand_atoms_are_refused_by_the_memory_bound(crystal, method):
    potential, graph = crystal
    with pytest.raises(TooLargeError, match=r"100800 atoms with \d+ pairs need about .* 0\.2 GB"):
        potential.predict(graph, samples=3, method=method, memory_gb=0.2)


def test_a_hundred_thousand_atoms_are_refused_by_the_machine(crystal, monkeypatch):
    potential, graph = crystal
    monkeypatch.setattr("blips.inference.memory.available_bytes", lambda: 3e8)
    with pytest.raises(TooLargeError, match=r"0\.3 GB may be used"):
        potential.predict(graph, samples=3)


def test_a_hundred_thousand_atoms_run_sample_by_sample(crystal):
    potential, graph = crystal
    sampled = lambda part: potential.sample(part, generators(0, 1))  # noqa: E731
    assert potential.gauge.chunk("mc", graph, 8, 1e3, sampled) == 1
    assert passes_side_by_side(rows_of(graph)) == 1  # not one on each core


def test_a_hundred_thousand_atoms_by_map_fit_eight_gigabytes(crystal):
    """A PaiNN of 64 features takes about 7 GB for them, and a sample of it more."""
    torch.manual_seed(0)
    potential, (_, graph) = blips.bayesianize(PaiNN(cutoff=3.0, features=64)), crystal
    gauge = potential.gauge

    def plain(part):
        return potential(part)

    def sampled(part):
        return potential.sample(part, generators(0, 1))

    of_map = gauge.check("map", graph, 8.0, plain)
    assert 2e9 < of_map < gauge.check("mc", graph, 1e3, sampled)


def labelled_copper(seed):
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=seed)
    atoms.calc = EMT()
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    return atoms


@pytest.mark.parametrize("method", ["map", "onepass", "mc", "conditioned"])
def test_what_a_part_takes_says_what_the_whole_takes(method):
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**{**TINY, "cutoff": 3.0, "blocks": 1}), seed=0)
    graph = potential.backbone.graph(bulk("Cu", cubic=True) * (12, 12, 10))
    assert is_large(graph)
    if method == "conditioned":
        known = [labelled_copper(seed) for seed in range(4)]
        potential.condition(known[:2], valid=known[2:])

    def run(part):
        if method == "mc":
            return potential.sample(part, generators(0, 1))
        return potential.predict(part, method=method, memory_gb=100)

    peak = peak_bytes(lambda: run(graph))
    needed = MemoryGauge().check(method, graph, 1e3, run)
    assert needed == pytest.approx(SAFETY * peak, rel=0.3)


@pytest.fixture(scope="module")
def crystal():
    """100,800 atoms of copper with their neighbours, for a small model."""
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**{**TINY, "cutoff": 3.0, "blocks": 1}), seed=0)
    return potential, potential.backbone.graph(bulk("Cu", cubic=True) * (30, 30, 28))


def test_a_batch_too_large_for_the_bound_runs_in_parts(potential):
    structures = [molecule("CH3CH2OH") for _ in range(6)]
    whole = potential.predict(structures, samples=3, method="frozen")
    one = potential.backbone.graph(structures[:1])
    needed = (
        1e-9 * potential.gauge._bytes_per_row["frozen", True, False, torch.float32] * rows_of(one)
    )
    parts = potential.predict(structures, samples=3, method="frozen", memory_gb=1.5 * needed)
    np.testing.assert_allclose(parts.energy_std, whole.energy_std, rtol=1e-4)
    np.testing.assert_allclose(parts.forces, whole.forces, rtol=1e-3, atol=1e-5)
    assert parts.n_atoms.tolist() == whole.n_atoms.tolist()
    with pytest.raises(TooLargeError, match="9 atoms with 70 pairs"):
        potential.predict(structures, samples=3, memory_gb=0.5 * needed)


@pytest.mark.parametrize("method", ["conditioned", "onepass", "map", "mc"])
def test_the_bound_holds_for_small_structures_too(method):
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**TINY), seed=0)
    known = [labelled_copper(seed) for seed in range(4)]
    potential.condition(known[:2], valid=known[2:])
    with pytest.raises(TooLargeError, match=r"4 atoms with \d+ pairs need about"):
        potential.predict(known[0], method=method, memory_gb=1e-6)
    assert len(potential.predict(known, method=method, memory_gb=1.0)) == 4


def test_what_a_pass_takes_is_measured_anew_for_another_posterior():
    torch.manual_seed(0)
    potential, needed = blips.bayesianize(PaiNN(**TINY), seed=0), {}
    known = [labelled_copper(seed) for seed in range(4)]
    for maps in ("readout", "all"):
        potential.posterior = None
        potential.condition(known[:2], valid=known[2:], maps=maps)
        potential.predict(known[0], memory_gb=1.0)
        (needed[maps],) = potential.gauge._bytes_per_row.values()
    assert needed["all"] > 3 * needed["readout"]


def test_a_damaged_model_gives_no_sigma():
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**TINY), seed=0)
    with torch.no_grad():
        next(potential.backbone.parameters()).fill_(float("nan"))
    with pytest.raises(InputError, match=r"no usable .*_std for structures 0, 1 "):
        potential.predict([molecule("NH3"), molecule("H2O")], samples=3)
    with pytest.raises(InputError, match="no usable energy_std for structures 1 "):
        Prediction(np.array([1, 1]), "mc", 2, energy_std=np.array([0.1, -0.1]))


def test_a_guard_finds_an_atom_that_left_for_good():
    from blips.sim.guard import Guard

    assert Guard().check(REFUSED["atoms lost in space"])[0].limit == "geometry"
