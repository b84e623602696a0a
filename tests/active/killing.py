"""Kill campaigns with SIGKILL at random moments; run by test_killed.py in a process of its own.

    python killing.py FOLDER KILLS SEED light|processes|auto

Everything is imported once and every campaign process is a fork. Half of the kills hit the
campaign alone, so that its workers and labellers are orphaned, the other half these too. Orphans
must finish what they are at and end.
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

import psutil

sys.path.insert(0, str(Path(__file__).parent))

import torch
from campaigns import importable, tiny_campaign

from blips.active.campaign import run_campaign
from blips.active.config import load_campaign
from blips.active.database import DATABASE, CampaignError
from blips.active.frames import digest
from blips.active.labeller import read_label
from blips.active.store import CampaignStore

STAGES = ("select", "train", "evaluate")
LIGHT = ({"kind": "inline"}, {"kind": "local", "processes": False, "workers": 2})
PROCESSES = ({"kind": "local", "processes": True, "workers": 2},)
EXECUTORS = {"light": LIGHT, "processes": PROCESSES, "auto": LIGHT}
LABEL_SECONDS = {"light": 0.06, "processes": 0.5, "auto": 0.06}  # so that labelling is hit, too
LONGEST = {
    "light": 0.25,
    "processes": 1.0,
    "auto": 0.25,
}  # run until a kill, in undisturbed ones; workers' start
ORPHANS_MAY_TAKE = 120.0  # s; workers that still import torch notice afterwards


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


def kill(pid: int, with_children: bool) -> int:
    """Kill a campaign; how many processes it had started, all of which must end."""
    children = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    for child in children if with_children else ():
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os.waitpid(pid, 0)
    deadline = time.monotonic() + ORPHANS_MAY_TAKE
    while any(map(alive, children)):
        assert time.monotonic() < deadline, f"outlived their campaign: {children}"
        time.sleep(0.01)
    return len(children)


def alive(process: psutil.Process) -> bool:
    """Whether it runs; an init that reaps nobody leaves zombies, which do not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def labels(config: dict) -> list:
    with CampaignStore(config["folder"], writable=False) as store:
        return [
            (pick.name, digest(atoms), atoms.get_potential_energy(), atoms.get_forces().tolist())
            for pick, atoms in zip(store.picks(status="labelled"), store.labelled(), strict=True)
        ]


def state(config: dict) -> tuple[str, set[str]]:
    """The stage that is under way, and the positions of all finished labels."""
    database = Path(config["folder"]) / DATABASE
    if not database.exists():
        return "0 start", set()
    try:
        CampaignStore(database.parent, writable=False).__exit__()
    except CampaignError as error:
        if "is empty" in str(error):  # killed before its tables were there
            return "0 start", set()
        raise
    with CampaignStore(config["folder"], writable=False) as store:
        journal = Path(config["folder"]) / "journal"
        finished = {atoms.positions.tobytes().hex() for atoms in store.labelled()}
        for pick in store.picks(status="open"):
            if read_label(journal / f"{pick.name}-{digest(pick.atoms)}.json"):
                finished.add(pick.atoms.positions.tobytes().hex())
        round = store.last_round()
        if store.picks(status="open"):
            return f"{round} label", finished
        done = [name for name in STAGES if store.read(name, round) is not None]
        after = {"select": "train", "train": "evaluate", "evaluate": "explore"}
        walked = store.read_all("walk", round)
        stage = after[done[-1]] if done else "select"
        stage = "train" if "select" in done else stage
        return f"{round} {'screen' if stage == 'explore' and len(walked) == 2 else stage}", finished


def calls(config: dict) -> list[str]:
    path = Path(config["label"]["options"]["file"])
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def campaign(folder: Path, kind: str) -> dict:
    folder.mkdir(parents=True)
    counting = {"file": str(folder / "calls.txt"), "seconds": LABEL_SECONDS[kind]}
    return tiny_campaign(
        folder,
        training={"epochs": 12},
        explore={"steps": 40},
        select={"rule": "auto", "batch": 6} if kind == "auto" else {},
        label={"calculator": "counting.Counting", "options": counting, "trust": True},
    )


def main(folder: Path, kills: int, seed: int, kind: str) -> None:
    torch.set_num_threads(1)
    importable()
    rng = random.Random(seed)
    executors = EXECUTORS[kind]
    undisturbed = campaign(folder / "undisturbed", kind)
    begun = time.monotonic()
    assert wait(start({**undisturbed, "executor": executors[0]}), 600) == 0
    duration = time.monotonic() - begun
    expected = labels(undisturbed)
    count, number, hit, repeated, children = 0, 0, Counter(), 0, 0
    while count < kills:
        config, number = campaign(folder / f"killed-{number}", kind), number + 1
        status, brutal = None, False
        while status is None:
            executor = executors[count % len(executors)]
            stage, finished = state(config)
            before = len(calls(config))
            pid = start({**config, "executor": executor})
            if count >= kills:
                status = wait(pid, 600)
            else:
                status = wait(pid, rng.uniform(0.02, LONGEST[kind] * duration))
            if status is None:
                with_children = count % 4 >= 2
                children += kill(pid, with_children)
                brutal |= with_children
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
        "children": children,
        "labels": len(expected),
        "unfinished_computed_again": repeated,
        "undisturbed_seconds": round(duration, 2),
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
