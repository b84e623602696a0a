"""Rounds with real quantum chemistry."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from ase.build import bulk
from campaigns import tiny_campaign

from blips.active import load_campaign, run_campaign
from blips.active.calculators import make_calculator

PSEUDOPOTENTIALS = Path("/usr/share/espresso/pseudo")


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


@pytest.mark.slow
def test_quantum_espresso_labels_silicon(tmp_path):
    found = sorted(PSEUDOPOTENTIALS.glob("Si.*UPF")) if PSEUDOPOTENTIALS.is_dir() else []
    if shutil.which("pw.x") is None or not found:
        pytest.skip("Quantum ESPRESSO (pw.x) or its pseudopotentials are not installed")
    atoms = bulk("Si")
    atoms.positions[0] += 0.05
    atoms.calc = make_calculator(
        "espresso",
        {
            "command": "pw.x",
            "pseudo_dir": str(PSEUDOPOTENTIALS),
            "directory": str(tmp_path),
            "pseudopotentials": {"Si": found[0].name},
            "input_data": {"system": {"ecutwfc": 12}, "control": {"tprnfor": True}},
            "kpts": (2, 2, 2),
        },
    )
    forces = atoms.get_forces()
    assert atoms.get_potential_energy() < 0
    assert np.abs(forces).max() > 0.1
