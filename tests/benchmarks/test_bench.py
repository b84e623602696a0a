"""Benchmarks, small."""

import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from benchmarks import cost, flops, measure, memory, peers, report
from benchmarks.report import bench
from blips.backbones import PaiNN
from helpers import TINY


def test_ratios_are_medians_within_a_repeat():
    measured = measure.Measured({"base": [1.0, 2.0, 1.0], "x": [2.0, 4.0, 9.0]}, {})
    assert measured.ratio("x") == 2.0
    assert measured.shortest("x") == 2.0
    assert measured.interval("x") is None


@given(values=st.lists(st.floats(0.5, 2.0), min_size=6, max_size=60))
def test_the_interval_of_a_median_holds_it(values):
    low, high = measure.median_interval(values)
    assert low <= np.median(values) <= high


@pytest.mark.statistical
@pytest.mark.parametrize("count", [6, 15, 40])
def test_the_interval_of_a_median_holds_the_truth_as_often_as_it_says(count):
    draws = np.random.default_rng(count).exponential(size=(4000, count))
    intervals = np.array([measure.median_interval(row) for row in draws])
    held = np.mean((intervals[:, 0] <= np.log(2)) & (np.log(2) <= intervals[:, 1]))
    k = int(binom.ppf(0.025, count, 0.5))
    assert held == pytest.approx(1 - 2 * binom.cdf(k - 1, count, 0.5), abs=0.015)
    assert held > 0.94


def test_peak_memory_sees_what_a_call_needs():
    found = measure.peak_bytes(lambda: torch.ones(2**22) + 1.0)
    if found is None:
        pytest.skip("no /proc")
    assert 2 * 2**24 * 0.9 < found < 6 * 2**24


def test_flops_of_a_product():
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    c = torch.zeros(3, 7)
    assert flops.flops_of(lambda: a @ b) == 2 * 3 * 5 * 7
    assert flops.flops_of(lambda: c.addmm_(a, b)) == 2 * 3 * 5 * 7


def test_a_posterior_adds_parameters_and_operations():
    torch.manual_seed(0)
    found = flops.count(PaiNN(**TINY), atoms=36)
    base, blip, four = found.values()
    assert base["inference"] < blip["inference"]
    assert base["parameters"] < blip["parameters"]
    assert four["training"] == pytest.approx(4 * base["training"], rel=1e-2)
    assert "4-fold ensemble" in flops.flops_table({"painn": found})


def test_every_way_is_measured_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "PaiNN", lambda: PaiNN(**TINY))
    said: list[str] = []
    bench(tmp_path, parts=["cost"], sizes=[4], samples=[2], repeats=2, report=said.append)
    bench(tmp_path, parts=["peers"], repeats=1, report=said.append)
    content = json.loads((tmp_path / "bench.json").read_text())
    rows = content["cost"]["results"]["4"]
    assert {"base", "map", "mc loop 2", "mc batched 2", "llpr", "llpr energy"} <= rows.keys()
    assert rows["base"]["ratio"] == 1.0
    assert "blips flipout" in content["peers"]["results"]
    assert "commit" in content["cost"]["where"]
    assert (tmp_path / "bench.png").stat().st_size > 1000
    assert "onepass energy" in (tmp_path / "bench.md").read_text()


def test_slow_ways_are_measured_once(monkeypatch):
    monkeypatch.setattr(measure, "ENOUGH_SECONDS", 0.02)

    def slow() -> None:
        start = time.process_time()
        while time.process_time() - start < 0.03:
            pass

    measured = measure.measure({"base": lambda: None, "slow": slow}, repeats=3)
    assert len(measured.seconds["slow"]) == 1
    assert measured.seconds["slow"][0] >= 0.03
    assert measured.rows()["slow"]["repeats"] == 1


def test_samples_keep_to_the_memory_bound(monkeypatch):
    monkeypatch.setattr(memory, "LIMITS", {36: (0.15, 0.6)})
    found = memory.memory(samples=16, repeats=1)["36"]
    tight, wide = found["0.15"], found["0.6"]
    assert tight["samples_at_once"] < wide["samples_at_once"]
    assert "| 36 | 16 | 150 |" in memory.memory_table({"36": found})
    if tight["peak_megabytes"] is None:
        pytest.skip("no /proc")
    assert tight["peak_megabytes"] < 150
    assert wide["peak_megabytes"] < 600


def test_no_two_lines_look_the_same():
    styles = [tuple(report.style(number).values()) for number in range(40)]
    assert len(set(styles)) == 40


def test_peers_have_the_same_shapes():
    net = peers.network(torch.nn.Linear)
    assert net(torch.randn(4, 128)).shape == (4, 1)
