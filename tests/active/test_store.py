"""The campaign's file: transactions, the lock, damage, lack of room and of rights."""

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import ase.db
import numpy as np
import pytest
from ase.build import bulk, molecule
from campaigns import tiny_campaign

from blips.active.config import load_campaign
from blips.active.database import DATABASE, ENTRIES, CampaignError
from blips.active.frames import digest, from_json, to_json
from blips.active.store import CampaignStore, Pick
from blips.errors import BlipsError


def picks(count=3, round=0):
    found = []
    for number in range(count):
        atoms = molecule("NH3")
        atoms.positions += np.random.default_rng([round, number]).normal(scale=0.1, size=(4, 3))
        found.append(Pick(round, number, atoms, 0.5, {"score": "random"}))
    return found


RESULTS = {"energy": -1.5, "forces": np.full((4, 3), 0.25)}


def test_structures_keep_every_bit():
    for atoms in (molecule("NH3"), bulk("Cu") * (2, 1, 1)):
        atoms.positions += np.random.default_rng(0).normal(size=atoms.positions.shape)
        again = from_json(to_json(atoms))
        assert np.array_equal(atoms.positions, again.positions)
        assert np.array_equal(atoms.cell.array, again.cell.array)
        assert digest(atoms) == digest(again)


def test_labels_are_rows_that_ase_reads(tmp_path):
    with CampaignStore(tmp_path) as store:
        chosen = picks()
        store.add_picks(chosen, 0, {"chosen": 3})
        for pick in reversed(chosen):  # in the order in which workers finish
            store.add_label(pick, {**RESULTS, "energy": float(pick.number)})
        assert [a.get_potential_energy() for a in store.labelled()] == [0.0, 1.0, 2.0]
        assert store.labelled(before=0) == []
    with ase.db.connect(tmp_path / DATABASE) as rows:
        assert sorted(row.pick for row in rows.select(round=0)) == [0, 1, 2]
        atoms = rows.get_atoms(pick=1)
    assert np.array_equal(atoms.positions, chosen[1].atoms.positions)
    assert np.array_equal(atoms.get_forces(), RESULTS["forces"])
    assert [p.name for p in tmp_path.iterdir() if "wal" in p.name or "shm" in p.name] == []


def test_a_label_is_written_once(tmp_path):
    with CampaignStore(tmp_path) as store:
        chosen = picks()
        store.add_picks(chosen, 0, {})
        store.add_label(chosen[0], RESULTS)
        with pytest.raises(CampaignError, match="labelled before"):
            store.add_label(chosen[0], RESULTS)
        assert len(store.labelled()) == 1
    with ase.db.connect(tmp_path / DATABASE) as rows:
        assert rows.count() == 1  # the second row was taken back with the rest


def test_attempts_and_quarantine(tmp_path):
    with CampaignStore(tmp_path) as store:
        chosen = picks()
        store.add_picks(chosen, 0, {})
        store.add_attempt(chosen[1], "first", quarantine=False)
        store.add_attempt(chosen[1], "second", quarantine=True)
        assert store.attempts(chosen[1]) == ["first", "second"]
        assert [p.number for p in store.picks(status="open")] == [0, 2]
        assert store.count("quarantined") == 1


def test_settings_may_change_only_where_nothing_was_decided_by_them(tmp_path):
    config = tiny_campaign(tmp_path)
    with CampaignStore(tmp_path) as store:
        store.begin(load_campaign(config))
        store.begin(load_campaign(config, "stop.rounds=7", "executor.workers=5"))
        with pytest.raises(CampaignError, match=r"select\.batch, training\.epochs differ"):
            store.begin(load_campaign(config, "select.batch=9", "training.epochs=9"))


