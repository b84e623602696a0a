"""A long time of use in a short one: memory, killed workers, threads, full disks.

    python tests/soak.py --output results/soak.json      (make soak)
    python tests/soak.py memory --predicts 2000

Each part stops at the first failure. Results are kept as they come.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import psutil
import torch
from ase.calculators.emt import EMT

import blips
from blips.active.database import CampaignError
from blips.active.store import CampaignStore
from blips.backbones import PaiNN
from helpers import TINY, morse_ammonia

sys.path.insert(0, str(Path(__file__).parent / "active"))

from campaigns import importable, tiny_campaign

ROOT = Path(__file__).parents[1]
METHODS = ("map", "conditioned", "mc", "onepass", "frozen")
WARM = 1000  # predictions until caches and allocators have what they need
FLAT = 0.05  # resident memory may differ by this much afterwards
BETWEEN_KILLS = (2.0, 6.0)  # seconds
DISK_KB = 4096  # of the small disk
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def conditioned_model() -> blips.BayesianPotential:
    """A tiny PaiNN with a conditioned posterior."""
    torch.manual_seed(0)
    model = blips.bayesianize(PaiNN(**TINY), seed=0)
    model.condition(morse_ammonia(12, seed=0), valid=morse_ammonia(6, seed=1))
    return model


def memory(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Predict with changing methods, seeds and structures: resident memory stays flat."""
    model, process = conditioned_model(), psutil.Process()
    structures = [morse_ammonia(1 + k % 4, seed=k) for k in range(40)]
    every, resident = max(1, options.predicts // 20), []
    warm = min(WARM, options.predicts // 4)
    for number in range(options.predicts):
        method = options.method or METHODS[number % len(METHODS)]
        atoms = structures[number * 7 % len(structures)]
        model.predict(atoms, method=method, samples=4, seed=number)
        if number + 1 >= warm and (number + 1 - warm) % every == 0:
            gc.collect()
            resident.append(round(process.memory_info().rss / 2**20, 2))
            yield {"predicts": number + 1, "resident_mb": resident}
    change = max(abs(mb - resident[0]) for mb in resident) / resident[0]
    yield {"predicts": options.predicts, "resident_mb": resident, "change": round(change, 4)}
    check(change <= FLAT, f"resident memory changed by {change:.1%}")


def labels(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Kill workers and labellers of a campaign every few seconds: labels are neither lost nor
    computed again, but for those that a kill interrupted.
    """
    importable()
    calls, rng, kills = folder / "calls.txt", random.Random(0), Counter[str]()
    config = tiny_campaign(
        folder,
        initial={"count": options.labels},
        training={"epochs": 1, "batch_size": 64, "condition": False},
        select={"rule": "random"},
        label={
            "calculator": "counting.Counting",
            "options": {"file": str(calls)},
            "trust": True,
            "retries": 20,
        },
        stop={"rounds": 0},
        executor={"kind": "local", "processes": True, "workers": 2},
    )
    (folder / "campaign.json").write_text(json.dumps(config))
    path = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(ROOT / "tests/active")])
    with (folder / "log.txt").open("w") as log:
        campaign = subprocess.Popen(
            [sys.executable, "-m", "blips", "active", str(folder / "campaign.json"), "--quiet"],
            env={**ENVIRONMENT, "PYTHONPATH": path},
            stdout=log,
            stderr=log,
        )
        while campaign.poll() is None:
            time.sleep(rng.uniform(*BETWEEN_KILLS))
            computed = len(calls.read_text().splitlines()) if calls.exists() else 0
            if 0 < computed < options.labels and (victim := _victim(campaign.pid, rng)):
                victim[1].kill()
                kills[victim[0]] += 1
            yield {"labels": options.labels, "computed": computed, "kills": dict(kills)}
    check(campaign.returncode == 0, (folder / "log.txt").read_text())
    yield {"labels": options.labels, "kills": dict(kills), **_account(config, calls)}


def _victim(campaign: int, rng: random.Random) -> tuple[str, psutil.Process] | None:
    """Choose a worker or a labeller of a campaign."""
    found = []
    for child in psutil.Process(campaign).children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "blips.active.labeller" in line:
            found.append(("labeller", child))
        elif "spawn_main" in line:
            found.append(("worker", child))
    return rng.choice(found) if found else None


def _account(config: dict[str, Any], calls: Path) -> dict[str, int]:
    """Compare the labels of a campaign with its picks, and with what was computed."""
    with CampaignStore(config["folder"], writable=False) as store:
        picks, labelled = store.picks(), store.labelled()
        attempts = sum(len(store.attempts(pick)) for pick in picks)
    check({pick.status for pick in picks} == {"labelled"}, "a label was lost")
    check(len(labelled) == len(picks) == config["initial"]["count"], "labels were lost or repeated")
    check(len({atoms.positions.tobytes() for atoms in labelled}) == len(picks), "a label repeats")
    for pick, atoms in zip(picks, labelled, strict=True):
        again = pick.atoms.copy()
        again.calc = EMT()
        check((pick.atoms.positions == atoms.positions).all(), f"{pick.name} changed")
        check(again.get_potential_energy() == atoms.get_potential_energy(), f"{pick.name} is wrong")
    computed = [line.split()[0] for line in calls.read_text().splitlines()]
    return {
        "in_database": len(labelled),
        "computed": len(computed),
        "computed_again": len(computed) - len(set(computed)),
        "attempts_that_failed": attempts,
    }


def together(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Predict in eight threads, and in two processes, from one model file: the same bits."""
    path = blips.save(conditioned_model(), folder / "model.safetensors")
    jobs = [(str(path), METHODS[k % len(METHODS)], k) for k in range(options.jobs)]
    expected = [_bits(job) for job in jobs]
    check(len(set(expected)) == len(jobs), "seeds and methods change nothing")
    shared = blips.load(path)
    with ThreadPoolExecutor(8) as threads:
        check(list(threads.map(_bits, jobs)) == expected, "threads differ")
        check(
            list(threads.map(lambda job: _bits(job, shared), jobs)) == expected,
            "threads that share a model differ",
        )
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        check(list(processes.map(_bits, jobs)) == expected, "processes differ")
    yield {"predicts": 4 * len(jobs), "threads": 8, "processes": 2, "different": 0}


def _bits(job: tuple[str, str, int], model: Any = None) -> str:
    """SHA-256 of all numbers of a prediction."""
    path, method, seed = job
    model = blips.load(path) if model is None else model
    found = model.predict(morse_ammonia(3, seed=seed), method=method, samples=4, seed=seed)
    digest = hashlib.sha256()
    for name, value in sorted(vars(found).items()):
        if isinstance(value, np.ndarray):
            digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()


def disk(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Fill the disk at random moments of commands: one clear line, nothing half-written, and the
    next run succeeds. Needs root, for a small disk in memory.
    """
    importable()
    _forked(lambda: _inputs(folder), folder)
    small, found, rng, tried = folder / "small", Counter[str](), random.Random(0), 0
    small.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", f"size={DISK_KB}k", "soak", str(small)]
    check(subprocess.run(mounted).returncode == 0, "no small disk could be mounted; be root")
    try:
        for name, arguments in _commands(folder, small).items():
            code, said = _blips(arguments, folder)
            check(code == 0, f"{name}: {said}")
            needed, whole = _used(small), _content(small, name)
            for _ in range(options.fills):
                _empty(small)
                room = rng.randrange(0, needed)
                (small / "ballast").write_bytes(bytes(_free(small) - room))
                code, said = _blips(arguments, folder)
                where = f"{name} with room for {room} bytes"
                kept = _content(small, name)
                check(kept == whole if code == 0 else not kept, f"{where}: half-written {kept}")
                if code != 0:
                    found[name] += 1
                    check(_is_clear(said), f"{where}: {said}")
                (small / "ballast").unlink()
                tried += 1
                begun = (small / "predict.part").exists()
                code, said = _blips([*arguments, *(["--resume"] if begun else [])], folder)
                check(code == 0, f"{where}, then enough: {said}")
                check(_content(small, name) == whole, f"{where}, then enough: other content")
                yield {"fills": tried, "refused": dict(found)}
            _empty(small)
    finally:
        subprocess.run(["umount", "--lazy", str(small)])


def _inputs(folder: Path) -> None:
    blips.save(conditioned_model(), folder / "model.safetensors")
    for number, name in enumerate(("train", "valid")):
        ase.io.write(folder / f"{name}.extxyz", morse_ammonia(20, seed=number))


def _commands(folder: Path, small: Path) -> dict[str, list[str]]:
    """Commands that write to the small disk."""
    model, train, valid = (
        folder / n for n in ("model.safetensors", "train.extxyz", "valid.extxyz")
    )
    config = {**tiny_campaign(folder), "folder": str(small / "active")}
    (folder / "campaign.json").write_text(json.dumps(config))
    arguments = {
        "predict": [model, train, "-o", small / "predict", "--samples", 4],
        "condition": [model, train, "--valid", valid, "-o", small / "condition"],
        "report": [model, "--structures", valid, "-o", small / "report", "--bootstrap", 10],
        "active": [folder / "campaign.json", "--quiet"],
    }
    return {name: [name, *map(str, rest)] for name, rest in arguments.items()}


def _blips(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit code of a command, and what it said about errors."""
    from blips.__main__ import main

    def run() -> None:
        sys.argv = ["blips", *arguments]
        main()

    return _forked(run, folder)


def _forked(work: Callable[[], None], folder: Path) -> tuple[int, str]:
    """Run in a fork, where everything is imported already."""
    said = folder / "said.txt"
    child = os.fork()
    if child == 0:
        code = 1
        with said.open("w") as file:
            os.dup2(file.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            try:
                work()
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), said.read_text()


def _is_clear(said: str) -> bool:
    """One line of blips', which names the cause."""
    lines = [line for line in said.splitlines() if line.strip()]
    return len(lines) == 1 and lines[0].startswith("blips: ") and "Traceback" not in said


def _content(small: Path, name: str) -> Any:
    """What a command has finished: the digest of its file, or the energies of a campaign."""
    path = small / name
    if not path.exists():
        return None
    if name == "report":
        return path.read_text().rstrip().endswith("</html>") or "half a page"
    if name != "active":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    try:
        store = CampaignStore(path, writable=False)
    except CampaignError:  # not begun; what cannot be read stops the next run
        return None
    with store:
        energies = [atoms.get_potential_energy() for atoms in store.labelled()]
        return energies if store.read("end", store.last_round()) else None


def _used(small: Path) -> int:
    return sum(path.stat().st_size for path in small.rglob("*") if path.is_file())


def _free(small: Path) -> int:
    status = os.statvfs(small)
    return status.f_bavail * status.f_bsize


def _empty(small: Path) -> None:
    for path in small.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check(good: bool, message: str) -> None:
    """End the run where something is wrong."""
    if not good:
        raise SystemExit(f"soak: {message}")


PARTS: dict[str, Callable[[argparse.Namespace, Path], Iterator[dict[str, Any]]]] = {
    "labels": labels,
    "disk": disk,
    "together": together,
    "memory": memory,
}


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--predicts", type=int, default=20_000, help="of memory")
    parser.add_argument("--method", choices=METHODS, help="of memory; all in turn by default")
    parser.add_argument("--labels", type=int, default=5000, help="of labels")
    parser.add_argument("--jobs", type=int, default=40, help="of together: predictions, each")
    parser.add_argument("--fills", type=int, default=4, help="of disk, of each command")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    output: Path | None = options.output
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    counts = [f"--{name} {vars(options)[name]}" for name in ("predicts", "labels", "jobs", "fills")]
    command = " ".join(["python tests/soak.py", *options.parts, *counts])
    for part in options.parts:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="blips-soak-") as folder:
            for found in PARTS[part](options, Path(folder)):
                seconds = round(time.monotonic() - begun, 1)
                found |= {"seconds": seconds, "commit": commit, "command": command}
                print(part, json.dumps(found), flush=True)
                if output is not None:
                    known = json.loads(output.read_text()) if output.exists() else {}
                    output.write_text(json.dumps({**known, part: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
