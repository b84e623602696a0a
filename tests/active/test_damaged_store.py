"""Whatever stands in a column of a campaign's file: what was written comes back, or one error."""

import json
import shutil
import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from ase.build import molecule
from campaigns import tiny_campaign
from hypothesis import given, settings
from hypothesis import strategies as st

from blips.active.config import CampaignConfig, load_campaign
from blips.active.database import DATABASE
from blips.active.frames import to_json
from blips.active.store import CampaignStore, Pick
from blips.active.summary import campaign_summary
from blips.errors import BlipsError

RESULTS = {"energy": -1.5, "forces": np.full((4, 3), 0.25)}
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda some: (
        st.lists(some, max_size=4) | st.dictionaries(st.text(max_size=8), some, max_size=4)
    ),
    max_leaves=8,
)
CONTENT = {"number", "content", "checksum"}
CELLS = st.none() | NUMBERS | st.text(max_size=20) | st.binary(max_size=20) | VALUES.map(json.dumps)


def everything(folder: Path, config: CampaignConfig) -> str:
    """What a campaign and its summary read, as one text."""
    with CampaignStore(folder) as store:
        store.begin(config)
        found = [store.read_all(kind) for kind in ("select", "walk", "chunk", "labelled")]
        found += [store.last_round(), store.count("quarantined"), store.labelled()]
        for pick in store.picks():
            found += [vars(pick), store.attempts(pick)]
    return repr([found, campaign_summary(folder)])


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> CampaignConfig:
    return load_campaign(tiny_campaign(tmp_path_factory.mktemp("start")))


@pytest.fixture(scope="module")
def campaign(tmp_path_factory, config) -> Path:
    folder = tmp_path_factory.mktemp("campaign")
    with CampaignStore(folder) as store:
        store.begin(config)
        atoms = [molecule("NH3"), molecule("CH4")]
        chosen = [Pick(0, k, one, 0.5, {"rule": "random"}) for k, one in enumerate(atoms)]
        store.add_picks(chosen, 0, {"chosen": 2, "screened": 2})
        store.add_label(chosen[0], RESULTS)
        store.add_attempt(chosen[1], "no convergence", quarantine=True)
        store.write("walk", [(to_json(atoms[0]), {"walker": 0})], 1)
        store.write("chunk", [], 1)
    return folder


def columns(path: Path) -> list[tuple[str, str]]:
    with sqlite3.connect(path) as database:
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master")]
        tables = [name for name in tables if name.startswith("blips_") or name == "systems"]
        found = [
            (table, row[1])
            for table in tables
            for row in database.execute(f"PRAGMA table_info({table})")
        ]
    database.close()
    return found


@settings(max_examples=100)
@given(data=st.data())
def test_random_values_in_any_column_are_refused_or_change_nothing(campaign, config, data):
    table, column = data.draw(st.sampled_from(columns(campaign / DATABASE)))
    value = data.draw(CELLS)
    with TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(campaign, folder, dirs_exist_ok=True)
        with sqlite3.connect(folder / DATABASE) as damaging:
            try:
                damaging.execute(f"UPDATE {table} SET {column} = ?", (value,))
            except sqlite3.IntegrityError:
                return  # NULL where there must be something
        damaging.close()
        expected, said = everything(campaign, config), ""
        try:
            found = everything(folder, config)
        except BlipsError as error:
            found, said = expected, str(error)
        assert column not in CONTENT or found == expected
        assert "\n" not in said
