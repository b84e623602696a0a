"""Benchmarks and the study of fast error bars, small."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from ase.build import molecule
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

import blips
from blips.backbones import PaiNN
from blips.experiments import (
    bench,
    bench_flops,
    bench_measure,
    bench_memory,
    bench_peers,
    bench_report,
    fast,
    fast_data,
    fast_models,
    fast_reference,
)
from blips.experiments.bench_report import bench as run_bench
from blips.prediction import Prediction
from helpers import TINY


def test_ratios_are_medians_within_a_repeat():
    measured = bench_measure.Measured({"base": [1.0, 2.0, 1.0], "x": [2.0, 4.0, 9.0]}, {})
    assert measured.ratio("x") == 2.0
    assert measured.shortest("x") == 2.0
    assert measured.interval("x") is None


@given(values=st.lists(st.floats(0.5, 2.0), min_size=6, max_size=60))
def test_the_interval_of_a_median_holds_it(values):
    low, high = bench_measure.median_interval(values)
    assert low <= np.median(values) <= high


@pytest.mark.statistical
@pytest.mark.parametrize("count", [6, 15, 40])
def test_the_interval_of_a_median_holds_the_truth_as_often_as_it_says(count):
    draws = np.random.default_rng(count).exponential(size=(4000, count))
    intervals = np.array([bench_measure.median_interval(row) for row in draws])
    held = np.mean((intervals[:, 0] <= np.log(2)) & (np.log(2) <= intervals[:, 1]))
    k = int(binom.ppf(0.025, count, 0.5))
    assert held == pytest.approx(1 - 2 * binom.cdf(k - 1, count, 0.5), abs=0.015)
    assert held > 0.94


def test_peak_memory_sees_what_a_call_needs():
    found = bench_measure.peak_bytes(lambda: torch.ones(2**22) + 1.0)
    if found is None:
        pytest.skip("no /proc")
    assert 2 * 2**24 * 0.9 < found < 6 * 2**24


def test_flops_of_a_product():
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    c = torch.zeros(3, 7)
    assert bench_flops.flops_of(lambda: a @ b) == 2 * 3 * 5 * 7
    assert bench_flops.flops_of(lambda: c.addmm_(a, b)) == 2 * 3 * 5 * 7


def test_a_posterior_adds_parameters_and_operations():
    torch.manual_seed(0)
    found = bench_flops.count(PaiNN(**TINY), atoms=36)
    base, blip, four = found.values()
    assert base["inference"] < blip["inference"]
    assert base["parameters"] < blip["parameters"]
    assert four["training"] == pytest.approx(4 * base["training"], rel=1e-2)
    assert "4-fold ensemble" in bench_flops.flops_table({"painn": found})


def test_every_way_is_measured_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PaiNN", lambda: PaiNN(**TINY))
    said: list[str] = []
    run_bench(tmp_path, parts=["cost"], sizes=[4], samples=[2], repeats=2, report=said.append)
    run_bench(tmp_path, parts=["peers"], repeats=1, report=said.append)
    content = json.loads((tmp_path / "bench.json").read_text())
    rows = content["cost"]["results"]["4"]
    assert {"base", "map", "mc loop 2", "mc batched 2", "llpr", "llpr energy"} <= rows.keys()
    assert rows["base"]["ratio"] == 1.0
    assert "blips flipout" in content["peers"]["results"]
    assert "commit" in content["cost"]["where"]
    assert (tmp_path / "bench.png").stat().st_size > 1000
    assert "onepass energy" in (tmp_path / "bench.md").read_text()


def test_slow_ways_are_measured_once(monkeypatch):
    monkeypatch.setattr(bench_measure, "ENOUGH_SECONDS", 0.02)

    def slow() -> None:
        start = time.process_time()
        while time.process_time() - start < 0.03:
            pass

    measured = bench_measure.measure({"base": lambda: None, "slow": slow}, repeats=3)
    assert len(measured.seconds["slow"]) == 1
    assert measured.seconds["slow"][0] >= 0.03
    assert measured.rows()["slow"]["repeats"] == 1


def test_samples_keep_to_the_memory_bound(monkeypatch):
    monkeypatch.setattr(bench_memory, "LIMITS", {36: (0.15, 0.6)})
    found = bench_memory.memory(samples=16, repeats=1)["36"]
    tight, wide = found["0.15"], found["0.6"]
    assert tight["samples_at_once"] < wide["samples_at_once"]
    assert "| 36 | 16 | 150 |" in bench_memory.memory_table({"36": found})
    if tight["peak_megabytes"] is None:
        pytest.skip("no /proc")
    assert tight["peak_megabytes"] < 150
    assert wide["peak_megabytes"] < 600


def test_no_two_lines_look_the_same():
    styles = [tuple(bench_report.style(number).values()) for number in range(40)]
    assert len(set(styles)) == 40


def test_peers_have_the_same_shapes():
    net = bench_peers.network(torch.nn.Linear)
    assert net(torch.randn(4, 128)).shape == (4, 1)


def test_comparison_of_deviations():
    def made(factor: float) -> Prediction:
        sigma = factor * np.arange(1.0, 5.0)
        return Prediction(
            n_atoms=np.ones(4, dtype=int),
            method="x",
            samples=2,
            energy_std=sigma,
            forces_std=np.repeat(sigma[:, None], 3, axis=1),
        )

    found = fast.compare(made(0.5), made(1.0))
    assert found["energy_spearman"] == found["atoms_spearman"] == 1.0
    assert found["forces_ratio"] == 0.5
    assert found["energy_scatter"] == found["forces_scatter"] == 0.0
    uneven = replace(made(1.0), energy_std=np.exp([1.0, -1.0, 1.0, -1.0]) * np.arange(1.0, 5.0))
    assert fast.compare(uneven, made(1.0))["energy_scatter"] == 1.0


def tiny_study(monkeypatch) -> blips.BayesianPotential:
    """A study of one small model of its own, on NH3."""
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**TINY), initial=0.01)
    some = [fast_data.displaced(molecule("NH3"), 0.1, k) for k in range(4)]
    cases = [fast_data.Case("nh3" if k else "other", k, atoms) for k, atoms in enumerate(some)]
    sets = fast_data.Sets(some, cases[:3], cases[1:])
    subject = fast_models.Subject(lambda _folder, _seed: potential, lambda _: sets)
    monkeypatch.setattr(fast, "SUBJECTS", {"tiny (random)": subject})
    monkeypatch.setattr(fast, "FEW", (4,))
    return potential


def test_the_study_compares_all_ways(tmp_path, monkeypatch):
    potential = tiny_study(monkeypatch)
    options = {"runs": tmp_path / "runs", "report": lambda _: None}
    found = fast.study(tmp_path, samples=8, **options)
    again = fast.study(tmp_path, samples=99, **options)  # from its file
    assert next(iter(again.values()))["samples"] == 8
    rows = found["tiny (random)"]["sets"]["near"]
    assert {"onepass", "mc4", "probes3", "halves", "ceiling"} <= rows.keys()
    assert rows["onepass"]["kinds"].keys() == {"other", "nh3"}
    assert "energy_ratio" in rows["onepass"]
    assert "| tiny (random) | 8 | near | nh3 | onepass |" in (tmp_path / "table.md").read_text()
    assert "coefficients" not in vars(potential)  # the probes' are gone again


def test_a_study_that_was_stopped_draws_no_sample_twice(tmp_path, monkeypatch):
    tiny_study(monkeypatch)
    options = {"samples": 8, "runs": tmp_path / "runs", "report": lambda _: None}
    first = fast.study(tmp_path / "a", **options)
    drawn = sorted((tmp_path / "runs").rglob("*.npz"))
    assert len(drawn) == 6
    times = [path.stat().st_mtime_ns for path in drawn]
    second = fast.study(tmp_path / "b", **options)
    assert [path.stat().st_mtime_ns for path in drawn] == times
    assert second["tiny (random)"]["sets"] == first["tiny (random)"]["sets"]
    assert fast.study(tmp_path / "c", only=["other"], **options) == {}


def test_every_seed_has_a_model_and_samples_of_its_own(tmp_path, monkeypatch):
    potential = tiny_study(monkeypatch)
    asked: list[tuple[str, int]] = []
    (subject,) = fast.SUBJECTS.values()

    def make(folder, seed):
        asked.append((folder.name, seed))
        return potential

    monkeypatch.setattr(fast, "SUBJECTS", {"tiny (random)": subject._replace(make=make)})
    options = {"samples": 8, "runs": tmp_path / "runs", "report": lambda _: None}
    found = fast.study(tmp_path, seeds=(0, 3), **options)
    assert asked == [("runs", 0), ("seed-3", 3)]
    assert list(found) == ["tiny (random)", "tiny-seed-3 (random)"]
    assert (tmp_path / "tiny-seed-3.json").exists()
    assert len(list((tmp_path / "runs/seed-3/tiny/near").iterdir())) == 3


def test_both_halves_together_are_the_moments_of_all_samples():
    rng = np.random.default_rng(0)
    energy, forces = rng.normal(size=(10, 1)), rng.normal(size=(10, 4, 3))

    def moments(part: slice) -> Prediction:
        return Prediction(
            n_atoms=np.array([4]),
            method="mc",
            samples=len(energy[part]),
            energy=energy[part].mean(axis=0),
            energy_std=energy[part].std(axis=0, ddof=1),
            forces=forces[part].mean(axis=0),
            forces_std=forces[part].std(axis=0, ddof=1),
        )

    whole = fast_reference.Reference.of(moments(slice(5)), moments(slice(5, None))).whole
    expected = moments(slice(None))
    for name in ("energy", "energy_std", "forces", "forces_std"):
        np.testing.assert_allclose(whole.array(name), expected.array(name))
    assert whole.samples == 10


@pytest.mark.statistical
def test_the_ceiling_is_what_the_truth_reaches():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=4000)
    halves = truth + 0.5 * rng.normal(size=(2, 4000))
    between = fast._rho(*halves)
    assert fast._rho(truth, halves.mean(axis=0)) == pytest.approx(
        fast_reference.ceiling(between), abs=0.01
    )
    assert fast_reference.ceiling(-0.2) == 0.0


def test_structures_of_the_study_are_distinct(monkeypatch):
    monkeypatch.delenv("BLIPS_DATA", raising=False)
    sets = fast_data.mixed_sets(fast_data.Counts(molecules=3, crystals=2))
    assert [case.kind for case in sets.near] == ["nh3"] * 3 + ["quartz"] * 2
    everything = [*sets.lessons, *(c.atoms for c in sets.near), *(c.atoms for c in sets.far)]
    assert len({a.positions.tobytes() for a in everything}) == len(everything) == 4 + 2 + 5 + 5
    assert all(atoms.calc is None for atoms in everything)
