"""Damaged and hostile inputs for everything that reads files from strangers.

    python tests/fuzzing.py --inputs 10000        (make fuzz)
    python tests/guided_fuzzing.py --target extxyz      (coverage-guided, by atheris)

A reader may accept an input or refuse it with one of blips' errors; anything else is a failure.
"""

import argparse
import io
import json
import resource
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import ase.io
import torch
from ase.build import bulk, molecule
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import blips
from blips.active.config import load_campaign
from blips.active.database import DATABASE
from blips.active.store import CampaignStore, Pick
from blips.backbones import PaiNN
from blips.config import dump_config, load_config
from blips.data.structures import check_structures, iter_structures
from blips.errors import BlipsError
from helpers import TINY, morse_ammonia

FOLDER = Path(tempfile.mkdtemp(prefix="blips-fuzz-"))
INTERESTING = [
    b"0", b"-1", b"nan", b"inf", b"1e308", b"9999999999999999999", b"'", b'"', b"=", b"\n", b"\x00",
    b"Lattice=", b"Properties=", b"species:S:1:", b"pos:R:3", b":R:-1", b":I:999", b"pbc=",
    b"!!python/object/apply:os.system ['false']", b"&a [*a]", b"<<: *a", b"{", b"}", b"[", b"]",
    b"__metadata__", b"dtype", b"F64", b"data_offsets", b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"PK",
    b"\x80\x04", b"CREATE TABLE", b"energy=", b"_JSON ", b"__ase_objtype__",
]  # fmt: skip


@cache
def seeds() -> dict[str, list[bytes]]:
    """Sound files to start from, by target."""
    text = io.StringIO()
    crystal = bulk("NaCl", "rocksalt", a=5.6)
    crystal.info["note"] = "a b"
    ase.io.write(text, [*morse_ammonia(1, seed=0), molecule("CH4"), crystal], format="extxyz")
    torch.manual_seed(0)
    model = blips.bayesianize(PaiNN(**{**TINY, "blocks": 1}), seed=0)
    checkpoint = blips.save(model, FOLDER / "seed.safetensors").read_bytes()
    with CampaignStore(FOLDER / "seed") as store:
        store.add_picks([Pick(0, 0, molecule("NH3"), 0.1, {"score": "random"})], 0, {"chosen": 1})
        store.add_label(store.picks()[0], {"energy": 1.0, "forces": molecule("NH3").positions})
    campaign = {"initial": {"structures": "a.xyz"}, "label": {"options": {"a": [1, {"b": 2}]}}}
    return {
        "extxyz": [text.getvalue().encode()],
        "config": [dump_config(load_config()).encode(), json.dumps(campaign).encode()],
        "checkpoint": [checkpoint],
        "campaign": [(FOLDER / "seed" / DATABASE).read_bytes()],
    }


def read_extxyz(data: bytes) -> None:
    """Structures of an extxyz file, checked."""
    path = FOLDER / "fuzzed.extxyz"
    path.write_bytes(data)
    check_structures(iter_structures(path), path)


def read_config(data: bytes) -> None:
    """Configurations of a training and of a campaign."""
    refused = []
    for name in ("fuzzed.yaml", "fuzzed.json"):
        path = FOLDER / name
        path.write_bytes(data)
        for read in (load_config, load_campaign):
            try:
                read(path)
            except BlipsError as error:
                refused.append(error)
    if len(refused) == 4:
        raise refused[0]


def read_checkpoint(data: bytes) -> None:
    """A model."""
    path = FOLDER / "fuzzed.safetensors"
    path.write_bytes(data)
    blips.load(path)


def read_campaign(data: bytes) -> None:
    """A campaign, for reading."""
    folder = FOLDER / "fuzzed"
    folder.mkdir(exist_ok=True)
    (folder / DATABASE).write_bytes(data)
    with CampaignStore(folder, writable=False) as store:
        store.picks()
        store.labelled()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "extxyz": read_extxyz,
    "config": read_config,
    "checkpoint": read_checkpoint,
    "campaign": read_campaign,
}


def outcome(target: str, data: bytes) -> str:
    """ "accepted" or "refused"; raises what is neither."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            TARGETS[target](data)
        except BlipsError:
            return "refused"
    return "accepted"


@st.composite
def damaged(draw: st.DrawFn, target: str) -> bytes:
    """A sound file after a few edits, or bytes of any kind."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(draw(st.sampled_from(seeds()[target])))
    # Headers decide what the rest means, so half of the edits are there.
    for _ in range(draw(st.integers(1, 4))):
        reach = max(1, min(len(data), 400) if draw(st.booleans()) else len(data))
        first = draw(st.integers(0, reach - 1))
        length = draw(st.integers(0, 12))
        kind = draw(st.sampled_from(["replace", "insert", "delete", "flip", "cut", "repeat"]))
        piece = draw(st.sampled_from(INTERESTING) | st.binary(max_size=8))
        if kind == "replace":
            data[first : first + length] = piece
        elif kind == "insert":
            data[first:first] = piece
        elif kind == "delete":
            del data[first : first + length]
        elif kind == "flip" and first < len(data):
            data[first] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[first:]
        else:
            data[first:first] = data[first : first + 40]
    return bytes(data)


def run(target: str, inputs: int) -> dict[str, float]:
    """Feed a reader; counts and seconds."""
    counts: Counter[str] = Counter()

    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(target))
    def feed(data: bytes) -> None:
        counts[outcome(target, data)] += 1

    begun = time.perf_counter()
    feed()
    return {**counts, "inputs": counts.total(), "seconds": round(time.perf_counter() - begun, 1)}


def limit_memory() -> None:
    """No bomb takes the machine: 8 GB for this process."""
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))


def main() -> None:
    """Fuzz one target or all."""
    parser = argparse.ArgumentParser(description="Fuzz blips' readers.")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--target", choices=list(TARGETS))
    parser.add_argument("--output", type=Path, help="JSON file for the counts")
    options = parser.parse_args()
    limit_memory()
    torch.set_num_threads(1)
    found = {}
    for target in [options.target] if options.target else TARGETS:
        found[target] = run(target, options.inputs)
        print(target, json.dumps(found[target]), flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
