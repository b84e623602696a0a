"""Plots: what they hold, that figures render, and that these leave no global state."""

import io
import json

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from blips.errors import InputError
from blips.prediction import Prediction
from blips.uq import metrics, plots
from blips.uq.assess import References


def data(n=300, seed=0):
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=n), np.exp(rng.normal(-2, 0.5, n))
    return mean, std, mean + std * rng.normal(size=n)


def vectors(seed=0):
    return tuple(array.reshape(100, 3) for array in data(seed=seed))


def curve(series):
    return np.array([series["x"], series["y"]], dtype=float)


PLOTS = {
    "parity": lambda: plots.parity(*data()),
    "parity without std": lambda: plots.parity(data()[0], None, data()[2]),
    "reliability": lambda: plots.reliability({"a": data(), "b": data(seed=1)}),
    "std": lambda: plots.std_error(*data()),
    "rejection": lambda: plots.rejection({"a": vectors(), "b": vectors(1)}),
    "training": lambda: plots.training_plot([{"epoch": e, "valid_loss": 1 / e} for e in (1, 2)]),
}


@pytest.mark.parametrize("name", PLOTS)
def test_plots_go_through_json_and_render_and_leave_settings_alone(name):
    before = dict(matplotlib.rcParams)
    plot = PLOTS[name]()
    saved = json.loads(json.dumps(vars(plot), allow_nan=False))
    assert saved["series"] == plot.series
    figure = plot.figure()
    assert isinstance(figure, Figure)
    figure.savefig(io.BytesIO(), format="png")
    assert dict(matplotlib.rcParams) == before
    (axes,) = figure.axes
    assert axes.get_xlabel() == plot.x["label"]
    assert axes.get_ylabel() == plot.y["label"]
    names = {text.get_text() for text in axes.get_legend().get_texts()}
    assert names >= {series["name"] for series in plot.series}


def test_parity_thins_points_but_not_numbers(monkeypatch):
    monkeypatch.setattr(plots, "MAX_POINTS", 50)
    mean, std, target = data()
    plot = plots.parity(mean, std, target, quantity="energies at 300 K", unit="meV")
    (points,) = plot.series
    assert len(points["x"]) == len(points["y"]) == len(points["std"]) == 50
    assert points["x"][-1] == pytest.approx(target[-1], rel=1e-4)
    assert points["y"][-1] == pytest.approx(mean[-1], rel=1e-4)
    assert points["std"][0] == pytest.approx(std[0], rel=1e-4)
    assert plot.note == f"MAE {np.abs(mean - target).mean():.4g} meV. 50 of 300 are drawn."
    assert plot.what.startswith("Energies at 300 K: ")
    assert plot.y["label"] == "predicted (meV)"


def test_reliability_has_the_curve_and_its_ece():
    models = {"one": data(), "two": data(seed=1)}
    plot = plots.reliability(models)
    for (label, arrays), series in zip(models.items(), plot.series, strict=True):
        assert series["name"] == f"{label} (ECE {metrics.ece(*arrays):.3f})"
        np.testing.assert_allclose(curve(series), metrics.reliability_curve(*arrays), rtol=1e-4)
    (axes,) = plot.figure().axes
    assert len({line.get_color() for line in axes.get_lines()}) == 3


def test_std_plot_has_bins_on_logarithmic_axes():
    arrays = data()
    plot = plots.std_error(*arrays)
    np.testing.assert_allclose(
        curve(plot.series[0]), metrics.binned_errors(*arrays, n_bins=12), rtol=1e-4
    )
    (axes,) = plot.figure().axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    ideal = axes.get_lines()[-1]
    np.testing.assert_allclose(*ideal.get_xydata().T)
    assert [len(plots.std_error(*data(n)).series[0]["x"]) for n in (1, 30, 100, 900)] == [
        1,
        2,
        5,
        12,
    ]


def test_rejection_has_model_oracle_and_random():
    arrays = vectors()
    mean, std, target = arrays
    norms = np.linalg.norm(std, axis=1), np.linalg.norm(target - mean, axis=1)
    expected = metrics.rejection_curve(*norms)
    model, oracle, random = plots.rejection({"model": arrays}).series
    assert model["name"] == "by std"
    assert max(model["x"]) <= 99.0
    for series, values in ((model, expected.error), (oracle, expected.oracle)):
        wanted = np.interp(series["x"], 100 * expected.fraction, values)
        np.testing.assert_allclose(series["y"], wanted, rtol=2e-3)
    assert random["y"] == pytest.approx([expected.random] * 2, rel=1e-4)
    assert len(plots.rejection({"a": arrays, "b": arrays}).series) == 2


def test_points_know_their_structure_where_labels_are_missing():
    rng = np.random.default_rng(0)
    n_atoms = np.array([2, 1, 3])
    forces = rng.normal(size=(6, 3))
    target = forces + 0.1
    target[2] = np.nan  # structure 1 has no forces
    references = References(n_atoms, np.ones(6, int), np.array([1.0, 2.0, np.nan]), target)
    std = np.full((6, 3), 0.1)
    energy = np.array([1.5, 2.0, 3.0])
    prediction = Prediction(n_atoms, "mc", 8, energy=energy, forces=forces, forces_std=std)
    found = plots.prediction_plots({"one": prediction}, references)
    (points,) = found["parity_forces"].series
    assert points["structure"] == [0] * 6 + [2] * 9
    assert points["atom"] == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3 + [2] * 3
    assert points["component"] == [0, 1, 2] * 5
    assert found["parity_energy"].series[0]["structure"] == [0, 1]
    assert found["parity_energy"].series[0]["x"] == [-0.5, 0.5]  # from the mean label
    assert set(found) == {
        "parity_forces", "parity_energy", "reliability", "rejection", "std_error",
    }  # fmt: skip
    unlabelled = References(n_atoms, np.ones(6, int), None, None)
    ((name, alone),) = plots.prediction_plots({"one": prediction}, unlabelled).items()
    assert name == "std_force"
    assert alone.series[0]["atom"] == [0, 1, 0, 0, 1, 2]
    assert alone.series[0]["y"] == pytest.approx([0.1 * 3**0.5] * 6, rel=1e-4)


@pytest.mark.parametrize(
    "plot",
    [
        lambda: plots.parity([1.0], [1.0], [1.0]),
        lambda: plots.reliability({"a": ([1.0], [1.0], [2.0])}),
        lambda: plots.std_error([1.0], [1.0], [2.0]),
        lambda: plots.rejection({"a": (np.ones((1, 3)), np.ones((1, 3)), np.zeros((1, 3)))}),
    ],
)
def test_single_points_can_be_drawn(plot):
    plot().figure().savefig(io.BytesIO(), format="png")


def test_numbers_that_json_cannot_say_are_none():
    assert plots.numbers([1.23456789, np.nan, np.inf]) == [1.2346, None, None]
    assert plots.training_plot([{"epoch": 1.0, "valid_loss": 1.0}]) is None


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="zero or negative"):
        plots.parity([1.0], [0.0], [1.0])
    with pytest.raises(InputError, match="shapes differ"):
        plots.parity([1.0, 2.0], [1.0], [1.0, 2.0])
    with pytest.raises(InputError, match="all errors are zero"):
        plots.std_error([1.0], [1.0], [1.0])
