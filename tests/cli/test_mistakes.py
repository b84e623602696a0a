"""What users get wrong, and what adversaries feed: one line, exit code 2, nothing written."""

import gzip
import signal
import subprocess
import sys
import time

import ase.io
import pytest
from ase.build import molecule

import blips
from blips.train.checkpoint import read_tensors, write_tensors
from environment import COMMAND_ENVIRONMENT as ENVIRONMENT

COMMENT = 'Properties=species:S:1:pos:R:3 pbc="F F F"'
ATOMS = "N 0 0 0\nH 0 0 1.01\nH 0.95 0 -0.34\nH -0.48 0.82 -0.34\n"


def frame(comment: str) -> str:
    return f"4\n{COMMENT} {comment}\n{ATOMS}"


@pytest.fixture
def damaged(folder):
    """Files that no user wants to have."""
    (folder / "adir").mkdir()
    (folder / "twice.extxyz").write_text(frame("energy=1.0 energy=2.0"))
    (folder / "true.extxyz").write_text(frame("energy=T"))
    (folder / "huge.extxyz").write_text(frame("energy=1e300"))
    for number in (119, -3):
        atoms = molecule("NH3")
        atoms.numbers[1] = number
        ase.io.write(folder / f"element{number}.traj", atoms)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(data[: len(data) // 2])
    (folder / "flipped.safetensors").write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    tensors, header = read_tensors(folder / "model.safetensors")
    write_tensors(folder / "last.safetensors", tensors, {**header, "optimizer": {}})
    return folder


PREDICT = ["predict", "model.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([*PREDICT, "data.extxyz", "-o", "x", "--device", "cuda"], ["'cuda'", "use cpu"]),
        (["evaluate", "model.safetensors", "data.extxyz", "--device", "gpu"], ["'gpu'", "use cpu"]),
        (["md", "model.safetensors", "data.extxyz", "--device", "cuda"], ["'cuda'", "use cpu"]),
        (
            ["calibrate", "model.safetensors", "data.extxyz", "-o", "x", "--device", "cuda"],
            ["'cuda'", "use cpu"],
        ),
        (
            ["condition", "model.safetensors", "data.extxyz", "-o", "x", "--device", "cuda"],
            ["'cuda'", "use cpu"],
        ),
        ([*PREDICT, "data.extxyz", "-o", "data.extxyz"], ["data.extxyz holds the structures"]),
        ([*PREDICT, "data.extxyz", "-o", "x.traj"], ["x.traj", "name it .extxyz"]),
        ([*PREDICT, "adir", "-o", "x"], ["adir is a folder; give a file"]),
        (["predict", "adir", "data.extxyz", "-o", "x"], ["adir is a folder; give a model file"]),
        ([*PREDICT, "data.extxyz", "-o", "adir"], ["adir is a folder; give the name of a file"]),
        (["condition", "model.safetensors", "data.extxyz", "-o", "adir"], ["adir is a folder"]),
        (["report", "adir", "-o", "adir"], ["adir is a folder"]),
        (["export", "model.safetensors", "adir"], ["adir is a folder"]),
        (
            [
                "condition",
                "model.safetensors",
                "data.extxyz",
                "-o",
                "x",
                "--weights",
                "data.extxyz",
            ],
            ["no released model and takes no weights"],
        ),
        (
            ["property", "relax", "model.safetensors", "data.extxyz", "--temperature", "0"],
            ["--temperature is an option of dynamics"],
        ),
        (["template", "activ"], ["train, finetune, active"]),
        (["train", "data.train=data.extxyz", "seed=-1"], ["seed", "greater than or equal to 0"]),
        (["train", "adir"], ["adir is a folder", "YAML"]),
        (
            ["predict", "last.safetensors", "data.extxyz", "-o", "x"],
            ["state of a training", "best.safetensors"],
        ),
        (["predict", "chgnt", "data.extxyz", "-o", "x"], ["did you mean 'chgnet'"]),
        ([*PREDICT, "twice.extxyz", "-o", "x"], ["twice.extxyz, frame 0", "energy", "twice"]),
        ([*PREDICT, "true.extxyz", "-o", "x"], ["true.extxyz, frame 0", "not numeric: True"]),
        ([*PREDICT, "huge.extxyz", "-o", "x"], ["huge.extxyz, frame 0", "1e+300 eV", "unit"]),
        ([*PREDICT, "element119.traj", "-o", "x"], ["unknown elements of number 119"]),
        ([*PREDICT, "element-3.traj", "-o", "x"], ["unknown elements of number -3"]),
        (["info", "cut.safetensors"], ["cut.safetensors is damaged"]),
        (["predict", "flipped.safetensors", "data.extxyz", "-o", "x"], ["damaged", "restore"]),
    ],
)
def test_one_line_with_a_remedy(damaged, command, arguments, messages):
    before = set(damaged.rglob("*"))
    result = command(*arguments)
    assert result.returncode == 2, result.stderr
    for message in messages:
        assert message in result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) <= 2  # "unusable structures:" has the frames below it
    assert lines[0].startswith("blips: ")
    assert result.stdout == ""
    assert set(damaged.rglob("*")) == before


