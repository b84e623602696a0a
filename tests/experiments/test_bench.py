"""Benchmarks and the study of fast error bars, small."""

import json

import numpy as np
import pytest
import torch
from ase.build import molecule

import blips
from blips.backbones import PaiNN
from blips.experiments import bench, bench_flops, bench_peers, fast
from blips.experiments.bench_report import bench as run_bench
from blips.predict import Prediction
from helpers import TINY


def test_ratios_are_medians_within_a_repeat():
    measured = bench.Measured({"base": [1.0, 2.0, 1.0], "x": [2.0, 4.0, 9.0]}, {})
    assert measured.ratio("x") == 2.0
    assert measured.shortest("x") == 2.0


def test_peak_memory_sees_what_a_call_needs():
    found = bench.peak_bytes(lambda: torch.ones(2**22) + 1.0)
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
    assert {"base", "map", "mc loop 2", "mc batched 2", "llpr", "deep ensemble 4"} <= rows.keys()
    assert rows["base"]["ratio"] == 1.0
    assert "blips flipout" in content["peers"]["results"]
    assert "commit" in content["cost"]["where"]
    assert (tmp_path / "bench.png").stat().st_size > 1000
    assert "onepass energy + forces" in (tmp_path / "bench.md").read_text()


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


def test_the_study_compares_all_ways(tmp_path, monkeypatch):
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**TINY), initial=0.01)
    some = [fast.displaced(molecule("NH3"), 0.1, k) for k in range(4)]
    subject = fast.Subject(lambda _: potential, lambda _: fast.Sets(some, some[:3], some[1:]))
    monkeypatch.setattr(fast, "SUBJECTS", {"tiny": subject})
    monkeypatch.setattr(fast, "FEW", (4,))
    found = fast.study(tmp_path, samples=8, report=lambda _: None)
    again = fast.study(tmp_path, samples=99, report=lambda _: None)  # from its file
    assert again["tiny"]["samples"] == found["tiny"]["samples"] == 8
    rows = found["tiny"]["sets"]["near"]
    assert {"onepass", "mc4", "probes3"} <= rows.keys()
    assert "forces_ratio" in rows["onepass"]
    assert "| tiny | 8 | far | onepass |" in (tmp_path / "table.md").read_text()
    assert "coefficients" not in vars(potential)  # the probes' are gone again
