from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from blips.data.dataset import StructureData
from blips.errors import InputError
from helpers import morse_ammonia
from studies.baselines import EmbeddingMixture
from studies.baselines.gmm import GaussianMixture, fit_variance


def clusters(rows: int = 400, seed: int = 0) -> torch.Tensor:
    """Two Gaussian clouds in three dimensions, of 1/4 and 3/4 of the rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    x[: rows // 4] = 0.5 * x[: rows // 4] + torch.tensor([8.0, 0.0, 0.0])
    return x


def test_one_component_is_the_gaussian_of_mean_and_covariance():
    x = clusters()
    mixture = GaussianMixture.fit(x, 1, regularisation=0.0)
    expected = torch.distributions.MultivariateNormal(x.mean(0), torch.cov(x.T, correction=0))
    assert_close(mixture.log_density(x), expected.log_prob(x))


def test_separate_clusters_are_found():
    x = clusters()
    mixture = GaussianMixture.fit(x, 2, regularisation=0.0)
    order = mixture.means[:, 0].argsort()
    parts = x[100:], x[:100]
    for component, part in zip(order, parts, strict=True):
        assert_close(mixture.means[component], part.mean(0))
        cholesky = mixture.cholesky[component]
        assert_close(cholesky @ cholesky.T, torch.cov(part.T, correction=0))
        assert float(mixture.log_weights[component].exp()) == pytest.approx(len(part) / 400)


def test_the_density_agrees_with_scikit_learn():
    sklearn = pytest.importorskip("sklearn.mixture")
    x = clusters()
    theirs = sklearn.GaussianMixture(2, random_state=0, reg_covar=0.0).fit(x.numpy())
    ours = GaussianMixture.fit(x, 2, regularisation=0.0)
    np.testing.assert_allclose(ours.log_density(x), theirs.score_samples(x.numpy()), atol=1e-6)


def test_every_iteration_gains_likelihood():
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    fits = [GaussianMixture.fit(x, 3, iterations=n, tolerance=0.0) for n in range(1, 12)]
    means = [float(fit.log_density(x).mean()) for fit in fits]
    assert all(b >= a - 1e-9 for a, b in pairwise(means))
    assert means[-1] > means[0]


def test_few_rows_in_many_dimensions_and_equal_rows_are_no_trouble():
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(GaussianMixture.fit(x, 2).log_density(x)).all()
    equal = torch.ones(6, 2)
    assert torch.isfinite(GaussianMixture.fit(equal, 2).log_density(equal)).all()
    with pytest.raises(InputError, match="6 components for 5 rows"):
        GaussianMixture.fit(x, 6)


@pytest.mark.statistical
def test_the_variance_of_simulated_errors_is_found():
    rng = np.random.default_rng(0)
    count, strangeness = rng.integers(1, 5, 40_000), rng.exponential(3.0, 40_000)
    error = rng.normal(0.0, np.sqrt(0.2 * count + 0.7 * strangeness))
    a, b = fit_variance(*map(torch.as_tensor, (count, strangeness, error)))
    assert a == pytest.approx(0.2, rel=0.05)
    assert b == pytest.approx(0.7, rel=0.05)


def test_certain_errors_leave_a_positive_variance():
    count, strangeness = torch.ones(50), torch.linspace(0.0, 1.0, 50)
    a, b = fit_variance(count, strangeness, strangeness.sqrt())
    assert a > 0
    assert (a * count + b * strangeness > 0).all()


def test_strange_atoms_are_uncertain(painn, structures):
    data = [StructureData(s, 4.0, dtype=torch.float64) for s in structures]
    model = EmbeddingMixture(painn)
    model.condition(*data)
    near, far = structures[1], morse_ammonia(6, seed=1, scale=0.2)
    stds = [model.predict(test).forces_std for test in (near, far)]
    assert (np.ptp(stds[0], axis=1) == 0).all()
    assert stds[1].mean() > 1.5 * stds[0].mean()
    u = model.strangeness(painn.graph(far))
    order = np.argsort(stds[1][:, 0], kind="stable")
    assert (np.diff(u.numpy()[order]) >= 0).all()
    a, b = model.scales["energy"]
    total = 4 * a + b * u.reshape(-1, 4).sum(1)
    np.testing.assert_allclose(model.predict(far).energy_std, total.sqrt())
