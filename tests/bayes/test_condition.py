"""The conditioned posterior of a linear model is Bayesian linear regression."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blips.bayes.condition import Evidence, Spectrum, normals
from blips.bayes.sketch import Sketch
from blips.errors import InputError

TAU, NOISE = 1.7, 0.3  # deviations of the prior and of the labels
RATIO = NOISE**2 / TAU**2
FEW_AND_MANY = pytest.mark.parametrize("count", [3, 7, 8, 40], ids=lambda n: f"{n} rows")
D = 8
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def evidence_of(*parts: Tensor, dimension: int = D) -> Evidence:
    evidence = Evidence(dimension)
    for rows in parts:
        evidence.add(rows)
    return evidence


def spectrum_of(rows: Tensor) -> Spectrum:
    return evidence_of(rows, dimension=rows.shape[1]).spectrum()


def var_of(rows: Tensor, wanted: Tensor, ratio: float = RATIO, scale: float = TAU) -> Tensor:
    return spectrum_of(rows).var(wanted, ratio, scale)


def draws_of(rows: Tensor, count: int, seed: int = 0) -> Tensor:
    return TAU * spectrum_of(rows).draws(normals(rows.shape[1], count, seed), RATIO)


def regression_covariance(rows: Tensor, tau: float = TAU, noise: float = NOISE) -> np.ndarray:
    """Covariance of the coefficients of a Bayesian linear regression (Bishop 2006, eq. 3.54)."""
    x = rows.numpy()
    return np.linalg.inv(np.eye(x.shape[1]) / tau**2 + x.T @ x / noise**2)


def regression_variances(rows: Tensor, wanted: Tensor) -> np.ndarray:
    return np.einsum("ni,ij,nj->n", wanted, regression_covariance(rows), wanted)


# ---- Bayesian linear regression ----


@FEW_AND_MANY
def test_variances_are_those_of_linear_regression(count):
    rows, wanted = normal(count, D), normal(5, D, seed=1)
    found = var_of(rows, wanted)
    np.testing.assert_allclose(found, regression_variances(rows, wanted), rtol=1e-10)


def test_variances_are_those_of_a_gaussian_process():
    """The kernel form: k** - k* (K + s^2)^-1 k*, with the prior's covariance as kernel."""
    rows, wanted = normal(5, 50), normal(3, 50, seed=1)
    k = TAU**2 * (rows @ rows.T).numpy() + NOISE**2 * np.eye(5)
    cross = TAU**2 * (wanted @ rows.T).numpy()
    prior = TAU**2 * wanted.square().sum(1).numpy()
    expected = prior - np.einsum("ni,ij,nj->n", cross, np.linalg.inv(k), cross)
    np.testing.assert_allclose(var_of(rows, wanted), expected, rtol=1e-10)


@FEW_AND_MANY
def test_draws_are_normals_times_a_root_of_the_covariance(count):
    rows = normal(count, D)
    root = TAU * spectrum_of(rows).draws(torch.eye(D).double(), RATIO)
    np.testing.assert_allclose(root.T @ root, regression_covariance(rows), rtol=1e-9, atol=1e-12)


@pytest.mark.statistical
@pytest.mark.parametrize("count", [3, 20])
def test_draws_have_the_covariance_of_linear_regression(count):
    """Within 5 standard errors of 8000 draws, in every entry."""
    rows, draws = normal(count, D), 8000
    v = draws_of(rows, draws).numpy()
    expected = regression_covariance(rows)
    wide = np.outer(np.diag(expected), np.diag(expected))
    error = np.sqrt((wide + expected**2) / draws)
    assert (np.abs(v.T @ v / draws - expected) < 5 * error).all()
    assert (np.abs(v.mean(0)) < 5 * np.sqrt(np.diag(expected) / draws)).all()


def test_a_sketch_of_all_dimensions_is_exact():
    """Rows of two matrices through a sketch that has room for them are the rows themselves."""
    sketch = Sketch({"first": (2, 3), "second": (2,)}, dimension=100)
    rows, wanted = normal(5, D), normal(3, D, seed=1)
    split = [{"first": x[:, :6].view(-1, 2, 3), "second": x[:, 6:]} for x in (rows, wanted)]
    scattered = [sketch.scatter(part) for part in split]
    found = var_of(scattered[0], scattered[1])
    np.testing.assert_allclose(found, regression_variances(rows, wanted), rtol=1e-10)


def test_a_sketch_is_the_regression_of_sketched_features():
    sketch = Sketch({"w": (30,)}, dimension=6, seed=2)
    p = sketch.gather(torch.eye(6, dtype=torch.float64))["w"].T  # [30, 6]
    rows, wanted = normal(9, 30), normal(3, 30, seed=1)
    found = var_of(sketch.scatter({"w": rows}), sketch.scatter({"w": wanted}))
    np.testing.assert_allclose(found, regression_variances(rows @ p, wanted @ p), rtol=1e-10)


