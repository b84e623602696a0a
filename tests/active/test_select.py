"""From scores to a batch, against the rules applied to all candidates at once."""

import copy

import ase.io
import numpy as np
import pytest
import torch
from ase.build import molecule
from campaigns import tiny_campaign
from numpy.testing import assert_allclose

import blips
from blips.active import load_campaign
from blips.active.candidates import Pool
from blips.active.evidence import candidate_rows
from blips.active.executor import InlineExecutor
from blips.active.rules import best, greedy, random_score, target_rows
from blips.active.select import Screening, choose, predicted_std, screen_candidates
from blips.active.store import CampaignStore, Pick
from blips.backbones import PaiNN
from blips.inference.rows import collect, components, force_rows
from helpers import TINY, morse_ammonia


@pytest.fixture(scope="module")
def potential():
    torch.manual_seed(0)
    model = blips.bayesianize(PaiNN(**TINY), seed=0)
    model.condition(morse_ammonia(6, seed=0), valid=morse_ammonia(4, seed=1))
    return model


@pytest.fixture
def model(potential, tmp_path):
    return blips.save(potential, tmp_path / "model.safetensors")  # targets are kept beside it


def displaced(count, seed=3):
    rng, names = np.random.default_rng(seed), ["NH3", "NH", "NH3", "H2", "N2"]
    found = [molecule(names[k % len(names)]) for k in range(count)]
    for atoms in found:
        atoms.positions += rng.normal(scale=0.1, size=atoms.positions.shape)
    return found


def batch_of(structures, model, folder, *settings):
    """Picks of a pool and what was kept of its screening."""
    ase.io.write(folder / "pool.extxyz", structures)
    pool = Pool(folder / "pool.extxyz")
    config = load_campaign(tiny_campaign(folder), "limits.force_std=null", *settings)
    with CampaignStore(folder / "campaign") as store:
        executor = InlineExecutor()
        found = screen_candidates(pool, model, config, store, executor, 1, None)
    return choose(pool, found, model, 4), found


@pytest.mark.parametrize(
    "rule", ["information", "expected_reduction", "force_std", "energy_std", "random"]
)
def test_the_batch_is_that_of_the_rule_on_all_candidates(potential, model, tmp_path, rule):
    structures = displaced(10)
    picks, screening = batch_of(
        structures, model, tmp_path, f"select.rule={rule}", "select.cost=0.5", "select.rows=3"
    )
    structures = ase.io.read(tmp_path / "pool.extxyz", ":")
    cost = np.array([len(atoms) for atoms in structures]) ** 0.5
    scores = np.array([dict(screening.rows)[k][rule] for k in range(10)])
    rows = candidate_rows(potential, structures, rows=3)
    of_atoms = rows[:, 0] / np.array([len(atoms) for atoms in structures])[:, None]
    target = target_rows(np.concatenate(rows[:, 1:]), of_atoms)
    expected = {
        "information": lambda: greedy(rule, rows, 4, cost=cost),
        "expected_reduction": lambda: greedy(rule, rows, 4, target=target, cost=cost),
        "force_std": lambda: greedy(rule, rows, 4, std=scores, cost=cost),
        "energy_std": lambda: best(scores / cost, 4),
        "random": lambda: best(scores / cost, 4),
    }[rule]()
    assert [pick.reason["candidate"] for pick in picks] == [index for index, _ in expected]
    assert_allclose([p.reason["gain"] for p in picks], [gain for _, gain in expected], rtol=1e-4)
    assert [pick.score for pick in picks] == [scores[index] for index, _ in expected]
    if rule == "random":
        assert scores.tolist() == [random_score(0, 1, k) for k in range(10)]


@pytest.mark.parametrize("rule", ["random", "force_std", "information"])
def test_equal_candidates_go_by_number_and_none_goes_twice(model, tmp_path, rule):
    """A pool of one geometry many times, and of another: each is labelled once, the first of it."""
    first, _, second = displaced(3)
    pool = [first, first, second, first, second]
    picks, _ = batch_of(pool, model, tmp_path, f"select.rule={rule}", "select.chunk=2")
    numbers = {pick.reason["candidate"] for pick in picks}
    assert len(picks) == 2
    assert rule == "random" or numbers == {0, 2}


@pytest.mark.parametrize("rule", ["information", "random"])
def test_the_predicted_std_is_that_of_the_posterior_which_has_seen_the_picks(
    potential, model, tmp_path, rule
):
    """Conditioned on the picks for real, on all components (12 rows of NH3)."""
    structures = morse_ammonia(9, seed=5)
    settings = (f"select.rule={rule}", "select.rows=12")
    picks, _ = batch_of(structures, model, tmp_path, *settings)
    config = load_campaign(tiny_campaign(tmp_path), *settings)
    before, after = predicted_std(picks, model, config)
    posterior = potential.conditioned()
    linear, scale = potential.linear_model(), posterior.scale
    picked = [pick.atoms for pick in picks]
    whole, *_ = collect(linear, picked, rows=12, seed=0, before=posterior)
    graph = potential.backbone.graph(structures)
    rows = [row for *_, row in force_rows(linear(graph, depth="rows"), components(graph, 12))]
    for evidence, std in ((posterior.evidence, before), (whole, after)):
        of_rows = evidence.spectrum().var(torch.cat(rows), scale.ratio, scale.scale)
        var = float(of_rows.mean()) + scale.floor["forces"] ** 2
        assert_allclose(std, var**0.5, rtol=1e-3)
    assert after < before


