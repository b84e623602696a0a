"""Runs of a made-up study, in real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from blips.errors import InputError
from blips.files import locked
from studies.runner import Layout, RunSpec, _sort_out, run_all, select

REPOSITORY = Path(__file__).parents[2]
STUDY = """
import os, signal, time
from studies.spec import Findings

def execute(run):
    does = run.spec.settings["does"]
    attempts = run.folder / "attempts"
    before = attempts.read_text() if attempts.exists() else ""
    attempts.write_text(before + "x")
    if does == "fail":
        raise RuntimeError("the reactor melted")
    if does == "die once" and not before:
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "wait":
        (run.folder / "pid").write_text(str(os.getpid()))
        time.sleep(120)
    seen = {name: (folder / "attempts").read_text() for name, folder in run.needs.items()}
    value = {"value": run.spec.seed + 0.5, "low": None, "high": None}
    threads = os.environ["OMP_NUM_THREADS"]
    return Findings({"mse": value}, {"needs": seen, "threads": threads})
"""


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    (tmp_path / "made_up_study.py").write_text(STUDY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # workers find `studies` from wherever they are started
    return Layout.of("made_up", "quick", tmp_path / "results", tmp_path / "runs")


def spec(name: str, does: str, seed: int = 0, needs: tuple[str, ...] = ()) -> RunSpec:
    return RunSpec("made_up", name, {"does": does}, seed, needs)


def run(specs: list[RunSpec], layout: Layout, workers: int = 2):
    return run_all(
        specs, layout, module="made_up_study", workers=workers, console=Console(quiet=True)
    )


def attempts(layout: Layout, of: RunSpec) -> int:
    return len((layout.run_folder(of) / "attempts").read_text())


def test_failures_do_not_stop_the_others_and_finished_runs_are_kept(layout: Layout):
    good, bad = spec("good", "succeed", seed=3), spec("bad", "fail")
    pair = spec("pair", "succeed", needs=("good-seed3",))
    doomed = spec("doomed", "succeed", needs=("good-seed3", "bad-seed0"))
    specs = [good, bad, doomed, pair]

    outcome = run(specs, layout)

    assert outcome.finished == ["good-seed3", "pair-seed0"]
    assert outcome.failed.keys() == {"bad-seed0", "doomed-seed0"}
    assert "the reactor melted" in outcome.failed["bad-seed0"]
    assert str(layout.log(bad)) in outcome.failed["bad-seed0"]
    assert "needs bad-seed0, which failed" in outcome.failed["doomed-seed0"]
    assert not layout.run_folder(doomed).exists()
    result = json.loads((layout.results / "good-seed3.json").read_text())
    assert result["settings"] == {"does": "succeed"}
    assert result["metrics"]["mse"]["value"] == 3.5
    assert result["details"]["threads"] == "1"
    assert result["wall_seconds"] > 0
    assert result["environment"]["versions"]["torch"]
    assert result["environment"]["command"][1:] == sys.argv[1:]
    pair_result = layout.read(pair)
    assert pair_result is not None
    assert pair_result["details"]["needs"] == {"good-seed3": "x"}

    again = run([good, pair], layout)

    assert again.reused == ["good-seed3", "pair-seed0"]
    assert not again.finished
    assert attempts(layout, good) == 1


def test_a_killed_run_fails_and_resumes_in_its_folder(layout: Layout):
    fragile = spec("fragile", "die once")
    elapsed = layout.run_folder(fragile) / "elapsed.json"
    elapsed.parent.mkdir(parents=True)
    elapsed.write_text('{"wall_seconds": 1000.0, "cpu_seconds": 500.0}')

    assert "exit code -9" in run([fragile], layout).failed["fragile-seed0"]
    assert layout.read(fragile) is None
    assert run([fragile], layout).finished == ["fragile-seed0"]

    assert attempts(layout, fragile) == 2
    result = layout.read(fragile)
    assert result is not None
    assert result["wall_seconds"] > 1000.0  # earlier attempts count
    assert 500.0 < result["cpu_seconds"] < 600.0


def test_two_processes_do_not_share_a_run(layout: Layout):
    contested = spec("contested", "succeed")
    folder = layout.run_folder(contested)
    folder.mkdir(parents=True)
    with locked(folder / "lock"):
        assert "exit code 2" in run([contested], layout).failed["contested-seed0"]
    assert not (folder / "attempts").exists()
    assert run([contested], layout).finished == ["contested-seed0"]


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"])
def test_workers_end_with_their_study(layout: Layout, tmp_path: Path, how: signal.Signals):
    slow = spec("slow", "wait")
    code = (
        "from studies.runner import Layout, RunSpec, run_all\n"
        "layout = Layout.of('made_up', 'quick', 'results', 'runs')\n"
        "run_all([RunSpec('made_up', 'slow', {'does': 'wait'}, 0)], layout, "
        "module='made_up_study')"
    )
    command = [sys.executable, "-c", code]
    path = os.pathsep.join((str(REPOSITORY), str(tmp_path)))
    study = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    pid_file = layout.run_folder(slow) / "pid"
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
        worker = int(pid_file.read_text())
        assert is_alive(worker)
        study.send_signal(how)
        output, _ = study.communicate(timeout=60)
        wait_until(lambda: not is_alive(worker))
    finally:
        study.kill()
        study.communicate()
    assert study.returncode != 0
    assert ("the same command continues" in output.decode()) == (how == signal.SIGINT)
    assert layout.read(slow) is None


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    """Whether a process that is not our child runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def test_the_hash_depends_on_settings_not_on_their_order():
    one = RunSpec("study", "name", {"a": 1, "b": {"c": 2, "d": 3}}, 0)
    same = RunSpec("study", "name", {"b": {"d": 3, "c": 2}, "a": 1}, 0)
    assert one.hash == same.hash
    others = [
        RunSpec("study", "name", {"a": 1, "b": {"c": 2, "d": 4}}, 0),
        RunSpec("study", "name", dict(one.settings), 1),
        RunSpec("study", "name", dict(one.settings), 0, ("before-seed0",)),
    ]
    assert one.hash not in {other.hash for other in others}
    assert RunSpec.from_dict(json.loads(json.dumps(vars(others[2])))) == others[2]


