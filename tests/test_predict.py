import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from hypothesis import given
from hypothesis import strategies as st

import blips
from blips.backbones import PaiNN
from blips.data.graph import AtomGraph
from blips.errors import InputError
from blips.inference.memory import (
    RESERVE,
    MemoryGauge,
    passes_side_by_side,
    peak_bytes,
    rows_of,
)
from blips.inference.monte_carlo import moments, sampled_outputs
from blips.prediction import Prediction
from blips.uq.calibrate import ScaleCalibrator
from studies.nbody import EGNN, ParticleGraph


@pytest.fixture(scope="module")
def potential() -> blips.BayesianPotential:
    torch.manual_seed(0)
    return blips.bayesianize(PaiNN(cutoff=4.0, features=16, blocks=2, num_basis=6))


def structures() -> list[Atoms]:
    silicon = bulk("Si", cubic=True)
    silicon.rattle(0.05, seed=0)
    return [molecule("NH3"), silicon, molecule("H2O")]


@given(count=st.integers(2, 9), chunk=st.integers(1, 9), offset=st.floats(-1e6, 1e6))
def test_moments_equal_numpy_however_samples_are_chunked(count, chunk, offset):
    rng = np.random.default_rng(0)
    samples = offset + rng.normal(size=(count, 4, 3))
    graph = AtomGraph.from_atoms(molecule("NH3"), 3.0)
    drawn = sampled_outputs(
        lambda _, numbers: {"forces": torch.tensor(samples[numbers].reshape(-1, 3))},
        graph,
        range(count),
        chunk,
    )
    found = moments(drawn)
    np.testing.assert_allclose(found["forces"], samples.mean(0), rtol=1e-12)
    expected = samples.std(0, ddof=1)
    np.testing.assert_allclose(found["forces_std"], expected, rtol=1e-6, atol=1e-9)


def test_shapes_units_and_single_structures(potential):
    prediction = potential.predict(structures(), samples=4)
    assert prediction.energy.shape == prediction.energy_std.shape == (3,)
    assert prediction.energies.shape == prediction.energies_std.shape == (15,)
    assert prediction.forces.shape == prediction.forces_std.shape == (15, 3)
    assert len(prediction) == 3
    assert prediction[1].forces.shape == (8, 3)
    assert prediction[-1].energy[0] == prediction.energy[2]
    np.testing.assert_array_equal(prediction[2].forces, prediction.forces[12:])
    assert (prediction.energy_std > 0).all()


def test_map_has_no_error_bars_and_equals_the_model(potential):
    prediction = potential.predict(structures(), method="map")
    assert prediction.energy_std is None
    graph = potential.backbone.graph(structures())
    outputs = potential(graph)
    np.testing.assert_array_equal(prediction.forces, outputs["forces"].double().numpy())
    np.testing.assert_array_equal(prediction.energy, outputs["energy"].numpy())


@pytest.mark.parametrize("method", ["mc", "frozen"])
def test_memory_bound_changes_chunks_but_not_the_result(potential, method):
    whole = potential.predict(structures(), samples=8, method=method, seed=3)
    small = potential.predict(structures(), samples=8, method=method, seed=3, memory_gb=2e-3)
    assert whole.details["chunk"] == 8
    assert small.details["chunk"] < 4
    np.testing.assert_allclose(small.energy_std, whole.energy_std, rtol=1e-4)
    np.testing.assert_allclose(small.forces_std, whole.forces_std, rtol=1e-3, atol=1e-6)


@given(samples=st.integers(1, 200), fits=st.integers(1, 200))
def test_chunks_fit_the_bound_and_are_never_empty(samples, fits):
    rows = rows_of(graph := PaiNN(features=16).graph(molecule("NH3")))
    gauge = MemoryGauge()
    gauge._bytes_per_row["mc"] = 1.0
    gigabytes = 1e-9 * (rows * fits + RESERVE) * passes_side_by_side(rows)
    chunk = gauge.chunk("mc", graph, samples, gigabytes, lambda graph: None)
    assert 1 <= chunk <= min(samples, fits)


def test_the_seed_decides(potential):
    first, again, other = (
        potential.predict(structures(), samples=4, seed=seed) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.forces_std, again.forces_std)
    assert not np.array_equal(first.forces_std, other.forces_std)


def test_frozen_prediction_is_the_committee_of_its_members(potential):
    prediction = potential.predict(structures()[0], samples=5, method="frozen", seed=2)
    graph = potential.backbone.graph(structures()[0])
    energies = [float(m(graph)["energy"].detach()) for m in potential.draw(5, seed=2)]
    assert prediction.energy[0] == pytest.approx(np.mean(energies), abs=1e-6)
    assert prediction.energy_std[0] == pytest.approx(np.std(energies, ddof=1), rel=1e-4)


