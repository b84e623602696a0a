import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from blips.errors import InputError
from studies.baselines import Evidential
from studies.baselines.second_readout import FLOOR, NormalInverseGamma

positive = st.floats(0.05, 20.0)


def evidence(nu: float, alpha: float, beta: float, penalty: float = 0.0) -> NormalInverseGamma:
    return NormalInverseGamma(*torch.tensor([nu, alpha, beta], dtype=torch.float64), penalty)


@given(nu=positive, excess=positive, beta=positive, error=st.floats(-10, 10))
def test_labels_are_student_t_distributed(nu, excess, beta, error):
    alpha = 1.0 + excess
    scale = np.sqrt(beta * (1.0 + nu) / (nu * alpha))
    expected = -scipy.stats.t.logpdf(error, df=2.0 * alpha, scale=scale)
    error = torch.tensor(error, dtype=torch.float64)
    nll = evidence(nu, alpha, beta).nll(error)
    assert float(nll) == pytest.approx(expected, rel=1e-8, abs=1e-8)
    loss = evidence(nu, alpha, beta, penalty=0.3).loss(error)
    assert float(loss) == pytest.approx(expected + 0.3 * abs(float(error)) * (2.0 * nu + alpha))


@given(nu=positive, excess=positive, beta=positive, factor=positive)
def test_the_variances_add_up_to_that_of_the_label(nu, excess, beta, factor):
    alpha = 1.0 + excess
    found = evidence(nu, alpha, beta)
    scale = np.sqrt(beta * (1.0 + nu) / (nu * alpha))
    total = scipy.stats.t.var(df=2.0 * alpha, scale=scale)
    assert float(found.aleatoric_var + found.epistemic_var) == pytest.approx(total)
    assert_close(found.rescaled(factor).epistemic_var, factor**2 * found.epistemic_var)


@pytest.mark.statistical
def test_moments_are_those_of_draws():
    nu, alpha, beta, draws = 2.0, 6.0, 3.0, 200_000
    rng = np.random.default_rng(0)
    var = scipy.stats.invgamma.rvs(alpha, scale=beta, size=draws, random_state=rng)
    mu = rng.normal(0.0, np.sqrt(var / nu))
    found = evidence(nu, alpha, beta)
    assert float(found.aleatoric_var) == pytest.approx(var.mean(), rel=0.02)
    assert float(found.epistemic_var) == pytest.approx(mu.var(), rel=0.02)


def test_evidence_of_a_structure_is_made_of_its_atoms(painn, graph):
    numbers = torch.randn(16, 6, dtype=torch.float64)
    found = Evidential(painn, penalty=0.4).distributions(numbers, graph)
    soft = torch.nn.functional.softplus(numbers).reshape(4, 4, 6) + FLOOR
    energy, forces = found["energy"], found["forces"]
    assert_close(energy.nu, soft[:, :, 0].mean(1))
    assert_close(energy.alpha, 1.0 + soft[:, :, 2].mean(1))
    assert_close(energy.beta, 4.0 * soft[:, :, 4].sum(1))  # energy scale 2 eV
    assert_close(forces.nu.reshape(4, 4), soft[:, :, 1])
    assert_close(forces.beta.reshape(4, 4), 4.0 * soft[:, :, 5])
    assert energy.penalty == forces.penalty == 0.4


def test_both_kinds_of_deviation_are_reported(painn, structures):
    prediction = Evidential(painn).predict(structures[0])
    total = prediction.forces_std**2 + prediction.forces_aleatoric_std**2
    np.testing.assert_allclose(prediction.forces_total_std, np.sqrt(total))
    assert (prediction.energy_std > 0).all()
    assert (prediction.energy_aleatoric_std > 0).all()


def test_a_negative_penalty_is_refused(painn):
    with pytest.raises(InputError, match="must not be negative"):
        Evidential(painn, penalty=-1.0)
