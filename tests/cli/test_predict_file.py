"""Predictions of long files: written as they go, resumed after a kill, flat in memory."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import ase.io
import numpy as np
import pytest

import blips
from blips.data.structures import BATCH_ATOMS
from environment import COMMAND_ENVIRONMENT as ENVIRONMENT

PREDICT = ["predict", "model.safetensors", "long.extxyz", "-o", "out.extxyz", "--samples", "4"]


@pytest.fixture
def long(folder):
    """Five batches of structures, without labels."""
    frames = ase.io.read("data.extxyz", ":") * 50
    for atoms in frames:
        atoms.calc = None
    ase.io.write("long.extxyz", frames)
    assert 4 < len(frames) * 4 / BATCH_ATOMS < 5
    return folder


def killed_after(batches: int, size: int) -> None:
    """Start the command and kill it when the file has so many batches."""
    process = subprocess.Popen(
        [sys.executable, "-m", "blips", *PREDICT], stdout=subprocess.DEVNULL, env=ENVIRONMENT
    )
    while not os.path.exists("out.extxyz.part") or os.stat("out.extxyz.part").st_size < size:
        assert process.poll() is None, "the command ended before it could be killed"
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_a_killed_prediction_resumes_to_the_same_bytes(long, command):
    assert command(*PREDICT).returncode == 0
    whole = (long / "out.extxyz").read_bytes()
    (long / "out.extxyz").unlink()
    killed_after(2, len(whole) // 3)
    assert not (long / "out.extxyz").exists()
    assert 0 < (long / "out.extxyz.part").read_text().count("Properties=") < 600
    refused = command(*PREDICT)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    other = command(*PREDICT, "--seed", "1", "--resume")
    assert other.returncode == 2
    assert "made with another model" in other.stderr
    result = command(*PREDICT, "--resume")
    assert result.returncode == 0, result.stderr
    assert re.search(r"[1-9]\d* of them were there before", result.stdout)
    assert (long / "out.extxyz").read_bytes() == whole
    assert not (long / "out.extxyz.part").exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4999, 0.7, 0.99999, 1.0])
def test_a_file_that_was_cut_anywhere_resumes_to_the_same_bytes(long, share):
    from blips.cli.predict_file import predict_file

    potential = blips.load("model.safetensors")
    predict_file(potential, long / "long.extxyz", long / "out.extxyz", method="map")
    whole = (long / "out.extxyz").read_bytes()
    (long / "out.extxyz.part").write_bytes(whole[: int(share * len(whole))])
    done = predict_file(
        potential, long / "long.extxyz", long / "out.extxyz", resume=True, method="map"
    )
    assert (long / "out.extxyz").read_bytes() == whole
    assert done.structures == 600
    assert abs(done.kept - share * 600) <= BATCH_ATOMS / 4 + 1


def test_an_output_that_another_process_may_write_is_left_alone(folder):
    from blips.cli.predict_file import predict_file
    from blips.errors import BlipsError
    from blips.files import locked

    potential = blips.load("model.safetensors")
    with locked(folder / "run.lock"), pytest.raises(BlipsError, match="already"):
        predict_file(potential, folder / "data.extxyz", folder / "out.extxyz", method="map")
    assert not list(folder.glob("out*"))


def test_a_bad_frame_at_the_end_is_found_before_anything_is_computed(long, command):
    with (long / "long.extxyz").open("a") as file:
        file.write('1\nProperties=species:S:1:pos:R:3 pbc="F F F"\nXe 0 0 0\n')
    result = command(*PREDICT)
    assert result.returncode == 2
    assert "frame 600: unknown elements Xe; the model was trained on H, N" in result.stderr
    assert not list(long.glob("out*"))


def test_numbers_are_those_of_predict_and_json_sums_them_up(long, command):
    result = command(*PREDICT, "--json")
    expected = blips.load("model.safetensors").predict(ase.io.read("long.extxyz", ":"), samples=4)
    found = json.loads(result.stdout)
    assert found["structures"] == 600
    assert found["method"] == "conditioned"
    for name, value in expected.summary().items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)


def test_memory_does_not_grow_with_the_file(long, command):
    """Twenty times the frames of one batch: less than a tenth of what holding them would take."""
    program = (
        "import resource, sys; from pathlib import Path\n"
        "import blips; from blips.cli.predict_file import predict_file\n"
        "potential = blips.load('model.safetensors')\n"
        "def most(name):\n"
        "    predict_file(potential, Path(name), Path('out.extxyz'), method='map')\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "first = most('long.extxyz'); print(most('longer.extxyz') - first)"
    )
    text = (long / "long.extxyz").read_text()
    (long / "longer.extxyz").write_text(text * 20)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert float(result.stdout) < 8.0, result.stderr  # MB; 12,000 Atoms are about 40 MB


def test_a_bar_with_the_time_left_fits_80_columns(long):
    """On a terminal; two seconds are patched to none, so that the test need not be slow."""
    program = (
        "import sys; import blips.progress as progress; progress.DELAY = 0.0\n"
        f"sys.argv = {['blips', *PREDICT]!r}\n"
        "from blips.cli import main; main()"
    )
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.DEVNULL, stderr=writer, env={**ENVIRONMENT, "TERM": "xterm"},
    )  # fmt: skip
    os.close(writer)
    shown = b""
    with suppress(OSError):  # when the other end is closed
        while chunk := os.read(reader, 4096):
            shown += chunk
    os.close(reader)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if "predicting" in line]
    assert any(re.search(r"\d+/600 0:00:\d\d left", line) for line in lines), text
    assert max(map(len, lines)) <= 80