def test_stress_is_symmetric_and_needs_a_cell(potential):
    prediction = potential.predict(structures()[1], samples=4, stress=True)
    assert prediction.stress.shape == prediction.stress_std.shape == (1, 3, 3)
    np.testing.assert_allclose(prediction.stress, prediction.stress.transpose(0, 2, 1), atol=1e-7)
    with pytest.raises(InputError, match="no volume"):
        potential.predict(structures(), samples=4, stress=True)


def test_calibration_scales_deviations_only(potential):
    plain = potential.predict(structures(), samples=4)
    potential.calibration = {"forces": ScaleCalibrator(2.0)}
    scaled = potential.predict(structures(), samples=4)
    unscaled = potential.predict(structures(), samples=4, calibrated=False)
    potential.calibration = {}
    np.testing.assert_allclose(scaled.forces_std, 2.0 * plain.forces_std)
    np.testing.assert_array_equal(scaled.energy_std, plain.energy_std)
    np.testing.assert_array_equal(scaled.forces, plain.forces)
    np.testing.assert_array_equal(unscaled.forces_std, plain.forces_std)
    assert scaled.details["calibrated"] == ("forces",)


def test_total_deviation_adds_variances():
    one = Prediction(
        n_atoms=np.array([1]),
        method="x",
        samples=2,
        energy_std=np.array([3.0]),
        energy_aleatoric_std=np.array([4.0]),
        forces_std=np.ones((1, 3)),
    )
    assert one.energy_total_std == 5.0
    np.testing.assert_array_equal(one.forces_total_std, np.ones((1, 3)))


ABOUT = {"method": "mc", "samples": 2}


def test_other_outputs_are_predicted_by_their_names():
    torch.manual_seed(0)
    model = blips.bayesianize(EGNN(hidden=8, layers=2))
    x, v = torch.randn(2, 3, 5, 3)
    graph = ParticleGraph.from_arrays(x, v, torch.ones(3, 5))
    prediction = model.predict(graph, samples=6)
    std = prediction.array("positions_std")
    assert prediction.array("positions").shape == std.shape == (15, 3)
    np.testing.assert_array_equal(prediction[1].array("positions_std"), std[5:10])
    whole = Prediction.join([prediction[k] for k in range(3)])
    np.testing.assert_array_equal(whole.array("positions_std"), std)
    with pytest.raises(InputError, match="has no energy"):
        prediction.array("energy")
    with pytest.raises(InputError, match="no usable charges_std for structures 1"):
        Prediction.of({"charges_std": np.array([0.1, np.nan])}, n_atoms=np.array([1, 1]), **ABOUT)


def test_nothing_to_predict_is_an_error(potential):
    for predict in (potential.predict, potential.one_pass, potential.draw(1)[0].predict):
        with pytest.raises(InputError, match="list of structures is empty"):
            predict([])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"batch_size": 0}, "batch_size=0; expected 1 or more"),
        ({"samples": 16.0}, "samples=16.0; expected a whole number"),
        ({"samples": "many"}, "samples='many'; expected a whole number"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(potential, request_, message):
    with pytest.raises(InputError, match=message):
        potential.predict(structures(), **request_)
    assert potential.predict(structures(), samples=np.int64(2)).samples == 2


def test_large_total_energies_keep_their_digits():
    torch.manual_seed(0)
    model = PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4)
    small = blips.bayesianize(model).predict(structures()[0], method="map").energy[0]
    model.reference.set({7: -50000.0, 1: -20000.0})
    large = blips.bayesianize(blips_base(model)).predict(structures()[0], method="map").energy[0]
    assert large + 110000.0 == pytest.approx(small, abs=1e-6)


def blips_base(model: PaiNN) -> PaiNN:
    from blips.bayes.convert import revert

    revert(model)
    return model


def test_the_peak_is_that_of_tensors_alive_together():
    x = torch.zeros(1000)  # not made by the run

    def run() -> None:
        y = x + 1.0  # 4000 bytes
        z = y.view(10, 100)[::2]  # none
        w = z.sum(dim=1)  # 20
        del y, z
        _ = x * 2.0 + w.sum()  # 4000 and 4 and 4000

    assert peak_bytes(run) == 8024


def test_the_peak_contains_what_a_backward_pass_keeps():
    x = torch.randn(1000, requires_grad=True)

    def run() -> None:
        torch.autograd.grad(x.exp().sin().exp().sum(), x)  # three results, kept for their slopes

    assert 12000 <= peak_bytes(run) <= 24000
