"""The n-body generator: the original's arithmetic, its random stream, and the cache."""

from pathlib import Path

import numpy as np
import pytest

from blips.errors import InputError
from studies.nbody import dynamics, simulations
from studies.nbody.simulations import Simulations, generate, load_nbody


@pytest.fixture(scope="module")
def few() -> dict[str, Simulations]:
    return generate(num_train=6, num_valid=3, num_test=2)


def one_at_a_time(generator: np.random.RandomState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Frames 30 and 40 [2, 3, 5] of one simulation, with 5 x 5 matrices and no tricks."""
    charge = generator.choice(np.array([-1.0, 0.0, 1.0]), size=(5, 1), p=[0.5, 0, 0.5])
    x, v = generator.randn(3, 5), generator.randn(3, 5)
    v = v * 0.5 / np.sqrt((v**2).sum(axis=0))
    generator.randn(49, 3, 5)
    generator.randn(49, 3, 5)
    assert np.abs(x).max() < 5, "this test does not cover the walls"

    def clipped_force(x: np.ndarray) -> np.ndarray:
        norms = (x**2).sum(axis=0)
        squared_distances = norms[:, None] + norms[None, :] - 2 * x.T.dot(x)
        np.fill_diagonal(squared_distances, 1.0)
        strength = charge.dot(charge.T) / np.power(squared_distances, 1.5)
        np.fill_diagonal(strength, 0.0)
        return np.clip((strength * (x[:, :, None] - x[:, None, :])).sum(axis=-1), -100, 100)

    v += 0.001 * clipped_force(x)
    positions, velocities = [], []
    for step in range(1, 4101):
        x += 0.001 * v
        if step in (3100, 4100):
            positions.append(x.copy())
            velocities.append(v.copy())
        v += 0.001 * clipped_force(x)
    return np.array(positions), np.array(velocities), charge[:, 0]


def test_batched_frames_equal_one_at_a_time_bit_for_bit(few):
    generator = np.random.RandomState(43)
    for index in range(3):
        positions, velocities, charges = one_at_a_time(generator)
        assert np.array_equal(few["train"].positions[index].transpose(0, 2, 1), positions)
        assert np.array_equal(few["train"].velocities[index].transpose(0, 2, 1), velocities)
        assert np.array_equal(few["train"].charges[index], charges)


def power_rounds_as_on_the_reference_machine() -> bool:
    """Whether x**1.5 has the last bits of NumPy's AVX-512 `power` (not correctly rounded here)."""
    probes = [0.5004, 1.4326, 2.3636, 3.3156, 4.216, 5.2615, 6.0537, 7.0006]
    avx512 = """0x1.6a7923fab7ccfp-2 0x1.b6f66413cdda4p+0 0x1.d12058567b288p+1 0x1.8263392a1d783p+2
        0x1.15037286550ecp+3 0x1.8233abe4c6976p+3 0x1.dca143d8cbed8p+3 0x1.285cbc2f59173p+4"""
    expected = [float.fromhex(number) for number in avx512.split()]
    return np.array_equal(np.power(probes, 1.5), expected)


def test_first_simulations_are_the_official_ones(reference_data: Path):
    with np.load(reference_data / "nbody" / "reference_first4.npz") as file:
        reference = dict(file)
    ours = generate(first=4)
    # One of these eight simulations amplifies a last bit to 1e-10.
    tolerance = 0.0 if power_rounds_as_on_the_reference_machine() else 1e-9
    for split in ("train", "valid"):
        assert np.array_equal(ours[split].charges, reference[f"{split}_charges"])
        for name, frames in (("loc", ours[split].positions), ("vel", ours[split].velocities)):
            expected = reference[f"{split}_{name}"].transpose(0, 1, 3, 2)
            assert np.abs(frames - expected).max() <= tolerance


def test_skipped_simulations_still_advance_the_stream(few):
    first = generate(num_train=6, num_valid=3, num_test=2, first=2)
    for split in ("train", "valid", "test"):
        assert len(first[split]) == 2
        assert np.array_equal(first[split].positions, few[split].positions[:2])
        assert np.array_equal(first[split].velocities, few[split].velocities[:2])
        assert np.array_equal(first[split].charges, few[split].charges[:2])


def test_blocks_and_threads_do_not_change_values(few, monkeypatch):
    monkeypatch.setattr(dynamics, "_BLOCK", 4)
    seen = []
    again = generate(6, 3, 2, threads=3, progress=lambda done, total: seen.append((done, total)))
    for split in few:
        assert np.array_equal(again[split].positions, few[split].positions)
    assert seen == [(4, 11), (8, 11), (11, 11)]


def test_another_seed_gives_other_simulations(few):
    other = generate(num_train=1, num_valid=0, num_test=0, seed=44)
    assert len(other["valid"]) == 0
    assert not np.allclose(other["train"].positions[0], few["train"].positions[0])


def test_forces_are_coulombs_law_and_sum_to_zero():
    generator = np.random.default_rng(0)
    x = generator.uniform(-3, 3, (3, 5, 7))
    charges = generator.choice([-1.0, 1.0], (7, 5))
    separation = x[:, :, None] - x[:, None, :]  # [3, 5, 5, S]
    distance = np.linalg.norm(separation, axis=0) + np.eye(5)[:, :, None]
    products = charges.T[:, None] * charges.T[None, :]  # [5, 5, S]
    expected = (products * separation / distance**3).sum(axis=2)
    force = dynamics._Force(charges)(x)
    np.testing.assert_allclose(force, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(force.sum(axis=1), 0.0, atol=1e-12)


def test_forces_are_clipped():
    x = np.array([[0.0, 0.01, 50, 100, 150], [0] * 5, [0] * 5])[:, :, None]
    force = dynamics._Force(np.array([[1.0, -1.0, 1.0, 1.0, 1.0]]))(x)
    assert force[0, :2, 0].tolist() == [100.0, -100.0]
    assert np.abs(force[:, 2:]).max() < 1e-2


def test_initial_speed_is_one_half():
    _, velocities, _ = simulations._draw(np.random.RandomState(0), 20, 20)
    np.testing.assert_allclose(np.linalg.norm(velocities, axis=1), 0.5, rtol=1e-14)


def test_starts_outside_the_box_are_mirrored_and_move_inwards():
    positions, velocities = simulations._reflect(
        np.array([5.5, -5.25, 4.0, 5.0]), np.array([-0.1, -0.2, 0.3, 0.4])
    )
    assert np.array_equal(positions, [4.5, -4.75, 4.0, 5.0])
    assert np.array_equal(velocities, [-0.1, 0.2, 0.3, 0.4])


def test_load_generates_once_and_takes_frames_30_and_40(few, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(simulations, "generate", lambda **options: calls.append(options) or few)
    monkeypatch.setenv("BLIPS_CACHE", str(tmp_path / "deep" / "folder"))
    train, test = load_nbody("train", size=4), load_nbody("test", size=2)
    assert len(calls) == 1
    assert [file.suffix for file in (tmp_path / "deep" / "folder").iterdir()] == [".npz"]
    assert (len(train), len(test)) == (4, 2)
    assert np.array_equal(train.positions, few["train"].positions[:4, 0])
    assert np.array_equal(train.velocities, few["train"].velocities[:4, 0])
    assert np.array_equal(train.target_positions, few["train"].positions[:4, 1])
    assert np.array_equal(test.charges, few["test"].charges)


def test_an_interrupted_write_leaves_no_file(few, tmp_path, monkeypatch):
    def stop(*_args, **_arrays):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulations, "generate", lambda **options: few)
    monkeypatch.setattr(np, "savez", stop)
    with pytest.raises(KeyboardInterrupt):
        load_nbody("valid", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_cache_is_named(tmp_path):
    damaged = tmp_path / simulations._CACHE_FILE
    damaged.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(InputError, match=r"nbody_small.*delete the file"):
        load_nbody("train", tmp_path)


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(InputError, match="train, valid, test"):
        load_nbody("training", tmp_path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"1\.\.2000"):
        load_nbody("valid", tmp_path, size=2001)
    with pytest.raises(InputError, match="threads >= 1"):
        generate(1, 1, 1, threads=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_full_stream_is_made_once_and_split(tmp_path):
    train = load_nbody("train", tmp_path)
    valid, test = load_nbody("valid", tmp_path), load_nbody("test", tmp_path)
    assert (len(train), len(valid), len(test)) == (3000, 2000, 2000)
    first = generate(first=2)
    for name, split in (("train", train), ("valid", valid), ("test", test)):
        assert np.isfinite(split.target_positions).all()
        assert np.array_equal(split.positions[:2], first[name].positions[:, 0])
        assert np.array_equal(split.target_positions[:2], first[name].positions[:, 1])
