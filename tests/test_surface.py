"""What `import blips` gives: its names, and the verbs that judge and train."""

import inspect

import numpy as np
import pytest
import torch
from ase.io import write

import blips
from blips.backbones import PaiNN
from blips.errors import ConfigError
from blips.uq.assess import References, assess
from helpers import morse_ammonia


@pytest.fixture(scope="module")
def potential() -> blips.BayesianPotential:
    torch.manual_seed(0)
    return blips.bayesianize(PaiNN(cutoff=3.0, features=8, blocks=1, num_basis=4), initial=0.01)


def test_every_public_name_can_be_had_and_no_other():
    for name in blips.__all__:
        assert getattr(blips, name) is not None
    assert set(blips.__all__) <= set(dir(blips))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = blips.nonsense


def test_bayesianize_has_at_most_ten_arguments():
    assert len(inspect.signature(blips.bayesianize).parameters) <= 10


def test_evaluate_is_the_assessment_of_a_prediction(potential, tmp_path):
    structures = morse_ammonia(4, seed=1)
    write(tmp_path / "test.extxyz", structures)
    found = blips.evaluate(potential, tmp_path / "test.extxyz", samples=4, n_bootstrap=0)
    expected = assess(
        potential.predict(structures, samples=4), References.of(structures), n_bootstrap=0
    )
    rows, known = found.rows(), expected.rows()
    assert list(rows) == list(known)
    values = [interval.value for interval in known.values()]
    found_values = [interval.value for interval in rows.values()]
    assert found_values == pytest.approx(values, rel=1e-3, nan_ok=True)


def test_calibrate_keeps_a_scale_with_the_potential(potential):
    structures = morse_ammonia(5, seed=2)
    plain = potential.predict(structures, samples=4, calibrated=False)
    try:
        found = blips.calibrate(potential, structures, samples=4)
        assert found == potential.calibration
        scaled = potential.predict(structures, samples=4)
        ratio = scaled.forces_std / plain.forces_std
        np.testing.assert_allclose(ratio, found["forces"].factor, rtol=1e-9)
    finally:
        potential.calibration = {}


def test_settings_of_the_training_are_keywords_and_count_more_than_the_config(tmp_path):
    torch.manual_seed(0)
    model = blips.bayesianize(PaiNN(cutoff=3.0, features=8, blocks=1, num_basis=4))
    config = {"training": {"epochs": 5, "batch_size": 2, "tensorboard": False, "condition": False}}
    options = {"valid": morse_ammonia(2, seed=4), "config": config, "display": False}
    data = morse_ammonia(4, seed=3)
    done = blips.fit(model, data, folder=tmp_path / "a", epochs=1, **options)
    written = (done.folder / "config.yaml").read_text()
    assert "epochs: 1\n" in written
    assert "batch_size: 2\n" in written
    with pytest.raises(ConfigError, match=r"training\.epoch'.*did you mean 'epochs'"):
        blips.fit(model, data, folder=tmp_path / "b", epoch=1, **options)