def test_training_without_the_gpu_that_it_asks_for(folder, command):
    arguments = [
        "data.train=data.extxyz",
        "training.accelerator=cuda",
        "training.tensorboard=false",
    ]
    result = command("train", *arguments)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "accelerator=auto takes what there is" in result.stderr


def test_a_line_of_400_megabytes_is_not_read(folder, command):
    with gzip.open(folder / "bomb.extxyz.gz", "wb", compresslevel=1) as file:
        file.write(b"4\n" + COMMENT.encode())
        for _ in range(100):
            file.write(b" " * 2**22)
    begun = time.monotonic()
    program = (
        "import resource, sys; from blips.data import read_structures\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: read_structures('bomb.extxyz.gz')\n"
        "except ValueError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT
    )
    message, kilobytes = result.stdout.splitlines()
    assert "frame 0: a line of more than 16 MB" in message
    assert int(kilobytes) < 100_000
    assert time.monotonic() - begun < 60
    assert command(*PREDICT, "bomb.extxyz.gz", "-o", "x").returncode == 2


def test_compressed_structures_are_read(folder):
    frames = ase.io.read("data.extxyz", ":")
    (folder / "data.extxyz.gz").write_bytes(gzip.compress((folder / "data.extxyz").read_bytes()))
    found = blips.data.read_structures("data.extxyz.gz")
    assert found == frames
    (folder / "half.xyz.gz").write_bytes((folder / "data.extxyz.gz").read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"half.xyz.gz: damaged"):
        blips.data.read_structures("half.xyz.gz")


@pytest.mark.parametrize("delay", [0.02, 0.1, 0.3, 0.8, 1.5])
def test_ctrl_c_during_the_start_is_one_line(folder, delay):
    """After the interpreter's own start; before it no program can say anything."""
    frames = (folder / "data.extxyz").read_text()
    (folder / "data.extxyz").write_text(1000 * frames)  # more than is done by the last delay
    program = (
        "import sys, blips.__main__ as command; print('started', flush=True)\n"
        "sys.argv = ['blips', 'predict', 'model.safetensors', 'data.extxyz', '-o', 'x']\n"
        "command.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors == "blips: interrupted\n"
    assert process.returncode == 130
    assert not (folder / "x").exists()


def test_an_interrupted_import_ends_at_once(folder):
    """numpy's ended in a RecursionError, one that is written in C++ aborted."""
    (folder / "interrupted.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    [None for _ in range(1000)]\n"
        "except KeyboardInterrupt:\n"
        "    raise RecursionError('maximum recursion depth exceeded') from None\n"
    )
    program = (
        "import sys, blips.cli, blips.__main__ as command\n"
        "def run():\n"
        "    import interrupted\n"
        "sys.path.insert(0, '.')\n"
        "blips.cli.main = run\n"
        "command.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.stderr == "blips: interrupted\n"
    assert done.returncode == 130
