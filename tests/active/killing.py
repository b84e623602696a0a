"""Kill campaigns with SIGKILL at random moments; run by test_killed.py in a process of its own.

    python killing.py FOLDER KILLS SEED

Everything is imported once and every campaign process is a fork. Half of the kills hit the
campaign alone, so that its labeller is orphaned, the other half its labeller too.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from campaigns import importable, tiny_campaign

from blips.active.campaign import run_campaign
from blips.active.config import load_campaign
from blips.active.frames import digest
from blips.active.labeller import journal_file, read_journal
from blips.active.store import DATABASE, CampaignStore

STAGES = ("select", "train", "evaluate")
EXECUTORS = ({"kind": "inline"}, {"kind": "local", "processes": False, "workers": 2})


def start(config: dict) -> int:
    """Run a campaign in a fork; its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run_campaign(load_campaign(config), display=False)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def wait(pid: int, seconds: float) -> int | None:
    """Exit status if the process ends in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    return None


def kill(pid: int, with_labeller: bool) -> None:
    children = []
    if with_labeller:
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(c) for c in (task / "children").read_text().split()]
    for victim in (pid, *children):
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    os.waitpid(pid, 0)


def labels(config: dict) -> list:
    with CampaignStore(config["folder"], writable=False) as store:
        return [
            (pick.name, digest(atoms), atoms.get_potential_energy(), atoms.get_forces().tolist())
            for pick, atoms in zip(store.picks(status="labelled"), store.labelled(), strict=True)
        ]


def state(config: dict) -> tuple[str, set[str]]:
    """The stage that is under way, and the positions of all finished labels."""
    if not (Path(config["folder"]) / DATABASE).exists():
        return "0 start", set()
    with CampaignStore(config["folder"], writable=False) as store:
        journal = Path(config["folder"]) / "journal"
        finished = {atoms.positions.tobytes().hex() for atoms in store.labelled()}
        for pick in store.picks(status="open"):
            if read_journal(journal_file(journal, pick.name), digest(pick.atoms)):
                finished.add(pick.atoms.positions.tobytes().hex())
        round = max(0, store.last_round())
        if store.picks(status="open"):
            return f"{round} label", finished
        done = [name for name in STAGES if store.stage(round, name) is not None]
        after = {"select": "train", "train": "evaluate", "evaluate": "explore"}
        walked = store.finished_walkers(round)
        stage = after[done[-1]] if done else "select"
        stage = "train" if "select" in done else stage
        return f"{round} {'screen' if stage == 'explore' and len(walked) == 2 else stage}", finished


def calls(config: dict) -> list[str]:
    path = Path(config["label"]["options"]["file"])
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def campaign(folder: Path) -> dict:
    folder.mkdir(parents=True)
    counting = {"file": str(folder / "calls.txt"), "seconds": 0.02}
    return tiny_campaign(
        folder,
        training={"epochs": 12},
        explore={"steps": 40},
        label={"calculator": "counting.Counting", "options": counting, "trust": True},
    )


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    importable()
    rng = random.Random(seed)
    undisturbed = campaign(folder / "undisturbed")
    begun = time.monotonic()
    assert wait(start(undisturbed), 600) == 0
    duration = time.monotonic() - begun
    expected = labels(undisturbed)
    count, number, hit, repeated = 0, 0, Counter(), 0
    while count < kills:
        config, number = campaign(folder / f"killed-{number}"), number + 1
        status, brutal = None, False
        while status is None:
            executor = EXECUTORS[count % 2]
            stage, finished = state(config)
            before = len(calls(config))
            pid = start({**config, "executor": executor})
            if count >= kills:
                status = wait(pid, 600)
            else:
                status = wait(pid, rng.uniform(0.02, duration / 4))
            if status is None:
                with_labeller = count % 4 >= 2
                kill(pid, with_labeller)
                brutal |= with_labeller
                count += 1
                hit[state(config)[0].split()[1]] += 1
            again = finished & set(calls(config)[before:])
            assert not again, f"finished labels were computed again after {stage}"
        assert status == 0, status
        assert labels(config) == expected, "other labels than undisturbed"
        extra = len(calls(config)) - len(set(calls(config)))
        assert brutal or extra == 0, "a label was computed twice though its labeller lived"
        repeated += extra
    result = {
        "kills": count,
        "campaigns": number,
        "stages": dict(hit),
        "labels": len(expected),
        "unfinished_computed_again": repeated,
        "undisturbed_seconds": round(duration, 2),
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
