"""Energies per element: closed forms, and coverage on structures that were not there."""

import os
import warnings
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

import blips
from blips.backbones import PaiNN
from blips.backbones.base import graph_batches
from blips.inference.alignment import LEAST_MISFIT, element_counts, fit_alignment
from blips.prediction import Prediction
from blips.train.references import align
from helpers import TINY


def compositions(count: int, elements: int, rng: np.random.Generator) -> np.ndarray:
    """Structures of three elements each, [S, 119]."""
    counts = np.zeros((count, 119))
    for row in counts:
        row[1 + rng.choice(elements, 3, replace=False)] = rng.integers(1, 9, 3)
    return counts


def test_many_structures_give_the_shifts_and_the_misfit():
    rng = np.random.default_rng(0)
    counts, shift = compositions(2000, 20, rng), np.zeros(119)
    shift[1:21] = rng.normal(size=20)
    noise = 0.03 * counts.sum(axis=1) * rng.normal(size=2000)
    found = fit_alignment(counts, counts @ shift + noise)
    std = np.sqrt(np.diag(found.cov))[1:21]
    assert np.abs((found.shift - shift)[1:21] / std).max() < 4
    assert std.max() < 0.02
    assert found.misfit == pytest.approx(0.03, rel=0.2)
    assert found.numbers == tuple(range(1, 21))


def test_the_posterior_of_one_element_is_the_closed_form():
    """One element, exact labels: the shift is known as well as the least misfit allows."""
    counts = np.zeros((3, 119))
    counts[:, 6] = [1, 2, 4]
    found = fit_alignment(counts, counts @ np.full(119, 2.5))
    assert found.shift[6] == pytest.approx(2.5, abs=1e-4)
    assert found.misfit < 10 * LEAST_MISFIT
    assert found.shift[7] == 0.0
    assert found.cov[7, 7] > 1.0  # an element without labels is as unsure as the shifts are large


def test_a_model_that_is_right_stays_as_it_is():
    counts = compositions(50, 30, np.random.default_rng(1))
    found = fit_alignment(counts, np.zeros(50))
    assert np.abs(found.shift).max() == 0.0
    assert np.sqrt(found.cov.diagonal().max()) < 0.02


def test_known_errors_of_the_model_are_no_misfit():
    rng = np.random.default_rng(2)
    counts = compositions(400, 5, rng)
    var = (0.5 * counts.sum(axis=1)) ** 2
    rest = np.sqrt(var) * rng.normal(size=400)
    assert fit_alignment(counts, rest).misfit == pytest.approx(0.5, rel=0.15)
    assert fit_alignment(counts, rest, var).misfit < 0.15


@pytest.mark.statistical
@pytest.mark.parametrize("count", [12, 60])
def test_error_bars_hold_on_structures_that_were_not_there(count):
    """More elements than structures, or not: 90 % intervals of others cover 0.75 to 0.99."""
    covered = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        counts, shift = compositions(count + 100, 33, rng), rng.normal(size=119)
        size = counts.sum(axis=1)
        rest = counts @ shift + 0.05 * size * rng.normal(size=len(counts))
        found = fit_alignment(counts[:count], rest[:count])
        nothing = Prediction(size.astype(int), "mc", 2, energy_std=np.zeros(len(size)))
        std = found.widened(nothing, counts).energy_total_std
        error = rest - counts @ found.shift
        covered.append(np.mean(np.abs(error / std)[count:] < 1.645))
    assert 0.8 < np.mean(covered) < 0.97
    assert min(covered) > 0.6


def salts(model: PaiNN, count: int, seed: int) -> list[Atoms]:
    """Molecules whose labels are the model's energies and 2 eV for each H, -3 eV for each N."""
    rng, frames = np.random.default_rng(seed), []
    for number in range(count):
        symbols = "N" * (1 + number % 2) + "H" * (1 + number % 3)
        atoms = Atoms(symbols, rng.normal(scale=0.1, size=(len(symbols), 3)))
        atoms.positions[:, 0] += np.arange(len(symbols))
        graph = next(graph_batches(model, atoms, 1))
        energy = float(model(graph)["energies"].detach().sum()) + 2.0 * (1 + number % 3)
        energy -= 3.0 * (1 + number % 2)
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=np.zeros((len(atoms), 3)))
        frames.append(atoms)
    return frames


def test_a_potential_keeps_its_alignment_and_applies_it_everywhere(tmp_path):
    torch.manual_seed(0)
    model = PaiNN(**TINY)
    frames = salts(model, 12, seed=0)
    potential = blips.bayesianize(model, initial=1e-4)
    before = potential.predict(frames, method="mc")
    align(potential, frames)
    after = blips.load(blips.save(potential, tmp_path / "m.safetensors")).predict(
        frames, method="mc"
    )
    labels = [atoms.get_potential_energy() for atoms in frames]
    assert np.abs(before.energy - labels).max() > 1.0
    np.testing.assert_array_equal(before.forces, after.forces)
    assert np.abs(potential.predict(frames, method="map").energy - labels).max() < 1e-2
    assert np.abs(potential.draw(1)[0].predict(frames).energy - labels).max() < 1.0
    extra = after.energy_std**2 - before.energy_std**2
    counts = element_counts(frames)
    cov = potential.alignment.cov
    np.testing.assert_allclose(extra, [c @ cov @ c for c in counts], rtol=1e-6, atol=1e-12)
    strange = Atoms("NO", [[0, 0, 0], [0, 0, 1.2]])  # no label has oxygen
    assert potential.predict(strange, method="mc").energy_std[0] > 1.0


def test_too_many_elements_are_told_with_numbers():
    torch.manual_seed(0)
    model = PaiNN(**TINY)
    atoms = salts(model, 1, seed=0)
    with pytest.warns(UserWarning, match="1 labelled structures have 2 elements"):
        align(blips.bayesianize(model), atoms)


@pytest.mark.statistical
@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 100])
def test_energies_of_a_released_model_are_right_on_structures_that_were_not_there(count):
    """Labels of MPtrj lack the corrections that CHGNet was trained with: 0.3 eV/atom apart."""
    pytest.importorskip("chgnet")
    path = Path(os.environ.get("BLIPS_DATA", "absent")) / "mptrj" / "mptrj-random-1k.xyz"
    if not path.is_file():
        pytest.skip(f"no {path}; set BLIPS_DATA")
    frames = [atoms for atoms in ase.io.read(path, ":", format="extxyz") if len(atoms) <= 20]
    order = np.random.default_rng(0).permutation(len(frames))
    inside, others = ([frames[i] for i in part] for part in (order[:count], order[100:140]))
    potential = blips.load("chgnet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of elements that are too many
        align(potential, inside)
    found = potential.predict(others, method="onepass", forces=False)
    error = found.energy - [atoms.get_potential_energy() for atoms in others]
    assert 0.75 <= np.mean(np.abs(error / found.energy_total_std) < 1.645) <= 0.99
    assert np.abs(error / found.n_atoms).mean() < 0.2
