"""Labels: the right numbers, and calculators that hang, die, raise or talk nonsense."""

import subprocess
import sys
import time

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.emt import EMT
from numpy.testing import assert_allclose

from blips.active.frames import to_json
from blips.active.labeller import label, read_label
from blips.errors import ConfigError, InputError
from blips.sim.pyscf import PySCF
from blips.sim.reference import make_calculator


def job(folder, atoms, **changes):
    return {
        "structure": to_json(atoms),
        "calculator": "emt",
        "options": {},
        "trust": False,
        "stress": False,
        "max_force": None,
        "timeout": 60.0,
        "threads": 1,
        "file": str(folder / "label.json"),
        **changes,
    }


def troubled(folder, trouble, **changes):
    return job(
        folder,
        molecule("NH3"),
        calculator="counting.Troubled",
        options={"trouble": trouble, "below": 100.0},
        trust=True,
        **changes,
    )


def test_labels_are_in_the_journal_when_the_answer_comes(tmp_path):
    atoms = bulk("Cu", cubic=True)
    atoms.positions[0] += 0.1
    entry = label(job(tmp_path, atoms, stress=True))
    assert read_label(tmp_path / "label.json") == entry
    atoms.calc = EMT()
    assert entry["results"]["energy"] == atoms.get_potential_energy()
    assert_allclose(entry["results"]["forces"], atoms.get_forces(), atol=1e-12)
    assert_allclose(entry["results"]["stress"], atoms.get_stress(), atol=1e-12)
    assert read_label(tmp_path / "another.json") is None


def test_a_finished_label_is_not_computed_again(tmp_path):
    calls = tmp_path / "calls.txt"
    options = {"file": str(calls)}
    one = job(
        tmp_path, molecule("NH3"), calculator="counting.Counting", options=options, trust=True
    )
    for _ in range(3):
        assert "results" in label(one)
    assert len(calls.read_text().splitlines()) == 1


def test_a_hung_label_is_killed_and_the_next_one_is_answered(tmp_path):
    begun = time.monotonic()
    answer = label(troubled(tmp_path, "hang", timeout=1.0))
    assert "no label within 1 s" in answer["error"]
    assert not answer["final"]
    assert time.monotonic() - begun < 30
    assert "results" in label(job(tmp_path, molecule("NH3")))


def test_a_process_that_dies_is_told(tmp_path):
    answer = label(troubled(tmp_path, "die"))
    assert "the process died (exit code 3)" in answer["error"]


def test_an_error_has_its_log_and_nonsense_is_final(tmp_path):
    assert "not amused" in label(troubled(tmp_path, "raise"))["error"]
    answer = label(troubled(tmp_path, "nan"))
    assert answer == {
        "error": "the calculator gave forces that are not finite numbers",
        "final": True,
    }
    answer = label(job(tmp_path, molecule("NH3"), max_force=1e-9))
    assert "exceeds label.max_force" in answer["error"]
    assert answer["final"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calculator": "vasp2000"}, "unknown calculator 'vasp2000'; use gfn2-xtb"),
        ({"calculator": "counting.Counting"}, "set label.trust"),
        ({"calculator": "no.such.Class", "trust": True}, "cannot be imported"),
        (
            {"calculator": "counting.Counting", "options": {"colour": 1}, "trust": True},
            "options do not fit counting.Counting",
        ),
    ],
)
def test_a_wrong_setup_is_no_failed_label(tmp_path, changes, message):
    assert message in label(job(tmp_path, molecule("NH3"), **changes))["setup"]


def test_gfn2_forces_are_the_derivative_of_its_energy(tmp_path):
    pytest.importorskip("tblite")
    atoms = molecule("NH3")
    atoms.positions[1] += 0.07
    entry = label(job(tmp_path, atoms, calculator="gfn2-xtb"))
    energies = []
    for sign in (1, -1):
        moved = atoms.copy()
        moved.positions[1, 0] += sign * 1e-3
        moved.calc = make_calculator("gfn2-xtb", {})
        energies.append(moved.get_potential_energy())
    assert_allclose(
        entry["results"]["forces"][1][0], -(energies[0] - energies[1]) / 2e-3, atol=1e-3
    )


def test_labels_of_gfn2_do_not_depend_on_those_before():
    pytest.importorskip("tblite")
    atoms = molecule("NH3")
    before = atoms.copy()
    before.rattle(0.1, seed=1)
    calculator = make_calculator("gfn2-xtb", {})
    calculator.get_potential_energy(before)
    alone = make_calculator("gfn2-xtb", {})
    assert calculator.get_potential_energy(atoms) == alone.get_potential_energy(atoms)
    assert (calculator.get_forces(atoms) == alone.get_forces(atoms)).all()


def test_pyscf_agrees_with_the_shipped_labels():
    pytest.importorskip("pyscf")
    pytest.importorskip("dftd3")
    from blips.data import ammonia

    known = ammonia.load_ammonia("test_ood")[3]
    atoms = known.copy()
    atoms.calc = PySCF()
    energy = atoms.get_potential_energy() - ammonia.MINIMUM_ENERGY
    assert_allclose(energy, known.get_potential_energy(), atol=1e-5)
    assert_allclose(atoms.get_forces(), known.get_forces(), atol=1e-4)


def test_pyscf_refuses_crystals():
    with pytest.raises(InputError, match="treats molecules"):
        PySCF().get_potential_energy(bulk("Cu"))
    with pytest.raises(InputError, match="NaN"):
        PySCF().get_potential_energy(Atoms("H2", [[0, 0, 0], [0, 0, np.nan]]))


def test_espresso_gets_a_profile(tmp_path):
    options = {"command": sys.executable, "pseudo_dir": str(tmp_path), "kpts": [2, 2, 2]}
    calculator = make_calculator(
        "espresso", {**options, "input_data": {"tstress": False}}, trust=True
    )
    assert calculator.profile.command == sys.executable
    control = calculator.parameters["input_data"]["control"]
    assert (control["tprnfor"], control["tstress"]) == (True, False)
    with pytest.raises(ConfigError, match=r"no-such-pw\.x.*install Quantum ESPRESSO"):
        make_calculator("espresso", {**options, "command": "no-such-pw.x -nk 2"}, trust=True)
    with pytest.raises(ConfigError, match="not the full path of a folder"):
        make_calculator("espresso", {**options, "pseudo_dir": "."}, trust=True)
    with pytest.raises(ConfigError, match="do not fit"):
        make_calculator("gfn2-xtb", {"verbosity": 0, "method": "twice"})


def test_labels_of_all_kinds_are_finite(tmp_path):
    atoms = molecule("H2O")
    entry = label(job(tmp_path, atoms))
    assert np.isfinite(entry["results"]["forces"]).all()
    assert entry["seconds"] >= 0


def test_a_labeller_starts_without_torch():
    """Every worker starts one; torch would take most of its time and memory."""
    program = "import sys, blips.active.labeller; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