def test_directions_that_no_row_reaches_keep_the_prior():
    rows, wanted = torch.zeros(20, D).double(), torch.zeros(1, D).double()
    rows[:, :3] = normal(20, 3)
    wanted[0, 5] = 2.0
    assert float(var_of(rows, wanted)) == pytest.approx(4 * TAU**2, rel=1e-12)
    draws = draws_of(rows, 4)[:, 3:]
    torch.testing.assert_close(draws, TAU * normals(D, 4, seed=0)[:, 3:], **EXACT)


@pytest.mark.parametrize("rows", [torch.zeros(0, D), torch.zeros(3, D), torch.zeros(30, D)])
def test_rows_that_say_nothing_leave_the_prior(rows):
    wanted = normal(3, D)
    found = var_of(rows.double(), wanted)
    torch.testing.assert_close(found, TAU**2 * wanted.square().sum(1), **EXACT)


@FEW_AND_MANY
def test_one_decomposition_serves_every_ratio(count):
    rows, wanted = normal(count, D), normal(5, D, seed=1)
    ratios = torch.tensor([1e-6, 0.1, 30.0])
    found = evidence_of(rows).spectrum().variances(wanted, ratios)
    for ratio, variances in zip(ratios.tolist(), found, strict=True):
        torch.testing.assert_close(variances, var_of(rows, wanted, ratio, scale=1.0), **EXACT)


def test_only_the_ratio_decides_the_shape_and_the_scale_the_size():
    rows, wanted = normal(20, D), normal(5, D, seed=1)
    one, other = (var_of(rows, wanted, scale=scale) for scale in (1.0, 3.0))
    torch.testing.assert_close(other, 9 * one, **EXACT)


# ---- streams ----


@given(
    cuts=st.lists(st.integers(0, 30), max_size=4),
    count=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_rows_in_pieces_are_rows_at_once(cuts, count, seed):
    rows, wanted = normal(count, D, seed=seed), normal(4, D, seed=seed + 1)
    ends = [0, *sorted(min(cut, count) for cut in cuts), count]
    pieces = [rows[a:b] for a, b in pairwise(ends)]
    streamed = evidence_of(*pieces)
    merged = Evidence(D)
    for piece in pieces:
        merged.merge(evidence_of(piece))
    expected = var_of(rows, wanted)
    for evidence in (streamed, merged):
        assert evidence.count == count
        found = evidence.spectrum().var(wanted, RATIO, TAU)
        torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("first", [3, 20])
@pytest.mark.parametrize("second", [2, 6, 20])
def test_merging_leaves_the_merged_as_it_was(first, second):
    """The posterior of before stays in use where the new one is refused."""
    one, other = evidence_of(normal(first, D)), evidence_of(normal(second, D, seed=1))
    before = [one.gram().clone(), other.gram().clone()]
    whole = Evidence(D)
    whole.merge(one)
    whole.merge(other)
    whole.add(normal(3, D, seed=2))
    assert torch.equal(one.gram(), before[0])
    assert torch.equal(other.gram(), before[1])
    assert (one.count, other.count, whole.count) == (first, second, first + second + 3)


@pytest.mark.parametrize("ratio", [1e-4, 0.1, 10.0])
@pytest.mark.parametrize("count", [1, 5, 7])
def test_rows_and_their_sum_have_the_same_posterior(count, ratio):
    """The kernel form and the weight form; several processes end with the latter."""
    rows, wanted = normal(count, D), normal(4, D, seed=1)
    kernel = evidence_of(rows)
    weight = Evidence(D, rows.T @ rows, count)
    assert kernel.keeps_rows
    assert not weight.keeps_rows
    one, other = kernel.spectrum(), weight.spectrum()
    found, expected = (each.var(wanted, ratio, TAU) for each in (one, other))
    torch.testing.assert_close(found, expected, **EXACT)
    found, expected = (each.draws(normals(D, 3, seed=0), ratio) for each in (one, other))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)


def test_no_more_than_a_square_matrix_is_kept():
    evidence = evidence_of(normal(D - 1, D))
    assert evidence.keeps_rows
    evidence.add(normal(1, D))
    assert not evidence.keeps_rows
    with pytest.raises(InputError, match="the rows were summed"):
        evidence.rows()


@FEW_AND_MANY
def test_the_state_is_enough_to_go_on(count):
    rows, more = normal(count, D), normal(6, D, seed=1)
    evidence = evidence_of(rows)
    again = Evidence.from_state(D, evidence.count, evidence.state())
    assert (again.count, again.keeps_rows) == (evidence.count, evidence.keeps_rows)
    for one in (evidence, again):
        one.add(more)
    torch.testing.assert_close(again.gram(), evidence.gram(), **EXACT)
    assert again.mean_square == pytest.approx(evidence.mean_square)


