"""A potential that is conditioned on structures: regression of its rows, in batches and calls."""

import ase.io
import numpy as np
import pytest
import torch

from blips.bayes.condition import Evidence
from blips.data.labels import Labels
from blips.errors import InputError
from blips.inference import rows as row_sums
from helpers import rattled_molecules
from inference.conditioning import (
    EXACT,
    FACTOR,
    FAR,
    TRAIN,
    VALID,
    all_rows,
    conditioned,
    gram_of,
    predict,
    regression_covariance,
    rescaled,
)
from inference.models import (
    small,
)

KCAL = Labels(energy_unit="kcal/mol")
# The packages behind CHGNet and ORB.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


# ---- Bayesian linear regression of the rows ----


def test_energies_have_the_deviations_of_linear_regression(potential):
    seen = torch.cat([all_rows(potential, atoms) for atoms in TRAIN])
    cov = regression_covariance(potential.posterior, seen)
    b = torch.stack([all_rows(potential, atoms)[0] for atoms in FAR]).numpy()
    expected = FACTOR * np.sqrt(np.einsum("ni,ij,nj->n", b, cov, b))
    np.testing.assert_allclose(predict(potential, FAR, samples=2).energy_std, expected, rtol=1e-8)


@pytest.mark.statistical
def test_forces_have_the_deviations_of_linear_regression(painn):
    """Within 5 standard errors of 300 draws."""
    seen = torch.cat([all_rows(painn, atoms) for atoms in TRAIN])
    cov = regression_covariance(painn.posterior, seen)
    b = all_rows(painn, FAR[0])[1:].numpy()
    expected = np.sqrt(np.einsum("ni,ij,nj->n", b, cov, b))
    found = predict(painn, FAR[0], samples=300).array("forces_std")
    np.testing.assert_allclose(found.ravel(), expected, rtol=5 / np.sqrt(600))


def test_rows_are_those_of_all_energies_and_force_components(potential):
    rows = torch.cat([all_rows(potential, atoms) for atoms in TRAIN])
    torch.testing.assert_close(gram_of(potential), rows.T @ rows, **EXACT)
    assert potential.posterior.evidence.count == sum(1 + 3 * len(atoms) for atoms in TRAIN)


def test_random_sums_stand_for_many_components(painn):
    """3 rows and one for the energy, of the right size on average (20 seeds, 5 deviations)."""
    total = []
    for seed in range(20):
        evidence, *_ = row_sums.collect(painn.linear_model(), TRAIN, rows=3, seed=seed)
        assert evidence.count == 4 * len(TRAIN)
        total.append(float(evidence.gram().trace()))
    error = np.std(total) / np.sqrt(20)
    assert np.mean(total) == pytest.approx(float(gram_of(painn).trace()), abs=5 * error)
    assert error > 0


def test_deviations_grow_away_from_the_data():
    potential = small("painn")
    near, far = (rattled_molecules(6, scale, first=60) for scale in (0.03, 0.3))
    potential.condition(rattled_molecules(9, 0.03), valid=VALID, maps="all", dimension=300, rows=6)
    rescaled(potential, relative_ratio=1e-6)
    here, there = (predict(potential, structures, samples=8) for structures in (near, far))
    assert there.energy_std.mean() > 3 * here.energy_std.mean()
    assert there.forces_std.mean() > 3 * here.forces_std.mean()


# ---- at once, in batches, in calls ----


@pytest.mark.parametrize("rows", [48, 5], ids=["components", "sums"])
@pytest.mark.parametrize("way", ["generator", "two calls", "batches"])
def test_the_way_structures_come_does_not_matter(way: str, rows: int, monkeypatch):
    at_once = conditioned(rows=rows)
    if way == "batches":
        monkeypatch.setattr(row_sums, "BATCH_ATOMS", 8)
    given = {"generator": iter(TRAIN), "two calls": TRAIN[:2], "batches": TRAIN}[way]
    other = conditioned(structures=given, rows=rows)
    if way == "two calls":
        other.condition(iter(TRAIN[2:]), rows=rows)
        rescaled(other)
    torch.testing.assert_close(gram_of(other), gram_of(at_once), **EXACT)
    one, two = (predict(p, FAR, samples=4) for p in (at_once, other))
    np.testing.assert_allclose(two.energy_std, one.energy_std, rtol=1e-10)
    np.testing.assert_allclose(two.forces_std, one.forces_std, rtol=1e-8)
    assert other.posterior.structures == at_once.posterior.structures == len(TRAIN)
    assert other.posterior.domain.numbers == at_once.posterior.domain.numbers == {1, 6, 7, 8}


