"""SIGKILL at thirty random moments of all stages: same labels, none repeated, none lost.

With workers in processes of their own, of which none may outlive its campaign, at fewer moments:
starting them takes most of the time.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = {"light": 30, "processes": 3, "auto": 8}  # auto: the rule chosen by the labels so far
STAGES = {"light": {"label", "train"}, "processes": set(), "auto": set()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KILLS)
def test_a_campaign_survives_being_killed(tmp_path, kind):
    script = Path(__file__).with_name("killing.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs"), str(KILLS[kind]), "0", kind],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] == KILLS[kind]
    assert STAGES[kind] <= result["stages"].keys()
    assert len(result["stages"]) >= (3 if kind == "light" else 1), result
    assert result["children"] > 0
