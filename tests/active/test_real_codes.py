"""Rounds with real quantum chemistry."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from ase.build import bulk
from campaigns import tiny_campaign
from numpy.testing import assert_allclose

from blips.active import load_campaign, run_campaign
from blips.active.frames import to_json
from blips.active.labeller import label

PSEUDOPOTENTIALS = Path("/usr/share/espresso/pseudo")  # of Debian's package quantum-espresso-data
SILICON = "Si.pz-vbc.UPF"


def test_a_round_with_gfn2(tmp_path):
    pytest.importorskip("tblite")
    config = tiny_campaign(tmp_path, label={"calculator": "gfn2-xtb"}, stop={"rounds": 1})
    summary = run_campaign(load_campaign(config), display=False)
    assert summary["labels"] == 9
    energies = [pick["atoms"].get_potential_energy() for pick in summary["picks"]]
    assert all(-122 < energy < -110 for energy in energies)  # the molecule's is -120.4 eV


@pytest.mark.slow
def test_a_round_with_density_functional_theory(tmp_path):
    """BP86-D3(BJ)/def2-SVP by PySCF: four labels, a model, two more that it asked for."""
    pytest.importorskip("pyscf")
    pytest.importorskip("dftd3")
    config = tiny_campaign(
        tmp_path,
        initial={"count": 4},
        select={"batch": 2},
        label={"calculator": "pyscf", "timeout": 300.0},
        stop={"rounds": 1},
    )
    summary = run_campaign(load_campaign(config), display=False)
    assert (summary["labels"], summary["quarantined"]) == (6, 0)
    for pick in summary["picks"]:
        assert -1538 < pick["atoms"].get_potential_energy() < -1530  # the minimum: -1537.735 eV
        assert np.abs(pick["atoms"].get_forces().sum(0)).max() < 1e-4


@pytest.fixture
def silicon_job(tmp_path):
    """A job for the labeller: a cell of silicon by Quantum ESPRESSO."""
    if shutil.which("pw.x") is None or not (PSEUDOPOTENTIALS / SILICON).is_file():
        pytest.skip("Quantum ESPRESSO (pw.x) or its pseudopotentials are not installed")
    atoms = bulk("Si")
    atoms.positions[0] += 0.05

    def make(name, shift=0.0, **electrons):
        moved = atoms.copy()
        moved.positions[0, 0] += shift
        options = {
            "pseudopotentials": {"Si": SILICON},
            "input_data": {"ecutwfc": 12, "conv_thr": 1e-9, **electrons},
            "kpts": [2, 2, 2],
        }
        return {
            "structure": to_json(moved),
            "calculator": "espresso",
            "options": options,
            "trust": False,
            "stress": True,
            "max_force": None,
            "timeout": 120.0,
            "threads": 1,
            "file": str(tmp_path / f"{name}.json"),
        }

    return make


def test_quantum_espresso_labels_silicon(silicon_job):
    """Forces are the derivative of the energy, in one run of pw.x with the stress."""
    jobs = [silicon_job(name, shift) for name, shift in (("0", 0.0), ("+", 0.01), ("-", -0.01))]
    here, plus, minus = (label(job)["results"] for job in jobs)
    forces, stress = np.array(here["forces"]), np.array(here["stress"])
    assert here["energy"] == pytest.approx(-212.408, abs=0.05)  # eV, two atoms in LDA
    assert_allclose(forces.sum(0), 0, atol=1e-3)
    assert_allclose(forces[0, 0], -(plus["energy"] - minus["energy"]) / 0.02, rtol=2e-3)
    assert_allclose(stress[:3], stress[0], rtol=1e-3)  # the atom moved along the diagonal
    assert stress.shape == (6,)


def test_quantum_espresso_that_does_not_converge_is_told_with_its_log(silicon_job):
    answer = label(silicon_job("short", electron_maxstep=1))
    assert not answer["final"]
    assert "espresso.pwo" in answer["error"]
    assert "convergence NOT achieved" in answer["error"]
    assert "results" in label(silicon_job("sound"))  # and the next one is answered


def test_a_campaign_labels_silicon_with_quantum_espresso(silicon_job, tmp_path):
    import ase.io

    label_options = {"calculator": "espresso", "options": silicon_job("0")["options"]}
    config = tiny_campaign(
        tmp_path,
        initial={"count": 3},  # one of them for validation
        select={"batch": 1},
        explore={"walkers": 1},
        label=label_options,
        stop={"rounds": 1},
    )
    ase.io.write(config["initial"]["structures"], bulk("Si"))
    summary = run_campaign(load_campaign(config), display=False)
    assert (summary["labels"], summary["quarantined"]) == (4, 0)
    for pick in summary["picks"]:
        assert -213 < pick["atoms"].get_potential_energy() < -210
