"""Frames for labelling: not too often, no two alike, with what was known of them."""

import ase.io
import numpy as np
import pytest
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from scipy.spatial.distance import cdist

from blips.errors import InputError
from blips.sim.frames import FrameSaver, nearest_distances
from blips.sim.guard import Finding

UNSURE = [Finding("force_std", 0.3, 0.2, "force std 0.3 exceeds 0.2", stops=False)]


def stretched(by):
    atoms = molecule("NH3")
    atoms.positions[1] *= 1 + by
    return atoms


def test_near_duplicates_are_left_out_however_they_are_turned():
    saver = FrameSaver(distinct=0.1)
    assert saver.offer(stretched(0.0), 0, UNSURE)
    turned = stretched(0.01)
    turned.rotate(70, [1, 2, 3])
    turned.positions += 5.0
    assert not saver.offer(turned, 1, UNSURE)
    assert saver.offer(stretched(0.5), 2, UNSURE)
    assert not saver.offer(stretched(0.01), 3, UNSURE)  # compared with all, not with the last
    assert not saver.offer(stretched(0.51), 4, UNSURE)
    assert saver.offer(molecule("H2O"), 5, UNSURE)  # other atoms
    assert [frame.info["step"] for frame in saver.frames] == [0, 2, 5]


def test_frames_are_due_every_n_steps_of_their_walker_and_at_the_end():
    saver = FrameSaver(every=10, distinct=0.0)
    steps = [step for step in range(0, 40, 3) if saver.offer(stretched(0), step, UNSURE)]
    assert steps == [0, 12, 24, 36]
    assert saver.offer(stretched(0), 37, UNSURE, walker=1)
    assert not saver.offer(stretched(0), 38, UNSURE)
    assert saver.offer(stretched(0), 38, UNSURE, last=True)


def test_a_last_frame_without_finite_positions_is_kept(tmp_path):
    saver = FrameSaver(tmp_path / "frames.extxyz")
    atoms = molecule("NH3")
    atoms.positions[0] = np.nan
    assert saver.offer(atoms, 3, UNSURE, last=True)
    assert saver.offer(stretched(0), 4, UNSURE)


def test_the_file_has_results_and_reason(tmp_path):
    saver = FrameSaver(tmp_path / "frames.extxyz")
    atoms = molecule("NH3")
    atoms.calc = SinglePointCalculator(atoms, energy=-1.5, forces=np.ones((4, 3)))
    atoms.arrays["forces_uncertainty"] = np.full((4, 3), 0.25)
    saver.offer(atoms, 7, UNSURE)
    (frame,) = ase.io.read(saver.file, ":")
    assert (frame.get_potential_energy(), frame.info["step"]) == (-1.5, 7)
    assert frame.info["guard"] == "force std 0.3 exceeds 0.2"
    assert (frame.arrays["forces_uncertainty"] == 0.25).all()


def test_distances_to_the_nearest_neighbours():
    atoms = molecule("CH3CH2OH")
    distances = np.sort(cdist(atoms.positions, atoms.positions), axis=1)[:, 1:7]
    np.testing.assert_allclose(nearest_distances(atoms), distances)
    np.testing.assert_allclose(nearest_distances(bulk("Cu", a=3.6)), 3.6 / np.sqrt(2))
    water = nearest_distances(molecule("H2O"))
    assert (water[:, 2:] == 6.0).all()  # no third neighbour


def test_mistakes_name_what_is_expected():
    with pytest.raises(InputError, match="every is 0; expected 1 or more"):
        FrameSaver(every=0)
    with pytest.raises(InputError, match="distinct is nan; expected 0 or more"):
        FrameSaver(distinct=float("nan"))
