"""Predictions against labels: which structures count, and what is said in words."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from blips.errors import InputError
from blips.prediction import Prediction
from blips.uq.assess import References, assess, calibrate, verdict

COUNTS = [2, 3, 1, 2, 2, 3]
RNG = np.random.default_rng(0)
ENERGY, FORCES = RNG.normal(size=6), RNG.normal(size=(13, 3))
STRESS = RNG.normal(size=(6, 6))


def structures(energies=range(6), forces=range(6), stresses=()):
    """Six structures, of which these have labels."""
    found = []
    for k, (count, first) in enumerate(zip(COUNTS, np.cumsum([0, *COUNTS]), strict=False)):
        atoms = Atoms(f"H{count}", RNG.normal(size=(count, 3)), cell=3 * np.eye(3), pbc=True)
        labels = {"energy": ENERGY[k]} if k in energies else {}
        labels |= {"forces": FORCES[first : first + count]} if k in forces else {}
        labels |= {"stress": STRESS[k]} if k in stresses else {}
        atoms.calc = SinglePointCalculator(atoms, **labels)
        found.append(atoms)
    return found


def prediction(error=0.1, std=0.1, stress=None):
    """What misses every label by `error`."""
    return Prediction(
        np.array(COUNTS),
        "mc",
        8,
        energy=ENERGY + error,
        energy_std=np.full(6, std) * np.arange(1, 7),
        forces=FORCES + error,
        forces_std=np.full((13, 3), std),
        stress=stress,
    )


def test_every_metric_uses_the_structures_that_have_its_label():
    frames = structures(energies=(0, 2, 3, 5), forces=(1, 2, 3, 4, 5))
    found = assess(prediction(), References.of(frames), n_bootstrap=20)
    assert found.n_structures == 6
    assert found.n_atoms == 13
    assert found.labelled == {"energy": 4, "forces": 5}
    assert found.element_counts == {"H": 11}
    chosen = np.array([0, 2, 3, 5])
    p = prediction()
    counts = np.array(COUNTS)
    some = Prediction(
        counts[chosen], "mc", 8, energy=p.energy[chosen], energy_std=p.energy_std[chosen]
    )
    alone = assess(some, References.of([frames[k] for k in chosen]), n_bootstrap=20)
    assert found.energy == alone.energy
    assert found.energy_per_atom == alone.energy_per_atom
    some = Prediction(counts[1:], "mc", 8, forces=p.forces[2:], forces_std=p.forces_std[2:])
    alone = assess(some, References.of(frames[1:]), n_bootstrap=20)
    assert found.forces == alone.forces
    assert found.forces_per_structure == alone.forces_per_structure
    assert found.per_element == alone.per_element
    json.dumps(found.to_dict(), allow_nan=False)


def test_stress_is_judged_where_it_is_predicted_and_labelled():
    frames = structures(stresses=(0, 4))
    references = References.of(frames)
    full = np.zeros((6, 3, 3))
    found = assess(prediction(stress=full), references, n_bootstrap=0)
    assert found.labelled["stress"] == 2
    assert found.stress["mae"].value == pytest.approx(np.abs(STRESS[[0, 4]]).mean())
    assert "Stresses are off by" in verdict(found)
    assert ("stress", "mae", "eV/A^3") in found.rows()
    assert assess(prediction(), references, n_bootstrap=0).stress == {}
    frames[1].pbc = False
    frames[1].calc = None  # its labels were of the crystal
    assert References.of(frames).stress is None  # it cannot be predicted for all
    assert References.of(structures()).stress is None


def test_structures_without_labels_are_refused_unless_none_are_needed():
    frames = structures((), ())
    with pytest.raises(InputError, match="no structure has an energy or forces"):
        References.of(frames)
    assert References.of(frames, required=False).forces is None
    with pytest.raises(InputError, match="empty"):
        References.of([])


def test_the_verdict_has_one_sentence_for_each_quantity():
    text = verdict(assess(prediction(), References.of(structures()), n_bootstrap=100))
    first, forces, energies = text.splitlines()
    assert first == "6 structures, all with energies and forces."
    assert forces.startswith("Forces are off by 0.1 eV/Å on average (RMSE 0.1); ")
    assert "100 % lie within their 90 % interval" in forces
    assert "rho = " in forces
    assert "the size of the predicted force alone: " in forces
    mean = np.mean(0.1 / np.array(COUNTS))
    assert f"Energies are off by {mean:.3g} eV/atom on average (0.1 eV a structure)" in energies
    assert "predicted force" not in energies


@pytest.mark.parametrize(
    ("std", "words"),
    [(0.01, "too small (RMS error 10 std): 0 %"), (1.0, "too large (RMS error 0.1 std): 100 %")],
)
def test_the_verdict_says_whether_error_bars_are_right(std, words):
    found = assess(prediction(std=std), References.of(structures()), n_bootstrap=100)
    assert words in verdict(found).splitlines()[1]


def test_the_verdict_finds_one_sided_errors_and_missing_labels():
    rng = np.random.default_rng(1)
    error = np.abs(rng.normal(size=400))
    ones = np.ones(400, dtype=int)
    atoms = Prediction(ones, "mc", 8, energy=np.zeros(400), energy_std=np.ones(400))
    found = assess(atoms, References(ones, ones, error, None), n_bootstrap=50)
    assert "about right, but most errors have one sign" in verdict(found)
    error *= rng.choice([-1, 1], 400)
    both = assess(atoms, References(ones, ones, error, None), n_bootstrap=50)
    assert "about right: " in verdict(both)
    frames = structures(energies=(1,), forces=range(5))
    text = verdict(assess(prediction(), References.of(frames), n_bootstrap=0))
    assert text.startswith("Of 6 structures, 1 have energies, 5 have forces, 0 have stresses; ")
    plain = replace(prediction(), energy_std=None, forces_std=None)
    text = verdict(assess(plain, References.of(structures()), n_bootstrap=0))
    assert text.count("there are no error bars") == 2


class Fixed:
    """A model that predicts the same whatever it is given."""

    calibration: dict = {}  # noqa: RUF012
    backbone = SimpleNamespace(labels=None)

    def predict(self, atoms, calibrated, **options):
        return prediction(error=0.2, std=0.1)


def test_calibration_uses_what_is_labelled_and_says_what_it_gained():
    said = []
    model = Fixed()
    found = calibrate(model, structures(energies=(0, 1)), say=said.append)
    assert model.calibration == found
    assert found["forces"].factor == pytest.approx(2.0)
    assert found["energy"].factor == pytest.approx(np.sqrt((2**2 + 1**2) / 2))
    assert said[0].startswith("Energies of 2 structures: every std is multiplied by 1.58. ")
    assert said[1] == (
        "Forces of 6 structures: every std is multiplied by 2. Within their 90 % interval lay "
        "0 % of these labels before, 100 % do now."
    )
    model.predict = lambda atoms, calibrated: replace(
        prediction(error=0.2), forces_std=np.where(np.arange(39).reshape(13, 3) % 3, 0.1, 0.0)
    )
    certain = calibrate(model, structures())  # what symmetry makes certain does not count
    assert certain["forces"].factor == pytest.approx(2.0)
    with pytest.raises(InputError, match="unknown calibration"):
        calibrate(model, structures(), kind="temperature")
