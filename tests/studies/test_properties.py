"""What the study of properties measures, on numbers whose answer is known."""

import numpy as np
import pytest

from studies.properties.data import dft_references, materials
from studies.properties.measure import judged, softening


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
