"""The bundle: its numbers are the metrics' numbers, its intervals sound, its output JSON."""

import json

import numpy as np
import pytest
import scoringrules
from scipy import stats
from scipy.special import ndtri

from blips.errors import InputError
from blips.prediction import Prediction
from blips.uq import metrics
from blips.uq.assess import References, assess
from blips.uq.bootstrap import Bootstrap
from blips.uq.metrics import auroc, force_items, rejection_curve, spearman

LEVELS = ("energy", "energy_per_atom", "forces", "forces_per_atom", "forces_per_structure")


def data(n_structures=40, seed=0, overconfidence=1.0):
    rng = np.random.default_rng(seed)
    n_atoms = rng.integers(2, 7, n_structures)
    total = n_atoms.sum()
    energy_std = np.exp(rng.normal(-2, 0.5, n_structures))
    forces_std = np.exp(rng.normal(-2, 0.5, (total, 3)))
    energy, forces = rng.normal(size=n_structures), rng.normal(size=(total, 3))
    return {
        "energy": energy,
        "energy_std": energy_std / overconfidence,
        "energy_ref": energy + energy_std * rng.normal(size=n_structures),
        "forces": forces,
        "forces_std": forces_std / overconfidence,
        "forces_ref": forces + forces_std * rng.normal(size=(total, 3)),
        "n_atoms": n_atoms,
        "numbers": rng.choice([1, 7, 8], total),
    }


def evaluate(n_bootstrap=0, seed=0, **d):
    """Judge arrays as `data` makes them."""
    predicted = {name: d.get(name) for name in ("energy", "energy_std", "forces", "forces_std")}
    labels = {name: d.get(f"{name}_ref") for name in ("energy", "forces")}
    prediction = Prediction(d["n_atoms"], "mc", 8, **predicted)
    references = References(d["n_atoms"], d["numbers"], **labels)
    return assess(prediction, references, n_bootstrap=n_bootstrap, seed=seed)


def mae(mean, target):
    return np.abs(target - mean).mean()


def nll(mean, std, target):
    scores = -stats.norm.logpdf(target, mean, std)
    return (scores.sum(axis=-1) if scores.ndim > 1 else scores).mean()


def crps(mean, std, target):
    return scoringrules.crps_normal(target, mean, std).mean()


def zms(mean, std, target):
    return np.mean(((target - mean) / std) ** 2)


def test_values_are_those_of_the_metrics():
    d = data()
    found = evaluate(**d, n_bootstrap=0)
    energy = d["energy"], d["energy_std"], d["energy_ref"]
    forces = d["forces"], d["forces_std"], d["forces_ref"]
    scaled = tuple(array / d["n_atoms"] for array in energy)
    for table, arrays in (
        (found.energy, energy),
        (found.energy_per_atom, scaled),
        (found.forces, forces),
    ):
        expected = {
            "mae": mae(*arrays[::2]),
            "mse": np.mean((arrays[0] - arrays[2]) ** 2),
            "rmse": np.sqrt(np.mean((arrays[0] - arrays[2]) ** 2)),
            "nll": nll(*arrays),
            "crps": crps(*arrays),
            "ece": metrics.ece(*arrays),
            "ence": metrics.ence(*arrays),
            "zms": zms(*arrays),
            "rms_std": np.sqrt(np.mean(arrays[1] ** 2)),
        }
        for level in (68, 90, 95):
            expected[f"coverage_{level}"] = metrics.coverage(*arrays, level / 100)
        assert {name: table[name].value for name in expected} == pytest.approx(expected)
    assert found.forces["nll_component"].value == pytest.approx(nll(*forces) / 3)
    assert found.forces["crps_sum"].value == pytest.approx(3 * crps(*forces))


def test_ranking_values_are_those_of_the_metrics():
    d = data()
    found = evaluate(**d, n_bootstrap=0)
    forces = d["forces"], d["forces_std"], d["forces_ref"]
    atoms = force_items(*forces)
    structures = force_items(*forces, d["n_atoms"])
    error = np.abs(d["energy"] - d["energy_ref"])
    for table, std, norm, force in (
        (found.energy, d["energy_std"], error, None),
        (found.energy_per_atom, d["energy_std"] / d["n_atoms"], error / d["n_atoms"], None),
        (found.forces_per_atom, atoms.std, atoms.error, atoms.norm),
        (found.forces_per_structure, structures.std, structures.error, structures.norm),
    ):
        curve = rejection_curve(std, norm)
        expected = {
            "spearman": spearman(std, norm),
            "auroc": auroc(std, norm, float(np.quantile(norm, 0.9))),
            "rejection_auc": curve.auc,
            "rejection_auc_normalised": curve.auc_normalised,
        }
        assert ("spearman_force" in table) == (force is not None)
        if force is not None:
            expected["spearman_force"] = spearman(force, norm)
            expected["spearman_given_force"] = metrics.partial_correlation(
                spearman(std, norm), spearman(std, force), spearman(norm, force)
            )
        assert {name: table[name].value for name in expected} == pytest.approx(expected)
    ece = metrics.ece(structures.norm, structures.std, structures.norm_ref)
    assert found.forces_per_structure["ece"].value == pytest.approx(ece)


