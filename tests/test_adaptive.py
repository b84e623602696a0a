"""The number of samples chosen by the error of sigma."""

import numpy as np
import pytest
import torch
from ase.build import molecule
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import blips
from blips.backbones import PaiNN
from blips.data.graph import AtomGraph
from blips.errors import InputError
from blips.inference import monte_carlo as module
from blips.inference.monte_carlo import monte_carlo, relative_error

GRAPH = AtomGraph.from_atoms(molecule("H2O"), 3.0)


@given(count=st.integers(4, 40), offset=st.floats(-1e3, 1e3))
def test_the_error_follows_the_kurtosis_of_scipy(count, offset):
    samples = offset + np.random.default_rng(count).exponential(size=(count, 4))
    kurtosis = np.maximum(stats.kurtosis(samples, fisher=False), 3.0)
    expected = np.sqrt(np.mean(0.25 * (kurtosis - (count - 3) / (count - 1)) / count))
    assert relative_error(torch.tensor(samples)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.statistical
@pytest.mark.parametrize("law", ["normal", "laplace"])
def test_the_error_is_the_spread_of_sigma_over_many_repeats(law):
    rng = np.random.default_rng(1)
    draws = torch.tensor(getattr(rng, law)(size=(400, 3000)))  # K, repeats
    std = draws.std(dim=0)
    assert relative_error(draws) == pytest.approx(float(std.std() / std.mean()), rel=0.08)


def _sampler(law):
    def sampler(graph, numbers):
        rows = [getattr(np.random.default_rng(k), law)(size=(1, 40)) for k in numbers]
        return {"energy": torch.tensor(np.concatenate(rows)).reshape(-1)}

    return sampler


@pytest.mark.parametrize("chunk", [5, 64])
def test_it_stops_as_soon_as_the_tolerance_is_reached(chunk):
    found = monte_carlo(_sampler("normal"), GRAPH, "auto", method="mc", chunk=chunk)
    assert 51 <= found.samples <= 72  # 1 / (2 * 0.1^2) for normal samples, and a little caution
    assert found.details["std_relative_error"]["energy"] <= 0.1


def test_heavy_tails_need_more_samples():
    normal, heavy = (
        monte_carlo(_sampler(law), GRAPH, "auto", method="mc", chunk=64).samples
        for law in ("normal", "laplace")
    )
    assert heavy > 1.5 * normal


def test_the_maximum_holds_and_is_reported(monkeypatch):
    monkeypatch.setattr(module, "MOST", 40)
    found = monte_carlo(_sampler("normal"), GRAPH, "auto", method="mc", chunk=8, tolerance=0.01)
    assert found.samples == 40
    assert found.details["std_relative_error"]["energy"] > 0.01


@pytest.fixture(scope="module")
def potential() -> blips.BayesianPotential:
    torch.manual_seed(0)
    return blips.bayesianize(PaiNN(cutoff=4.0, features=16, blocks=2, num_basis=6))


def test_a_prediction_is_that_of_the_samples_it_drew(potential):
    structures = [molecule("NH3"), molecule("H2O"), molecule("CH4")]
    found = potential.predict(structures, samples="auto", tolerance=0.15, batch_size=2, seed=3)
    again = potential.predict(structures, samples="auto", tolerance=0.15, batch_size=2, seed=3)
    np.testing.assert_array_equal(found.forces_std, again.forces_std)
    batches = [
        potential.predict(part, samples="auto", tolerance=0.15, seed=3)
        for part in (structures[:2], structures[2:])
    ]
    assert found.samples == max(batch.samples for batch in batches)
    for name, error in found.details["std_relative_error"].items():
        assert error == max(batch.details["std_relative_error"][name] for batch in batches) <= 0.15
    for batch, part, start in zip(batches, (structures[:2], structures[2:]), (0, 7), strict=True):
        fixed = potential.predict(part, samples=batch.samples, seed=3)
        expected = found.forces_std[start : start + len(fixed.forces_std)]
        np.testing.assert_allclose(fixed.forces_std, expected, rtol=1e-3)


def test_other_words_for_samples_are_refused(potential):
    with pytest.raises(InputError, match="between 0 and 1"):
        potential.predict(molecule("H2O"), samples="auto", tolerance=0.0)
    with pytest.raises(InputError, match='"auto"'):
        potential.predict(molecule("H2O"), samples="many")
