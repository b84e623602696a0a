from pathlib import Path

import numpy as np
import pytest
from ase import Atoms

from studies.errorbars import metatrain_llpr
from studies.errorbars import run as errorbars_run
from studies.errorbars import study as errorbars
from studies.errorbars.data import TESTED, evenly, load_set
from studies.spec import Run

QUICK = {spec.name: spec for spec in errorbars.specs("quick") if spec.seed == 0}


def test_conditioned_error_bars_are_those_of_the_plain_models_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base = Run(QUICK["nh3-base"], tmp_path / "base", tmp_path, {})
    plain = errorbars_run.execute(base)
    needs = {base.spec.id: base.folder}
    run = Run(QUICK["nh3-conditioned"], tmp_path / "conditioned", tmp_path, needs)
    found = errorbars_run.execute(run)
    for name in ("near_forces_mae", "far_forces_mae"):
        assert found.metrics[name]["value"] == pytest.approx(plain.metrics[name]["value"], rel=1e-5)
    assert "near_forces_coverage_90" not in plain.metrics
    assert "calibration" not in found.details  # its scale is part of the posterior
    curve = found.details["covered"]["far"]
    assert len(curve) == len(errorbars_run.LEVELS)
    assert curve == sorted(curve)
    position = errorbars_run.LEVELS.index(0.9)
    assert curve[position] == pytest.approx(found.metrics["far_forces_coverage_90"]["value"])

    data = load_set("nh3")
    for atoms in data.far:
        assert atoms.calc is not None
        atoms.calc.results["forces"] = -3.0 * atoms.calc.results["forces"]
    monkeypatch.setattr(errorbars_run, "load_set", lambda name: data)
    again = errorbars_run.execute(run)
    assert again.details["posterior"] == found.details["posterior"]  # no far label was looked at
    assert again.metrics["near_forces_nll"] == found.metrics["near_forces_nll"]
    assert again.metrics["far_forces_nll"] != found.metrics["far_forces_nll"]


def test_metatrain_is_scored_on_the_frames_of_the_study():
    frames = [Atoms("H2", positions=[[0, 0, 0], [0, 0, k]]) for k in range(2 * TESTED + 50)]
    numbers = np.arange(len(frames), dtype=float)
    forces = np.repeat(numbers, 6).reshape(-1, 3)  # every component of frame k is k
    energies = dict.fromkeys(("energy", "energy_std", "ensemble_std"), numbers)
    arrays = {**energies, "forces": forces, "forces_std": forces, "seconds": np.array(1.5)}
    chosen, found = metatrain_llpr.tested(frames, arrays)
    assert chosen == evenly(frames, TESTED)
    heights = np.array([atoms.positions[1, 2] for atoms in chosen])
    np.testing.assert_array_equal(found["energy"], heights)
    np.testing.assert_array_equal(found["ensemble_std"], heights)
    assert found["seconds"] == 1.5
    np.testing.assert_array_equal(found["forces"], np.repeat(heights, 6).reshape(-1, 3))
