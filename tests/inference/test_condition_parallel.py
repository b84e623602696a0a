"""Two processes (gloo) take every other structure each, and end with the posterior of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inference.distributed import CASES, VALID, posterior

SCRIPT = str(Path(__file__).with_name("distributed.py"))
WORLD = 2
EACH_CASE = pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What each process kept of each case."""
    path = tmp_path_factory.mktemp("parallel")
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(path), str(rank), str(WORLD)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in started:
            process.kill()
    return path


def kept(folder: Path, number: int, rank: int) -> dict:
    tensors = torch.load(folder / f"{number}-{rank}.pt", weights_only=True)
    return {**tensors, **json.loads((folder / f"{number}-{rank}.json").read_text())}


@EACH_CASE
def test_two_processes_have_the_posterior_of_one(folder, number: int):
    expected = posterior(*CASES[number])
    for rank in range(WORLD):
        found = kept(folder, number, rank)
        content = json.loads(json.dumps(expected.to_dict()))
        numbers = {"ratio", "scale", "floor", "energy_factor"}
        for name in content.keys() - numbers:
            assert found["content"][name] == content[name]
        for name in numbers:
            assert found["content"][name] == pytest.approx(content[name], rel=1e-6)
        gram = expected.evidence.gram()
        torch.testing.assert_close(found["gram"], gram, rtol=1e-10, atol=1e-10 * gram.max().item())


@EACH_CASE
def test_all_processes_have_the_same_posterior(folder, number: int):
    """To the last bit: members of a committee may run anywhere."""
    one, other = (kept(folder, number, rank) for rank in range(WORLD))
    assert one["content"] == other["content"]
    assert torch.equal(one["gram"], other["gram"])
    assert torch.equal(one["draws"], other["draws"])


def test_processes_share_the_structures(folder):
    """5 in a first call, 1 in a second; validation structures are looked at by all."""
    looked_at = [kept(folder, 0, rank)["looked_at"] for rank in range(WORLD)]
    assert looked_at == [3 + 1 + VALID, 2 + VALID]


def test_cases_have_more_and_fewer_rows_than_dimensions():
    """Rows that are kept, and rows that are summed; a process without any structure."""
    counts = [(posterior(*case).evidence.keeps_rows, case[0] < WORLD) for case in CASES[1:]]
    assert counts == [(False, False), (True, False), (True, True)]
