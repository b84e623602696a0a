import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import blips
from blips.backbones import PaiNN
from blips.errors import CheckpointError
from blips.train.checkpoint import read_tensors, write_tensors
from blips.uq.calibrate import ScaleCalibrator
from studies.nbody import EGNN


def potential(**options) -> blips.BayesianPotential:
    torch.manual_seed(0)
    model = PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4)
    return blips.bayesianize(model, **options)


def test_a_potential_comes_back_with_posterior_and_calibration(tmp_path, structures):
    ours = potential(prior_dropout=0.2, exclude="readout.*", encoder={"share": "layer"})
    ours.backbone.reference.set({7: -1.0, 1: -0.5}, scale=2.0)
    ours.calibration["forces"] = ScaleCalibrator(1.7)
    path = blips.save(ours, tmp_path / "model.safetensors")
    theirs = blips.load(path)
    assert isinstance(theirs, blips.BayesianPotential)
    assert theirs.report() == ours.report()
    assert theirs.rho == ours.rho
    first, second = (p.predict(structures[0][:3], samples=4, seed=1) for p in (ours, theirs))
    np.testing.assert_array_equal(first.energy, second.energy)
    np.testing.assert_array_equal(first.forces_std, second.forces_std)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_backbones_and_dtypes_are_kept(tmp_path, dtype):
    torch.manual_seed(0)
    model = EGNN(hidden=8, layers=1).to(dtype)
    again = blips.load(blips.save(model, tmp_path / "m.safetensors"))
    assert type(again) is EGNN
    assert next(again.parameters()).dtype == dtype
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())


def test_pickles_are_refused_unread(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    torch.save({"weights": torch.ones(2)}, tmp_path / "zip.pt")
    (tmp_path / "bomb.pkl").write_bytes(pickle.dumps(Bomb()))
    for name in ("zip.pt", "bomb.pkl"):
        with pytest.raises(CheckpointError, match="is a pickle"):
            blips.load(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


def test_truncated_damaged_foreign_and_missing_files_are_refused(tmp_path):
    path = blips.save(potential(), tmp_path / "m.safetensors")
    data = path.read_bytes()
    broken = tmp_path / "broken.safetensors"
    for length in (0, 4, 100, len(data) // 2, len(data) - 1):
        broken.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            blips.load(broken)
    flipped = bytearray(data)
    flipped[-5] ^= 0xFF
    broken.write_bytes(flipped)
    with pytest.raises(CheckpointError, match="checksum"):
        blips.load(broken)
    save_file({"a": torch.ones(2)}, broken)
    with pytest.raises(CheckpointError, match="not written by blips"):
        blips.load(broken)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        blips.load(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="is a folder; give a model file"):
        blips.load(tmp_path)


def test_a_header_that_describes_no_model_is_refused(tmp_path):
    good = {"backbone": "egnn", "hyperparameters": {"hidden": 8, "layers": 1}, "dtype": "float32"}
    for model in (None, {}, 3, good | {"backbone": "os.system"}, good | {"dtype": "object"}):
        path = write_tensors(tmp_path / "m.safetensors", {"a": torch.ones(1)}, {"model": model})
        with pytest.raises(CheckpointError, match="does not describe a model"):
            blips.load(path)
    path = write_tensors(tmp_path / "m.safetensors", {"a": torch.ones(1)}, {"model": good})
    with pytest.raises(CheckpointError, match="do not fit"):
        blips.load(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.binary(max_size=400))
def test_any_bytes_give_our_error_and_nothing_else(tmp_path, data):
    path = tmp_path / "any"
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        blips.load(path)


def test_tensors_and_header_round_trip(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True, False])}
    path = write_tensors(tmp_path / "deep" / "t.safetensors", tensors, {"note": [1, "x"]})
    loaded, header = read_tensors(path)
    assert header["note"] == [1, "x"]
    assert all(torch.equal(tensors[k], loaded[k]) for k in tensors)
    json.dumps(header)
    assert [p.name for p in path.parent.iterdir()] == ["t.safetensors"]


def small_conditioned(structures) -> blips.BayesianPotential:
    torch.manual_seed(0)
    model = PaiNN(cutoff=3.0, features=4, blocks=1, num_basis=2)
    ours = blips.bayesianize(model, encoder={"hidden": 2, "depth": 1})
    ours.condition(structures[0][:3], valid=structures[1][:3], dimension=16, rows=2)
    ours.calibration["forces"] = ScaleCalibrator(1.7)
    return ours


def test_five_thousand_flipped_bits_are_refused_or_change_no_number(tmp_path, structures):
    path = blips.save(small_conditioned(structures), tmp_path / "m.safetensors")
    data = path.read_bytes()
    header_bits = 8 * (8 + int.from_bytes(data[:8], "little"))
    rng = np.random.default_rng(0)
    everywhere = rng.choice(8 * len(data), 2000, replace=False)
    flips = [*rng.choice(header_bits, 3000, replace=False), *everywhere]  # the header is small
    graph = structures[1][:2]
    expected = blips.load(path).predict(graph)
    accepted = 0
    for bit in flips:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(flipped)
        try:
            found = blips.load(path).predict(graph)
        except CheckpointError:
            continue
        accepted += 1
        for name in ("energy", "forces", "energy_total_std", "forces_total_std"):
            np.testing.assert_array_equal(found.array(name), expected.array(name), str(bit))
    assert accepted < len(flips) // 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: model["calibration"].update(Forces={"kind": "scale", "factor": 2}),
            "Forces",
        ),
        (lambda model: model["posterior"].update(Scale=2.0), "unknown keys: Scale"),
        (lambda model: model["hyperparameters"].update(features=10**15), "features=10"),
        (lambda model: model["hyperparameters"].update(blocks=10**9), "blocks=10"),
        (lambda model: model["hyperparameters"].update(cutoff=1e5), "cutoff is 100000.0 A"),
        *(
            (lambda model, k=key, v=value: model["posterior"].update({k: v}), f"{key}=")
            for key in ("dimension", "rows", "structures")
            for value in (-1, 0, 10**30, 2.5, "7", True, [1])
        ),
        (lambda model: model["posterior"].update(structures=10**6), "do not fit"),
        (lambda model: model["posterior"].update(rows=10**9), "do not fit"),
        (lambda model: model["posterior"].update(numbers=[1, 10**20]), "no atomic number"),
        (lambda model: model["posterior"].update(numbers=[1, 119]), "119 is no atomic number"),
        (lambda model: model["posterior"]["shapes"].update({"readout.0": [2**40, 8]}), "posterior"),
        (lambda model: model["posterior"]["distances"].update({"1-7000": 1.0}), "posterior"),
    ],
)
def test_a_header_of_unknown_keys_or_absurd_sizes_is_refused(tmp_path, structures, change, message):
    path = blips.save(small_conditioned(structures), tmp_path / "m.safetensors")
    tensors, header = read_tensors(path)
    change(header["model"])
    with pytest.raises(CheckpointError, match=message) as caught:
        blips.load(write_tensors(path, tensors, header))
    assert "\n" not in str(caught.value)