def test_intervals_are_those_of_the_general_bootstrap():
    d = data(n_structures=15)
    found = evaluate(**d, n_bootstrap=40, seed=2)
    groups = np.repeat(np.arange(15), d["n_atoms"])
    arrays = d["forces"], d["forces_std"], d["forces_ref"]
    functions = {"nll": nll, "crps": crps, "zms": zms, "ece": metrics.ece, "ence": metrics.ence}
    for name, function in functions.items():
        (expected,) = Bootstrap(15, 40, seed=2).of(function, *arrays, groups=groups)
        interval = found.forces[name]
        assert (interval.value, interval.low, interval.high) == pytest.approx(
            (expected.value, expected.low, expected.high)
        )


def test_elements_are_evaluated_apart():
    d = data()
    found = evaluate(**d, n_bootstrap=20)
    assert list(found.per_element) == ["H", "N", "O"]
    assert sum(found.element_counts.values()) == found.n_atoms == len(d["numbers"])
    for symbol, number in (("H", 1), ("N", 7), ("O", 8)):
        chosen = d["numbers"] == number
        expected = mae(d["forces"][chosen], d["forces_ref"][chosen])
        assert found.per_element[symbol]["mae"].value == pytest.approx(expected)
        ece = metrics.ece(*(d[key][chosen] for key in ("forces", "forces_std", "forces_ref")))
        assert found.per_element[symbol]["ece"].value == pytest.approx(ece)


def test_an_element_in_one_structure_only_has_an_interval_without_nan():
    d = data(n_structures=10)
    d["numbers"][:] = 1
    d["numbers"][0] = 92
    found = evaluate(**d, n_bootstrap=50)
    interval = found.per_element["U"]["mae"]
    assert interval.low == pytest.approx(interval.value) == pytest.approx(interval.high)


def test_deterministic_models_have_errors_only():
    d = data() | {"energy_std": None, "forces_std": None}
    found = evaluate(**d, n_bootstrap=10)
    for table in (found.energy, found.energy_per_atom, found.forces, found.per_element["N"]):
        assert set(table) == {"mae", "rmse", "mse"}
    assert found.forces_per_atom == found.forces_per_structure == {}


def test_energies_or_forces_may_be_missing():
    d = data()
    no_forces = evaluate(**(d | {"forces_ref": None}))
    assert no_forces.forces == {}
    assert "spearman" in no_forces.energy
    no_energy = evaluate(**(d | {"energy": None}))
    assert no_energy.energy == {}
    assert "ece" in no_energy.forces


def test_output_is_json_and_rows():
    found = evaluate(**data(n_structures=25), n_bootstrap=20, seed=4)
    saved = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert saved["forces"]["mae"]["value"] == found.forces["mae"].value
    assert saved["n_structures"] == 25
    assert saved["seed"] == 4
    rows = found.rows()
    units = {(level, metric): unit for level, metric, unit in rows}
    assert len(units) == len(rows)
    assert {level for level, _ in units} == {*LEVELS, "forces[H]", "forces[N]", "forces[O]"}
    assert units["forces", "mae"] == "eV/A"
    assert units["forces", "mse"] == "(eV/A)^2"
    assert units["energy_per_atom", "rmse"] == "eV/atom"
    assert units["energy", "nll"] == "nats"
    assert units["forces", "ece"] == ""
    interval = rows["forces", "mae", "eV/A"]
    assert interval.low < interval.value < interval.high


def test_seed_decides():
    d = data(n_structures=10)
    first, again = (evaluate(**d, n_bootstrap=10, seed=1) for _ in range(2))
    assert first == again
    assert first.forces["mae"].low != evaluate(**d, n_bootstrap=10, seed=2).forces["mae"].low


def test_a_target_on_the_edge_of_its_interval_is_covered():
    edge = ndtri(0.95)
    energies = {
        "energy": np.zeros(2),
        "energy_std": np.ones(2),
        "energy_ref": edge * np.array([1, -1]),
    }
    found = evaluate(**energies, n_atoms=np.ones(2, int), numbers=np.ones(2, int))
    assert found.energy["coverage_90"].value == 1.0


def test_overconfidence_shows():
    calibrated = evaluate(**data(n_structures=200), n_bootstrap=0).forces
    overconfident = evaluate(**data(n_structures=200, overconfidence=3.0), n_bootstrap=0).forces
    assert calibrated["ece"].value < 0.02
    assert overconfident["ece"].value > 0.1
    assert overconfident["zms"].value == pytest.approx(9 * calibrated["zms"].value)
    assert overconfident["nll"].value > calibrated["nll"].value


@pytest.mark.parametrize("n_structures", [1, 2, 5])
def test_few_structures_omit_what_they_cannot_tell(n_structures):
    found = evaluate(**data(n_structures=n_structures), n_bootstrap=10)
    json.dumps(found.to_dict(), allow_nan=False)
    assert "ence" not in found.energy
    if n_structures == 1:
        assert found.n_bootstrap == 0
        assert found.forces["mae"].low is None
    if n_structures < 3:
        assert "spearman" not in found.energy


def test_bad_input_is_refused():
    d = data()
    bad = {
        "energy": (d["energy"] * np.inf, "energy has 40 of 40 values"),
        "forces_ref": (np.where(d["forces"] == d["forces"][0, 0], np.inf, 0.0), "labels has 1 of"),
        "forces_std": (d["forces_std"] * np.inf, "forces_std"),
        "n_bootstrap": (-1, "n_resamples"),
    }
    for key, (value, message) in bad.items():
        with pytest.raises(InputError, match=message):
            evaluate(**(d | {key: value}))
    other = Prediction(d["n_atoms"][::-1], "mc", 8, energy=d["energy"])
    references = References(d["n_atoms"], d["numbers"], d["energy_ref"], None)
    with pytest.raises(InputError, match="not of the same structures"):
        assess(other, references)
