import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ase.io import write

from blips.data.structures import read_structures
from blips.errors import InputError
from helpers import TINY, morse_ammonia
from studies.matpes import data as matpes_data
from studies.matpes import run as matpes_run
from studies.matpes import study as matpes
from studies.runner import _check
from studies.spec import Layout, Run, RunSpec

MakeRun = Callable[..., Run]
SIZES = {"initial": 4, "pool": 6, "test": 3, "max_atoms": 4}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ammonia in place of the crystals."""
    path = tmp_path / "data" / matpes_data.SETS["mptrj"]
    path.parent.mkdir(parents=True)
    write(path, morse_ammonia(16, seed=0), format="extxyz")
    monkeypatch.setenv("BLIPS_DATA", str(tmp_path / "data"))
    return path


def tiny(name: str, seed: int = 0) -> RunSpec:
    """A run of the quick profile with a small model of random weights."""
    spec = next(s for s in matpes.specs("quick") if s.name == name)
    settings = {
        **spec.settings,
        "model": {"backbone": "painn", "hyperparameters": TINY},
        "data": {"name": "mptrj", **SIZES},
        "bootstrap": 5,
    }
    return replace(spec, settings=settings, seed=seed)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def run(spec: RunSpec, **needs: Path) -> Run:
        work = tmp_path / f"{spec.id}-{spec.hash}"
        work.mkdir(exist_ok=True)
        return Run(spec, work, tmp_path / "figures", needs)

    return run


def test_parts_are_apart_and_the_test_set_stays(data: Path, tmp_path: Path):
    folders = [tmp_path / f"seed{seed}" for seed in range(2)]
    for folder in folders:
        folder.mkdir()
    first, second = (
        matpes_data.write_parts({"name": "mptrj", **SIZES}, seed, folder)
        for seed, folder in enumerate(folders)
    )
    known, pool = (read_structures(path) for path in (first.initial, first.pool))
    everything = [atoms.positions.round(8).tobytes() for atoms in (*known, *pool, *first.test)]
    assert len(set(everything)) == sum(len(part) for part in (known, pool, first.test)) == 13
    for a, b in zip(first.test, second.test, strict=True):
        np.testing.assert_array_equal(a.positions, b.positions)
    assert first.pool.read_text() != second.pool.read_text()
    with pytest.raises(InputError, match="atoms to test and 0 others; 103 and 10 are"):
        matpes_data.write_parts({"name": "mptrj", **SIZES, "test": 103}, 0, tmp_path)


def test_hot_parts_are_of_the_same_compounds(data: Path, tmp_path: Path):
    made = [morse_ammonia(4, seed=0), [atoms[:3] for atoms in morse_ammonia(4, seed=1)]]
    made += [[atoms[:2] for atoms in morse_ammonia(1, seed=2)]]  # once, so of no use
    path = data.parents[1] / matpes_data.SETS["hot"]
    write(path, [frame for frames in made for frame in frames], format="extxyz")
    sizes = {"name": "hot", "max_atoms": 4, "initial": 2, "pool": 4, "test": 2}
    parts = matpes_data.write_parts(sizes, 0, tmp_path)
    assert sorted(len(atoms) for atoms in parts.test) == [3, 4]
    others = read_structures(parts.initial) + read_structures(parts.pool)
    assert sorted(len(atoms) for atoms in others) == [3, 3, 3, 4, 4, 4]
    tested = {atoms.positions.round(8).tobytes() for atoms in parts.test}
    assert tested.isdisjoint(atoms.positions.round(8).tobytes() for atoms in others)
    with pytest.raises(InputError, match="2 structures of at most 4 atoms to test and 6 others"):
        matpes_data.write_parts({**sizes, "test": 3}, 0, tmp_path)


def test_labels_are_looked_up(data: Path):
    structures = read_structures(data)
    calculator = matpes_data.KnownLabels([str(data)])
    atoms = structures[3].copy()
    atoms.calc = calculator
    assert atoms.get_potential_energy() == structures[3].get_potential_energy()
    np.testing.assert_array_equal(atoms.get_forces(), structures[3].get_forces())
    atoms.positions[0, 0] += 1e-3
    with pytest.raises(InputError, match="not among the labelled"):
        atoms.get_potential_energy()


def test_a_file_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("BLIPS_DATA", raising=False)
    with pytest.raises(InputError, match="data=FILE"):
        matpes_data.data_file("hot")
    with pytest.raises(InputError, match=r"no file MatPES\.json"):
        matpes_data.data_file("MatPES.json")


@pytest.mark.parametrize("profile", matpes.PROFILES)
def test_the_plain_model_follows_the_random_campaign(profile: str):
    specs = matpes.specs(profile, data="MatPES-PBE.json.gz")
    _check(specs)
    assert {spec.name for spec in specs} == set(matpes.METHODS)
    for spec in specs:
        assert spec.settings["data"]["name"] == "MatPES-PBE.json.gz"
        expected = (f"blip_random-seed{spec.seed}",) if spec.name == "no_blip" else ()
        assert spec.needs == expected


def test_campaigns_choose_from_the_pool(data: Path, make_run: MakeRun):
    found = matpes_run.execute(make_run(tiny("blip_energy")))
    assert found.details["labels"] == [4, 6]
    (picks,) = found.details["picks"]
    assert len(set(picks)) == 2
    assert set(picks) <= set(range(6))
    last = found.metrics["round1_forces_mae"]["value"]
    assert last != found.metrics["round0_forces_mae"]["value"]
    assert found.metrics.keys() >= {c.metric for c in matpes._columns(1)}


def test_random_campaign_and_its_plain_twin(data: Path, make_run: MakeRun, tmp_path: Path):
    random = make_run(tiny("blip_random"))
    plain = make_run(tiny("no_blip"), **{random.spec.id: random.folder})
    first, second = (matpes_run.execute(run) for run in (random, plain))
    assert first.details["labels"] == second.details["labels"] == [4, 6]
    assert "final_forces_ece" not in second.metrics

    layout = Layout.of("matpes", "quick", tmp_path / "results", tmp_path / "runs")
    layout.results.mkdir(parents=True)
    specs = [random.spec, plain.spec]
    for spec, findings in zip(specs, (first, second), strict=True):
        content = {"hash": spec.hash, "metrics": findings.metrics}
        layout.result_file(spec).write_text(json.dumps(content))
    text = matpes.table(specs, layout).markdown()
    error = 1e3 * (second.metrics["round1_forces_mae"]["value"] or 0.0)
    row = next(line for line in text.splitlines() if line.startswith("| no BLIP"))
    assert f"| {error:.1f} | 110.8 |" in row
    matpes.draw(specs, layout)
    assert (layout.figures / "errors.png").stat().st_size > 1000
