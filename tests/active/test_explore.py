"""Exploration by dynamics: temperatures, pressure, members or the mean; retraining either way."""

import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from campaigns import tiny_campaign

import blips
from blips.active import load_campaign, run_campaign
from blips.active.frames import from_json, to_json
from blips.active.worker import walk
from blips.backbones import PaiNN
from blips.errors import InputError


@pytest.fixture(scope="module")
def walk_of(tmp_path_factory):
    """Frames of a short trajectory with a small model of random weights."""
    return walker_with(small_model(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def conditioned_walk_of(tmp_path_factory):
    """The same with a model whose posterior has seen three structures, and fits none of them."""
    structures = [molecule("NH3") for _ in range(6)]
    for seed, atoms in enumerate(structures):
        atoms.rattle(0.05, seed=seed)
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        atoms.calc = SinglePointCalculator(atoms, **results)
    model = small_model()
    model.condition(structures[:3], valid=structures[3:])
    return walker_with(model, tmp_path_factory.mktemp("conditioned"))


def small_model():
    torch.manual_seed(0)
    return blips.bayesianize(PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4), seed=0)


def walker_with(model, folder):
    path = blips.save(model, folder / "model.safetensors")

    def make(
        start,
        temperature=300.0,
        pressure=None,
        walker=0,
        seed=0,
        typical_force=1.0,
        largest_std=None,
        soft=False,
        **explore,
    ):
        explore |= {"temperatures": [temperature], "pressure": pressure}
        config = load_campaign(
            {"initial": {"structures": "start.xyz"}, "seed": seed},
            {"explore": {"steps": 20, "every": 10, **explore}},
            {"limits": {"force_std": "auto" if soft else largest_std}},
        )
        frames = walk(
            (walker, to_json(start)),
            model=path,
            config=config,
            round=1,
            largest_std=largest_std,
            typical_force=typical_force,
        )
        return [(from_json(text), origin) for text, origin in frames]

    return make


def test_members_and_the_mean_go_different_ways(walk_of):
    """Without noise of the temperature, which the walker's number determines, too."""
    ends, cold = {}, {"temperature": 1e-12}
    for name, potential, walker in (
        ("mean", "mean", 0),
        ("mean again", "mean", 1),
        ("member 0", "member", 0),
        ("member 1", "member", 1),
        ("member 1 again", "member", 1),
    ):
        frames = walk_of(molecule("NH3"), potential=potential, walker=walker, **cold)
        assert [origin["step"] for _, origin in frames] == [0, 10, 20]
        ends[name] = frames[-1][0].positions
    assert np.abs(ends["mean"] - ends["mean again"]).max() < 1e-7  # the number names the member
    assert np.array_equal(ends["member 1"], ends["member 1 again"])
    for first, second in (("mean", "member 0"), ("member 0", "member 1")):
        assert np.abs(ends[first] - ends[second]).max() > 1e-6


def test_wild_members_are_brought_near_the_mean(conditioned_walk_of):
    """A member of a posterior that knows little moves atoms by as much as labels' forces would."""
    start = molecule("NH3")
    start.rattle(0.05, seed=1)
    moved = {}
    short = {"steps": 2, "every": 2}
    mean = conditioned_walk_of(start, **short)[-1][0]
    for limit in (1e9, 0.1, 1e-4):
        end = conditioned_walk_of(start, potential="member", typical_force=limit, **short)[-1][0]
        moved[limit] = np.abs(end.positions - mean.positions).max()
    assert moved[1e9] > 10 * moved[0.1]
    assert moved[0.1] == pytest.approx(1e3 * moved[1e-4], rel=0.1)


def test_a_trajectory_that_a_guard_ends_begins_anew(conditioned_walk_of):
    """With an automatic limit every trajectory leaves its start; a given one is kept to."""
    start = molecule("NH3")
    frames = conditioned_walk_of(
        start, temperature=3000.0, largest_std=1e-9, soft=True, steps=60, every=5
    )
    ended = [origin["step"] for _, origin in frames if "guard" in origin]
    assert ended
    assert ended[0] < 60
    steps = [origin["step"] for _, origin in frames]
    assert steps == list(range(0, 61, 5))
    after = [np.abs(atoms.positions - start.positions).max() for atoms, _ in frames]
    restarted = steps.index(ended[0]) + 1
    assert after[restarted] < after[restarted - 1]  # near the start again
    strict = conditioned_walk_of(start, largest_std=1e-9, steps=60, every=5)
    assert [origin["step"] for _, origin in strict] == [0]


def test_pressure_changes_the_cell(walk_of):
    start = bulk("Cu", cubic=True)
    start.rattle(0.05, seed=0)
    volumes = {}
    for pressure in (None, 0.0, 50.0):
        frames = walk_of(start, pressure=pressure)
        volumes[pressure] = frames[-1][0].get_volume()
    assert volumes[None] == start.get_volume()  # constant volume
    assert volumes[50.0] < volumes[0.0]
    assert volumes[0.0] != start.get_volume()
    with pytest.raises(InputError, match="for periodic structures"):
        walk_of(molecule("NH3"), pressure=1.0)


def test_temperature_spreads_the_frames(walk_of):
    def spread(temperature):
        moved = walk_of(molecule("NH3"), temperature=temperature)[-1][0].positions
        return np.abs(moved - molecule("NH3").positions).max()

    assert spread(2000.0) > 1.5 * spread(20.0)


def test_a_campaign_explores_crystals_under_pressure(tmp_path):
    config = tiny_campaign(tmp_path, explore={"pressure": [0.0, 9.0]}, stop={"rounds": 1})
    config["explore"] |= {"temperatures": [300.0], "walkers": 2}
    explore = load_campaign(config).explore
    assert [explore.conditions(walker) for walker in range(3)] == [
        (300.0, 0.0),
        (300.0, 9.0),
        (300.0, 0.0),
    ]
    ase.io.write(config["initial"]["structures"], bulk("Cu", cubic=True))
    summary = run_campaign(load_campaign(config), display=False)
    picks = [pick for pick in summary["picks"] if pick["round"] == 1]
    assert len(picks) == 3
    assert {pick["reason"]["origin"]["pressure"] for pick in picks} <= {0.0, 9.0}
    start = bulk("Cu", cubic=True).get_volume()
    moved = [pick for pick in picks if pick["reason"]["origin"]["step"] > 0]
    assert all(pick["atoms"].get_volume() != start for pick in moved)


def parameters(path):
    return torch.cat([value.flatten() for value in blips.load(path).parameters()])


def test_fine_tuning_begins_where_the_last_round_ended(tmp_path):
    """With a vanishing learning rate a model stays what it began as."""
    weights = {}
    for retrain in ("scratch", "continue"):
        config = tiny_campaign(
            tmp_path / retrain, training={"lr": 1e-12, "epochs": 1}, stop={"rounds": 1}
        )
        config |= {"retrain": retrain, "reference_energies": "none"}
        if retrain == "continue":  # the first round's model is a trained one
            config["training"]["lr"] = 1e-2
        run_campaign(load_campaign(config), display=False)
        models = tmp_path / retrain / "campaign" / "models"
        weights[retrain] = [
            parameters(models / name / "model.safetensors") for name in ("round-0001", "round-0002")
        ]
    assert torch.allclose(*weights["scratch"], atol=1e-8)
    first, second = weights["continue"]
    fresh = weights["scratch"][0]
    assert not torch.allclose(first, fresh, atol=1e-4)
    assert (second - first).norm() < (second - fresh).norm()
