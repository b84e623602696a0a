"""Pools of structures and the command: real CHGNet, files, resuming, failures."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from ase.build import bulk
from ase.io import write
from typer.testing import CliRunner

from blips.cli import app
from blips.errors import InputError
from blips.properties import Properties, PropertyError, run_pool
from blips.properties import pool as pools

pytest.importorskip("chgnet.model", reason="chgnet is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
SALT = bulk("NaCl", "rocksalt", a=5.64)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_finished_structures_are_not_computed_again(tmp_path, monkeypatch):
    oxide = bulk("MgO", "rocksalt", a=4.2)
    first = dict(run_pool("relax", "chgnet", [SALT, oxide], tmp_path, members=4))
    calls = []
    plain = pools.compute
    monkeypatch.setattr(pools, "compute", lambda *job: calls.append(job[2]) or plain(*job))
    moved = oxide.copy()
    moved.rattle(0.01)
    again = dict(run_pool("relax", "chgnet", [SALT, moved], tmp_path, members=4))
    assert calls == [moved]
    assert again[0]["energy"].value == first[0]["energy"].value
    assert again[0]["energy"].members == pytest.approx(first[0]["energy"].members)
    dict(run_pool("relax", "chgnet", [SALT], tmp_path, members=5))
    assert len(calls) == 2  # with other options it is another result


def test_one_that_fails_is_named_and_the_others_go_on(tmp_path):
    far = SALT.copy()
    far.set_cell(far.cell * 1.08, scale_atoms=True)
    options = {"members": 4, "steps": 1, "fmax": 0.2}
    with ThreadPoolExecutor(1) as executor:
        found = dict(run_pool("relax", "chgnet", [far, SALT], tmp_path, executor, **options))
    assert isinstance(found[0], PropertyError)
    assert isinstance(found[1], Properties)
    assert "after 1 steps" in json.loads((tmp_path / "relax-0000.json").read_text())["error"]
    with pytest.raises(InputError, match="unknown property 'hardness'"):
        dict(run_pool("hardness", "chgnet", [SALT], tmp_path))


def test_the_command_writes_json_and_a_figure(tmp_path):
    write(tmp_path / "salt.cif", SALT)
    out = tmp_path / "out"
    result = invoke(
        "property", "equation_of_state", "chgnet", tmp_path / "salt.cif", "-o", out, "--json"
    )
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    volume = found["quantities"]["volume"]
    assert 42 < volume["value"] < 50  # 44.9 by experiment
    assert 0.1 < volume["std"] < 5
    saved = json.loads((out / "equation_of_state-0000.json").read_text())
    assert len(saved["quantities"]["volume"]["members"]) == 16
    assert (out / "equation_of_state-0000.png").stat().st_size > 10_000