@pytest.mark.parametrize(("gap", "closest"), [(0.0, "null"), (1e-30, "null"), (1e-3, "0.5")])
def test_candidates_that_no_model_can_judge_are_no_targets(model, tmp_path, gap, closest):
    """Atoms on top of each other: no rows, rows that are not finite, or beyond all others."""
    torn = molecule("NH3")
    torn.positions[:2] = [[0.0, 0.0, 0.0], [gap, 0.0, 0.0]]
    stds = []
    for name, pool in (("some", [*displaced(6), torn]), ("none", displaced(6))):
        (tmp_path / name).mkdir()
        settings = ("select.rule=information", f"limits.closest={closest}")
        picks, _ = batch_of(pool, model, tmp_path / name, *settings)
        stds.append(predicted_std(picks, model, load_campaign(tiny_campaign(tmp_path / name))))
    assert stds[0] == pytest.approx(stds[1])
    assert 0 < stds[0][1] < stds[0][0]
    (tmp_path / "all").mkdir()
    picks, screening = batch_of([torn] * 3, model, tmp_path / "all", *settings)
    assert picks == []
    assert screening.excluded.total() == 3


def screened(scores, excluded, folder, *settings):
    config = tiny_campaign(folder, select={"rule": "force_std", "batch": 3, "keep": 1})
    found = Screening(load_campaign(config, *settings), 1)
    rows = [s and {"force_std": s, "mean_std": s, "atoms": 4.0} for s in scores]
    found.add(zip(range(5, 5 + len(rows)), rows, excluded, strict=True))
    return found


def test_a_model_that_knows_little_asks_for_its_neighbourhood(tmp_path):
    """Beyond the automatic limit the least uncertain come first; within it the most uncertain."""
    scores, excluded = (1.0, 9.0, 7.0, 2.0), [None, "force_std", "force_std", None]
    found = screened(scores, excluded, tmp_path)
    assert [number for number, _ in found.rows] == [8, 5, 7]
    assert found.excluded == {"force_std": 2}
    assert found.largest["force_std"] == 9.0
    assert found.mean_std == 19.0 / 4
    strict = screened(scores, excluded, tmp_path, "limits.force_std=5")
    assert [number for number, _ in strict.rows] == [8, 5]


def test_what_no_model_can_score_or_another_limit_excludes_is_not_kept(tmp_path):
    excluded = [None, "energy_std", "failed", "closest", None]
    found = screened((1.0, 9.0, None, 7.0, 2.0), excluded, tmp_path)
    assert [number for number, _ in found.rows] == [9, 5]
    assert found.excluded == {"energy_std": 1, "failed": 1, "closest": 1}


def test_as_many_are_kept_as_the_configuration_says(tmp_path):
    scores = [float(k) for k in range(1, 11)]
    found = screened(scores, [None] * 10, tmp_path, "select.keep=2")
    assert [number for number, _ in found.rows] == [14, 13, 12, 11, 10, 9]


def test_what_is_kept_is_weighed_by_its_cost(tmp_path):
    config = tiny_campaign(tmp_path, select={"rule": "force_std", "batch": 1, "keep": 2, "cost": 1})
    found = Screening(load_campaign(config), 1)
    rows = [{"force_std": s, "mean_std": s, "atoms": n} for s, n in ((4, 8), (3, 2), (2, 1))]
    found.add([(number, row, None) for number, row in enumerate(rows)])
    assert [number for number, _ in found.rows] == [2, 1]


@pytest.mark.parametrize(("count", "expected"), [(2, [2, 1]), (3, [2, 1, 3]), (4, [2, 1, 3, 0])])
def test_candidates_beyond_the_limit_fill_the_batch_where_others_do_not(
    model, tmp_path, count, expected
):
    ase.io.write(tmp_path / "pool.extxyz", displaced(4))
    pool = Pool(tmp_path / "pool.extxyz")
    config = load_campaign(tiny_campaign(tmp_path, select={"rule": "energy_std"}))
    found, scores = Screening(config, 1), (9.0, 1.0, 2.0, 7.0)
    rows = [{"energy_std": s, "force_std": s, "mean_std": s, "atoms": 4.0} for s in scores]
    excluded = ["force_std", None, None, "force_std"]
    found.add(zip(range(4), rows, excluded, strict=True))
    picks = choose(pool, found, model, count)
    assert [pick.reason["candidate"] for pick in picks] == expected
    assert [pick.reason["rank"] for pick in picks[2:]] == [-1] * (count - 2)


def test_later_chunks_replace_what_they_are_better_than(tmp_path):
    """Three are kept; of later chunks, only those that beat the worst so far."""
    found = screened((5.0, 6.0, 7.0), [None] * 3, tmp_path)
    rows = [{"force_std": s, "mean_std": s, "atoms": 4.0} for s in (5.5, 1.0)]
    found.add(zip((20, 21), rows, [None] * 2, strict=True))
    assert [number for number, _ in found.rows] == [7, 6, 20]
    assert found.seen == 5
    assert found.mean_std == pytest.approx(24.5 / 5)
    assert screened((5.0,), [None], tmp_path).mean_std == 5.0
    assert Screening(load_campaign(tiny_campaign(tmp_path)), 1).mean_std == 0.0


def test_no_std_is_predicted_without_picks_or_without_evidence(potential, model, tmp_path):
    config = load_campaign(tiny_campaign(tmp_path))
    assert predicted_std([], model, config) == []
    potential = copy.deepcopy(potential)
    potential.posterior = potential.posterior.only_draws(4)
    path = blips.save(potential, tmp_path / "draws.safetensors")
    picks = [Pick(1, 0, molecule("NH3"), 1.0, {})]
    assert predicted_std(picks, path, config) == []
