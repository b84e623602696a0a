"""SIGKILL at thirty random moments of all stages: same labels, none repeated, none lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 30


@pytest.mark.slow
def test_a_campaign_survives_being_killed(tmp_path):
    script = Path(__file__).with_name("killing.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs"), str(KILLS), "0"],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] == KILLS
    assert {"label", "train"} <= result["stages"].keys()
    assert len(result["stages"]) >= 3, result
