"""Figures: what they draw, that they render, and that they leave no global state."""

import io

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from blips.errors import InputError
from blips.uq import Interval, metrics, plots, rejection_curve


def data(n=300, seed=0):
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=n), np.exp(rng.normal(-2, 0.5, n))
    return mean, std, mean + std * rng.normal(size=n)


def ranked(seed=0):
    mean, std, target = data(seed=seed)
    return std, np.abs(target - mean)


FIGURES = {
    "parity": lambda: plots.plot_parity(*data()),
    "parity without std": lambda: plots.plot_parity(data()[0], None, data()[2]),
    "reliability": lambda: plots.plot_reliability({"a": data(), "b": data(seed=1)}),
    "std": lambda: plots.plot_std_error(*data()),
    "rejection": lambda: plots.plot_rejection({"a": ranked(), "b": ranked(1)}),
    "elements": lambda: plots.plot_elements({"a": {"H": 1.0, "O": Interval(2.0, 1.5, 2.5)}}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_render_with_labelled_axes_and_leave_settings_alone(name):
    before = dict(matplotlib.rcParams)
    figure = FIGURES[name]()
    assert isinstance(figure, Figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert figure.axes[-1].get_xlabel()


def test_units_are_on_the_axes():
    figure = plots.plot_parity(*data(), quantity="energy", unit="meV")
    top, bottom = figure.axes
    assert top.get_ylabel() == "predicted energy (meV)"
    assert bottom.get_xlabel() == "reference energy (meV)"
    assert bottom.get_ylabel() == "error (meV)"
    (axes,) = plots.plot_elements({"a": {"H": 1.0}}, quantity="ZMS", unit="").axes
    assert axes.get_ylabel() == "ZMS"


def test_parity_thins_points_but_not_numbers():
    mean, std, target = data()
    (top, _) = plots.plot_parity(mean, std, target, max_points=50).axes
    (points,) = [c for c in top.collections if hasattr(c, "get_sizes") and len(c.get_sizes())]
    assert len(points.get_offsets()) == 50
    assert f"MAE {metrics.mae(mean, target):.3g}" in top.texts[0].get_text()
    assert "n = 300" in top.texts[0].get_text()


def test_reliability_draws_the_curve_and_its_ece():
    models = {"one": data(), "two": data(seed=1)}
    (axes,) = plots.plot_reliability(models).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    for label, arrays in models.items():
        line = lines[f"{label} (ECE {metrics.ece(*arrays):.3f})"]
        np.testing.assert_allclose(line.get_xydata().T, metrics.reliability_curve(*arrays))
    colours = {line.get_color() for line in axes.get_lines()}
    assert len(colours) == 3


def test_std_figure_draws_bins_and_the_ideal_line():
    arrays = data()
    (axes,) = plots.plot_std_error(*arrays, n_bins=7).axes
    ideal, binned = axes.get_lines()
    np.testing.assert_allclose(binned.get_xydata().T, metrics.binned_errors(*arrays, n_bins=7))
    np.testing.assert_allclose(*ideal.get_xydata().T)
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_rejection_draws_model_random_and_oracle():
    std, error = ranked()
    (axes,) = plots.plot_rejection({"model": (std, error)}).axes
    curve = rejection_curve(std, error)
    model, random, oracle = axes.get_lines()[:3]
    n = len(model.get_xdata())
    assert n == np.count_nonzero(curve.fraction <= 0.99)
    np.testing.assert_allclose(model.get_xdata(), 100 * curve.fraction[:n])
    np.testing.assert_allclose(model.get_ydata(), curve.error[:n])
    np.testing.assert_allclose(oracle.get_ydata(), curve.oracle[:n])
    np.testing.assert_allclose(random.get_ydata(), curve.random)
    assert model.get_label() == f"model (area {curve.auc_normalised:.2f})"


def test_elements_draw_intervals_and_skip_missing_ones():
    models = {"a": {"H": Interval(2.0, 1.5, 3.0), "O": 1.0}, "b": {"O": 4.0}}
    (axes,) = plots.plot_elements(models, ideal=1.0).axes
    assert [patch.get_height() for patch in axes.patches] == [2.0, 1.0, 4.0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["H", "O"]
    whiskers = axes.collections[0].get_segments()[0]
    np.testing.assert_allclose(whiskers[:, 1], [1.5, 3.0])


@pytest.mark.parametrize(
    "figure",
    [
        lambda: plots.plot_parity([1.0], [1.0], [1.0]),
        lambda: plots.plot_reliability({"a": ([1.0], [1.0], [2.0])}),
        lambda: plots.plot_std_error([1.0], [1.0], [2.0], n_bins=1),
        lambda: plots.plot_rejection({"a": ([1.0], [1.0])}),
    ],
)
def test_single_points_can_be_drawn(figure):
    figure().savefig(io.BytesIO(), format="png")


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="non-empty mapping"):
        plots.plot_reliability({})
    with pytest.raises(InputError, match="at most 6"):
        plots.plot_rejection({str(i): ranked() for i in range(7)})
    with pytest.raises(InputError, match="zero or negative"):
        plots.plot_parity([1.0], [0.0], [1.0])
    with pytest.raises(InputError, match="shapes differ"):
        plots.plot_parity([1.0, 2.0], [1.0], [1.0, 2.0])
    with pytest.raises(InputError, match="all errors are zero"):
        plots.plot_std_error([1.0], [1.0], [1.0], n_bins=1)
    with pytest.raises(InputError, match="no element"):
        plots.plot_elements({"a": {}})
