"""What the study of properties measures, on numbers whose answer is known."""

import numpy as np
import pytest

from studies.properties.data import dft_references, materials
from studies.properties.measure import aligned, judged, softening


@pytest.mark.statistical
def test_one_factor_mends_error_bars_that_are_half_as_wide():
    rng = np.random.default_rng(0)
    true_std = np.exp(rng.normal(size=400))
    known = rng.normal(size=400)
    found = judged(known + true_std * rng.normal(size=400), true_std / 2, known)
    assert found["coverage90"]["value"] == pytest.approx(0.589, abs=0.07)  # within 0.82 sigma
    assert found["quantile_factor"]["value"] == pytest.approx(2.0, rel=0.15)
    assert found["nll_factor"]["value"] == pytest.approx(2.0, rel=0.15)
    assert found["quantile_coverage90"]["value"] == pytest.approx(0.9, abs=0.03)
    assert found["spearman"]["low"] > 0.3
    assert found["ece"]["value"] > 2 * found["quantile_ece"]["value"]


@pytest.mark.statistical
def test_right_error_bars_reach_the_rho_that_right_ones_have():
    rng = np.random.default_rng(0)
    std = np.exp(0.4 * rng.normal(size=2000))
    found = judged(std * rng.normal(size=2000), std, np.zeros(2000))
    assert found["spearman"]["value"] == pytest.approx(found["spearman_ideal"]["value"], abs=0.06)
    assert found["spearman_ideal"]["value"] == pytest.approx(0.37, abs=0.03)  # far below 1
    alike = judged(rng.normal(size=200), np.exp(1e-6 * rng.normal(size=200)), np.zeros(200))
    assert alike["spearman_ideal"]["value"] == pytest.approx(0.0, abs=0.05)


@pytest.mark.statistical
def test_shifts_of_elements_are_found_and_counted():
    rng = np.random.default_rng(0)
    shares = np.zeros((150, 119))
    for row in shares:
        row[rng.choice(np.arange(1, 11), 2, replace=False)] = (0.25, 0.75)
    shift, std = rng.normal(scale=0.3, size=119), np.full(150, 0.02)
    value = rng.normal(size=150)
    found = aligned(shares, value, std, value + shares @ shift + std * rng.normal(size=150))
    assert found["n"]["value"] == 100
    assert found["mae"]["value"] < 0.03  # 0.2 before
    assert found["coverage90"]["value"] == pytest.approx(0.9, abs=0.07)


def test_a_model_that_is_too_soft_has_its_scale():
    known = np.linspace(10, 200, 50)
    scale, std = softening(known / 1.3, known)
    assert scale == pytest.approx(1.3)
    assert std == pytest.approx(0.0, abs=1e-12)


def test_materials_are_chosen_by_their_seed(reference_data, monkeypatch):
    if not (reference_data / "properties").is_dir():
        pytest.skip("no tables of properties")
    monkeypatch.setenv("BLIPS_DATA", str(reference_data))
    first, again = (materials("elastic", 5, 4, seed=0) for _ in range(2))
    assert [one.formula for one in first] == [one.formula for one in again]
    assert max(len(one.atoms) for one in first) <= 4
    assert first[0].known["bulk_modulus_vrh"] > 0
    assert dft_references()["O"] == pytest.approx(-4.948, abs=1e-3)  # Materials Project, O2