@FEW_AND_MANY
def test_mean_square_is_that_of_the_rows(count):
    rows = normal(count, D)
    expected = float(rows.square().sum(1).mean())
    assert evidence_of(rows).mean_square == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rows", [torch.zeros(0, D), torch.zeros(3, D)])
def test_mean_square_of_nothing_is_a_unit(rows):
    assert evidence_of(rows).mean_square == 1.0
    assert Evidence(D).rows().shape == (0, D)


# ---- what no data can do ----


@given(
    count=st.integers(0, 20),
    more=st.integers(1, 6),
    seed=st.integers(0, 99),
    exponent=st.floats(-6, 2),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_a_further_row_never_raises_a_variance(count, more, seed, exponent, size):
    rows, added = normal(count, D, seed=seed), size * normal(more, D, seed=seed + 1)
    wanted = torch.cat([normal(4, D, seed=seed + 2), rows, added])
    ratio = 10.0**exponent
    before, after = (var_of(data, wanted, ratio) for data in (rows, torch.cat([rows, added])))
    assert (after <= before + 1e-12 * TAU**2 * wanted.square().sum(1)).all()
    assert (after[-more:] < before[-more:]).all()


@given(count=st.integers(1, 30), seed=st.integers(0, 99), exponent=st.floats(-16, 2))
def test_variances_are_finite_and_between_zero_and_the_prior(count, seed, exponent):
    """Also of what was seen often, where a difference of almost equal numbers is left."""
    rows = normal(count, D, seed=seed)
    rows = torch.cat([rows, rows, 1e-8 * rows, 1e6 * rows])
    var = var_of(rows, rows, ratio=10.0**exponent)
    assert torch.isfinite(var).all()
    assert (var >= 0).all()
    assert (var <= TAU**2 * rows.square().sum(1)).all()


def test_repeated_rows_are_less_noise():
    rows, wanted = normal(4, D), normal(3, D, seed=1)
    often = torch.cat([rows] * 25)
    found = var_of(often, wanted)
    torch.testing.assert_close(found, var_of(rows, wanted, ratio=RATIO / 25), **EXACT)


def test_eigenvectors_are_orthonormal_although_rows_repeat():
    spectrum = evidence_of(torch.cat([normal(3, 40)] * 4), dimension=40).spectrum()
    assert len(spectrum.values) == 3
    identity = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(spectrum.vectors @ spectrum.vectors.T, identity, **EXACT)


def test_the_scale_of_single_precision_rows_is_kept():
    rows = normal(20, D)
    one, other = (var_of(x, normal(3, D, seed=1)) for x in (rows, rows.float()))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=0.0)


# ---- draws ----


@pytest.mark.parametrize("count", [3, 20])
def test_a_draw_is_a_function_of_seed_and_number(count):
    rows = normal(count, D)
    whole = draws_of(rows, 5, seed=3)
    torch.testing.assert_close(draws_of(rows, 2, seed=3), whole[:2], **EXACT)
    assert not torch.allclose(draws_of(rows, 5, seed=4), whole)
    assert len(whole.round(decimals=6).unique(dim=0)) == 5


def test_normals_are_the_same_on_every_machine():
    found = normals(3, 6, seed=1)[4:]
    expected = torch.tensor([[-0.8999, -1.3626, -0.5391], [1.0842, -0.4581, -0.6968]])
    torch.testing.assert_close(found, expected.double(), rtol=0.0, atol=6e-5)


# ---- errors ----


@pytest.mark.parametrize("rows", [torch.zeros(2, D + 1), torch.zeros(D), torch.zeros(1, 2, D)])
def test_rows_of_other_shape_are_refused(rows):
    with pytest.raises(InputError, match=f"do not fit a posterior of {D} coordinates"):
        evidence_of(rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_are_refused(value):
    evidence, rows = evidence_of(normal(2, D)), normal(2, D)
    rows[1, 3] = value
    with pytest.raises(InputError, match="not finite"):
        evidence.add(rows)
    assert evidence.count == 2


@pytest.mark.parametrize("count", [3, 20])
def test_evidence_of_other_dimension_is_refused(count):
    with pytest.raises(InputError, match="coordinates"):
        evidence_of(normal(3, D)).merge(evidence_of(normal(count, 9), dimension=9))


def test_eigenvalues_and_eigenvectors_make_the_sum_again():
    rows = normal(20, D)
    spectrum = evidence_of(rows).spectrum()
    rebuilt = spectrum.vectors.T @ (spectrum.values[:, None] * spectrum.vectors)
    torch.testing.assert_close(rebuilt, rows.T @ rows, **EXACT)