def test_a_second_process_is_refused(tmp_path):
    code = f"from blips.active.store import CampaignStore; CampaignStore({str(tmp_path)!r})"
    with CampaignStore(tmp_path) as store:
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert second.returncode == 1
        assert f"process {os.getpid()} works in {tmp_path} already" in second.stderr
        with CampaignStore(tmp_path, writable=False) as reader:
            assert reader.last_round() == 0
            with pytest.raises(CampaignError, match="opened for reading"):
                reader.write("train", {})
        store.write("train", {})
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("damage", ["header", "middle", "short", "text", "foreign"])
def test_a_damaged_database_is_named_and_left_alone(tmp_path, damage):
    with CampaignStore(tmp_path) as store:
        store.add_picks(picks(40), 0, {})
    path = tmp_path / DATABASE
    content = bytearray(path.read_bytes())
    if damage == "header":
        content[:16] = b"x" * 16
    elif damage == "middle":
        content[4096:] = os.urandom(len(content) - 4096)
    elif damage == "short":
        del content[len(content) // 2 :]
    elif damage == "text":
        content = bytearray(b"these are not the labels you are looking for" * 100)
    path.write_bytes(content)
    if damage == "foreign":
        path.unlink()
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE cats (name TEXT)")
        other.close()
    before = path.read_bytes()
    with pytest.raises(CampaignError, match=r"campaign\.db.*(damaged|no campaign)"):
        CampaignStore(tmp_path)
    assert path.read_bytes() == before


@pytest.fixture
def disk_of():
    """Files of this process cannot grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_nothing(tmp_path, disk_of):
    with CampaignStore(tmp_path) as store:
        store.add_picks(picks(400), 0, {})
        chosen = store.picks()
        for pick in chosen[:5]:
            store.add_label(pick, RESULTS)
        disk_of(os.path.getsize(f"{store.path}-wal") + 40_000)

        def label_all():
            for pick in chosen[5:]:
                store.add_label(pick, RESULTS)

        with pytest.raises(CampaignError, match="disk is full or failing"):
            label_all()
        written = store.count("labelled")
        assert 5 <= written < 400
        disk_of(resource.RLIM_INFINITY)
        assert len(store.labelled()) == written
        for pick in store.picks(status="open")[:3]:
            store.add_label(pick, RESULTS)  # there is room again
    with CampaignStore(tmp_path) as store:
        assert store.count("labelled") == written + 3


def test_a_folder_without_rights_is_named(tmp_path):
    with CampaignStore(tmp_path / "campaign") as store:
        store.add_picks(picks(), 0, {})
    code = (
        "import os, sys, json\n"
        "from blips.active.store import CampaignStore\n"
        "from blips.active.database import CampaignError\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "for folder in sys.argv[1:]:\n"
        "    try: CampaignStore(folder)\n"
        "    except CampaignError as error: print(json.dumps(str(error)))\n"
    )
    folder = tmp_path / "campaign"
    folder.chmod(0o555)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(parent.stat().st_mode | 0o055)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder), str(folder / "new")],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        folder.chmod(0o755)
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(messages) == 2
    assert all("ermission" in m and "campaign.db" in m for m in messages), messages


def test_names_that_are_no_text_are_damage(tmp_path):
    with CampaignStore(tmp_path) as store:
        store.add_picks(picks(), 0, {})
    path = tmp_path / DATABASE
    path.write_bytes(
        path.read_bytes().replace(b"CREATE TABLE blips_campaign", b"CREATE \x92ABLE blips_campaign")
    )
    with pytest.raises(CampaignError, match="damaged"):
        CampaignStore(tmp_path)


def test_a_disk_that_was_full_as_the_campaign_was_made_costs_nothing(tmp_path):
    """SQLite had written its header, and no table."""
    connection = sqlite3.connect(tmp_path / DATABASE)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    assert (tmp_path / DATABASE).stat().st_size > 0
    with pytest.raises(CampaignError, match="holds no campaign"):
        CampaignStore(tmp_path, writable=False)
    with CampaignStore(tmp_path) as store:
        assert store.labelled() == []


def test_a_folder_without_campaign_is_named(tmp_path):
    with pytest.raises(CampaignError, match="holds no campaign"):
        CampaignStore(tmp_path, writable=False)


@pytest.mark.parametrize(
    ("statement", "read"),
    [
        ("SET content = '{\"a\": ' WHERE kind = 'config'", lambda s: s.read("config")),
        ("SET content = 'nonsense' WHERE kind = 'select'", lambda s: s.read("select")),
        ("SET content = '{}' WHERE kind = 'select'", lambda s: s.read("select")),
        ("SET checksum = '' WHERE kind = 'pick'", lambda s: s.picks()),
        ("SET number = 7 WHERE kind = 'pick' AND number = 1", lambda s: s.picks()),
        ("SET content = X'92' WHERE kind = 'pick'", lambda s: s.picks()),
        ("SET kind = 'walk' WHERE kind = 'chunk'", lambda s: s.read_all("walk")),
        ("SET content = '[]' WHERE kind = 'walk'", lambda s: s.read_all("walk", 1)),
        ("SET content = '{\"row\": 1}' WHERE kind = 'labelled'", lambda s: s.labelled()),
        ("UPDATE systems SET positions = X'00'", lambda s: s.labelled()),
        ("UPDATE systems SET calculator_parameters = 'x', data = 'x'", lambda s: s.labelled()),
    ],
)
def test_damaged_json_in_a_sound_file_is_one_line(tmp_path, statement, read):
    with CampaignStore(tmp_path) as store:
        store.begin(load_campaign(tiny_campaign(tmp_path)))
        chosen = picks()
        store.add_picks(chosen, 0, {"chosen": 3})
        store.add_label(chosen[0], RESULTS)
        store.write("walk", [(to_json(chosen[0].atoms), {"walker": 0})], 1)
        store.write("chunk", [], 1, 64)
        read(store)
    if statement.startswith("SET"):
        statement = f"UPDATE {ENTRIES} {statement}"
    with sqlite3.connect(tmp_path / DATABASE) as damaging:
        damaging.execute(statement)
    damaging.close()
    with CampaignStore(tmp_path) as store, pytest.raises(BlipsError) as raised:
        read(store)
    message = str(raised.value)
    assert "\n" not in message
    assert "damaged" in message


def test_a_reader_undoes_what_a_killed_writer_had_begun(tmp_path):
    with CampaignStore(tmp_path) as store:
        store.add_picks(picks(), 0, {})
    script = (
        "import os, signal, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('PRAGMA cache_size = 1'); c.execute('BEGIN IMMEDIATE');"
        "c.execute('CREATE TABLE half (x)');"
        "c.executemany('INSERT INTO half VALUES (?)', [('x' * 1000,)] * 1000);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / DATABASE
    done = subprocess.run([sys.executable, "-c", script, str(path)])
    assert done.returncode == -signal.SIGKILL
    assert Path(f"{path}-journal").stat().st_size > 0
    with CampaignStore(tmp_path, writable=False) as store:
        assert len(store.picks(0)) == 3
        assert not store.connection.execute(
            "SELECT * FROM sqlite_master WHERE name = 'half'"
        ).fetchall()
