"""Two processes (gloo) train as one does."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blips
from blips.train.checkpoint import read_tensors

SCRIPT = str(Path(__file__).with_name("distributed.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def train(folder: Path, kind: str, processes: int, epochs: int, batch: int) -> list[dict]:
    command = TORCHRUN if processes == 2 else [sys.executable]
    arguments = [SCRIPT, str(folder), kind, str(processes), str(epochs), str(batch)]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items()} for row in rows]


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one(tmp_path):
    """12 structures: a step of one process on 8 is a step of two on 4 each."""
    one = train(tmp_path / "one", "plain", 1, 3, 8)
    two = train(tmp_path / "two", "plain", 2, 3, 4)
    for first, second in zip(one, two, strict=True):
        assert second == pytest.approx(first, rel=1e-9)
    weights = [read_tensors(tmp_path / name / "best.safetensors")[0] for name in ("one", "two")]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_in_one(tmp_path):
    """Noise differs between processes by design, so the curve is its own; the files are not."""
    before = train(tmp_path / "run", "bayesian", 2, 2, 4)
    after = train(tmp_path / "run", "bayesian", 1, 3, 4)
    assert after[:2] == before
    assert len(after) == 3
    potential = blips.load(tmp_path / "run" / "best.safetensors")
    assert isinstance(potential, blips.BayesianPotential)