def test_results_of_other_settings_or_damaged_ones_do_not_count(tmp_path: Path):
    layout = Layout.of("made_up", "quick", tmp_path, tmp_path)
    mine, other = spec("run", "succeed"), spec("run", "fail")
    path = layout.result_file(mine)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"hash": mine.hash}))
    assert layout.read(mine) is not None
    assert layout.read(other) is None
    for damaged in ('{"hash": ', "[]", "null"):
        path.write_text(damaged)
        assert layout.read(mine) is None


def test_a_finished_run_is_repeated_if_another_needs_its_lost_folder(tmp_path: Path):
    layout = Layout.of("made_up", "quick", tmp_path, tmp_path)
    first, second = spec("first", "succeed"), spec("second", "succeed", needs=("first-seed0",))
    path = layout.result_file(first)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"hash": first.hash}))
    assert _sort_out([first], layout)[1] == []
    assert _sort_out([first, second], layout)[1] == [first, second]
    layout.run_folder(first).mkdir()
    outcome, waiting = _sort_out([first, second], layout)
    assert outcome.reused == ["first-seed0"]
    assert waiting == [second]


def test_selection_brings_what_a_run_needs():
    specs = [
        spec("egnn-base", "succeed", 0),
        spec("egnn-base", "succeed", 1),
        spec("gnn-base", "succeed", 0),
        spec("egnn-pair", "succeed", 0, needs=("egnn-base-seed0", "egnn-base-seed1")),
    ]
    assert select(specs, []) == specs
    assert [s.id for s in select(specs, ["*pair*"])] == [
        "egnn-base-seed0",
        "egnn-base-seed1",
        "egnn-pair-seed0",
    ]
    assert [s.id for s in select(specs, ["gnn-b*", "base-seed1"])] == [
        "egnn-base-seed1",
        "gnn-base-seed0",
    ]
    assert [s.id for s in select(specs, ["gnn-base-seed0"])] == ["gnn-base-seed0"]
    with pytest.raises(InputError, match="no run matches 'mace'; there are egnn-base-seed0"):
        select(specs, ["mace"])


def test_lists_of_runs_are_checked(tmp_path: Path):
    layout = Layout.of("made_up", "quick", tmp_path, tmp_path)
    with pytest.raises(InputError, match="is there twice"):
        run([spec("a", "succeed"), spec("a", "succeed")], layout)
    with pytest.raises(InputError, match=r"needs \['b-seed0'\] before it"):
        run([spec("a", "succeed", needs=("b-seed0",)), spec("b", "succeed")], layout)
    with pytest.raises(InputError, match="workers=0"):
        run([spec("a", "succeed")], layout, workers=0)