def test_structures_are_read_as_they_are_needed(monkeypatch):
    monkeypatch.setattr(row_sums, "BATCH_ATOMS", 8)
    added, at_the_time = [], []
    plain = Evidence.add
    monkeypatch.setattr(Evidence, "add", lambda *given: (added.append(1), plain(*given))[1])

    def stream():
        for atoms in TRAIN:
            at_the_time.append(len(added))
            yield atoms

    small("painn").condition(stream(), valid=VALID)
    first, second, third, fourth, fifth = at_the_time  # 4, 6, 3, 4, 6 atoms
    assert first == second == 0
    assert 0 < third < fourth == fifth < len(added)


def test_structures_come_from_files_too(tmp_path):
    ase.io.write(tmp_path / "train.extxyz", TRAIN)
    ase.io.write(tmp_path / "valid.extxyz", VALID)
    files, lists = small("painn"), small("painn")
    found = files.condition(tmp_path / "train.extxyz", valid=str(tmp_path / "valid.extxyz"))
    expected = lists.condition(TRAIN, valid=VALID)
    assert found.structures == len(TRAIN)
    assert found.scale.scale == pytest.approx(expected.scale.scale, rel=1e-5)  # 8 digits in files
    with pytest.raises(InputError, match=r"none\.extxyz: no such file"):
        files.condition(tmp_path / "none.extxyz")


def test_labels_are_read_as_those_that_the_model_was_trained_with():
    scales = []
    for trained_with, given in ((None, KCAL), (KCAL, None), (None, None)):
        potential = small("painn")
        potential.backbone.labels = trained_with
        scales.append(potential.condition(TRAIN, valid=VALID, labels=given).scale)
    assert scales[0] == scales[1] != scales[2]


def test_without_validation_structures_the_scale_stays():
    potential = conditioned(structures=TRAIN[:2])
    before = potential.posterior.scale
    assert potential.condition(TRAIN[2:]).scale == before
    assert potential.condition(TRAIN[2:], valid=VALID).scale != before


def test_a_call_that_fails_leaves_the_posterior_as_it_was():
    potential = conditioned()
    before, gram = potential.posterior, gram_of(potential).clone()
    with pytest.raises(InputError):
        potential.condition(FAR, valid=[])
    assert potential.posterior is before
    assert torch.equal(gram_of(potential), gram)


def test_a_second_call_leaves_the_first_posterior_as_it_was():
    potential = conditioned()
    before = potential.posterior
    gram = before.evidence.gram().clone()
    potential.condition(FAR)
    assert torch.equal(before.evidence.gram(), gram)
    assert before.structures == len(TRAIN)


@pytest.mark.parametrize("rows", [48, 3])
@pytest.mark.parametrize("maps", ["readout", "all"])
def test_a_further_structure_never_raises_a_variance(maps: str, rows: int):
    potential = small("painn")
    options = {"maps": maps, "dimension": 64, "rows": rows}
    potential.condition(TRAIN[:1], valid=VALID[:1], **options)
    rescaled(potential)
    wanted = torch.cat([all_rows(potential, atoms) for atoms in (FAR[0], FAR[2], TRAIN[2])])

    def var() -> torch.Tensor:
        posterior = potential.posterior
        return posterior.spectrum.var(wanted, posterior.scale.ratio, posterior.scale.scale)

    before = var()
    for atoms in (*TRAIN[1:3], FAR[0]):
        potential.condition([atoms], **options)
        after = var()
        assert (after <= before + 1e-12 * before.max()).all()
        assert after.sum() < before.sum()
        before = after
