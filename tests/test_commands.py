"""Every command: help, examples, JSON, completion, exit codes, interruption."""

import csv
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
import yaml
from ase.build import molecule
from typer.testing import CliRunner

import blips
from blips.active import load_campaign
from blips.backbones import PaiNN
from blips.cli import app, main
from blips.cli.configuration import TEMPLATES
from blips.config import load_config
from blips.errors import CheckpointError
from helpers import TINY, morse_ammonia

COMMANDS = {
    command.name or command.callback.__name__: command.callback
    for command in app.registered_commands
}
EXAMPLE = re.compile(r"^ *Example: blips (.*)$", re.MULTILINE)
QUICK = {"epochs": 2, "batch_size": 4, "tensorboard": False, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    torch.manual_seed(0)
    model = blips.bayesianize(PaiNN(**TINY))
    model.backbone.reference.set({1: 0.0, 7: -1.0})
    blips.save(model, folder / "model.safetensors")
    for seed, name in enumerate(("data", "train", "valid", "test", "my", "start")):
        ase.io.write(folder / f"{name}.extxyz", morse_ammonia(8, seed=seed))
    config = {
        "model": {"backbone": "painn", "hyperparameters": TINY},
        "data": {"train": "train.extxyz", "valid": "valid.extxyz"},
        "training": QUICK,
        "folder": "runs/blips",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def in_process(folder, *arguments, **options):
    """A real process, as a shell starts it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-m", "blips", *map(str, arguments)],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment | options,
    )  # fmt: skip


def test_help_is_quick_and_imports_nothing_heavy():
    program = (
        "import resource, sys; sys.argv = ['blips', '--help']\n"
        "from blips.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = {'torch', 'ase', 'numpy', 'scipy', 'pydantic'} & sys.modules.keys()\n"
        "print(f'\\n{used.ru_utime + used.ru_stime} {sorted(heavy)}')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    seconds, heavy = result.stdout.splitlines()[-1].split(" ", 1)
    assert heavy == "[]"
    assert float(seconds) < 0.5
    assert "130" in result.stdout  # exit codes are told


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert EXAMPLE.search(inspect.getdoc(COMMANDS[name])), f"blips {name} --help has no example"


def example_of(name):
    return shlex.split(EXAMPLE.search(inspect.getdoc(COMMANDS[name])).group(1))


@pytest.mark.parametrize(
    "name",
    [
        "template", "validate", "info", "predict", "evaluate", "calibrate", "train",
        "report",
    ],
)  # fmt: skip
def test_examples_run(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    if name == "report":
        assert example_of(name)[1] == "runs/nh3"
        invoke("train", "config.yaml", "folder=runs/nh3")
    arguments = example_of(name)
    into = None
    if ">" in arguments:
        arguments, into = arguments[: arguments.index(">")], arguments[-1]
    extra = {"train": ["training.epochs=1"], "evaluate": ["--bootstrap", "20"]}.get(name, [])
    result = invoke(*arguments, *extra)
    assert result.exit_code == 0, result.output
    if into is not None:
        (folder / f"printed-{into}").write_text(result.stdout)
        assert invoke("validate", f"printed-{into}").exit_code == 0


def test_the_example_of_md_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    result = invoke(*example_of("md"), "--steps", 2, "--every", 1)
    assert result.exit_code == 0, result.output
    assert (folder / "runs" / "md" / "outcome.json").is_file()


def test_the_example_of_active_runs(folder, monkeypatch):
    pytest.importorskip("distributed", reason="blips[active] is not installed")
    monkeypatch.chdir(folder)
    ase.io.write("molecule.extxyz", molecule("NH3"))
    config = yaml.safe_load(invoke("template", "active").stdout)
    config["initial"] = {"structures": "molecule.extxyz", "count": 5, "displacement": 0.05}
    config["model"]["hyperparameters"] = TINY
    config["training"].update(QUICK)
    config["explore"].update(walkers=1, steps=10, every=2)
    config["select"].update(batch=3, samples=4)
    config["label"]["calculator"] = "emt"
    config["executor"]["kind"] = "inline"
    (folder / "campaign.yaml").write_text(yaml.safe_dump(config))
    result = invoke(*example_of("active"), "--quiet")
    assert result.exit_code == 0, result.output
    assert "8 labels" in result.stdout
    assert invoke("validate", "campaign.yaml", "--active").exit_code == 0
    assert "explore" in json.loads(invoke("template", "active", "--schema").stdout)["properties"]


def test_the_example_of_active_learning_runs_and_has_a_report(folder, monkeypatch):
    from active.campaigns import tiny_campaign

    monkeypatch.chdir(folder)
    config = tiny_campaign(folder / "learning", stop={"rounds": 1})
    (folder / "campaign.yaml").write_text(yaml.safe_dump(config))
    result = invoke(*example_of("active"), "--quiet")
    assert result.exit_code == 0, result.output
    result = invoke("report", config["folder"], "-o", "campaign.html")
    assert result.exit_code == 0, result.output
    page = (folder / "campaign.html").read_text()
    assert "Learning curve" in page
    assert "labelled" in page


@pytest.mark.slow
def test_the_example_of_the_demo_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    result = invoke(*example_of("demo"))
    assert result.exit_code == 0, result.output


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # CHGNet's
def test_the_examples_of_fine_tuning_run(folder, monkeypatch):
    pytest.importorskip("chgnet.model", reason="chgnet is not installed")
    monkeypatch.chdir(folder)
    template = yaml.safe_load(invoke("template", "finetune").stdout)
    template["training"].update(QUICK, epochs=1)
    template["data"]["valid"] = 0.25
    (folder / "finetune.yaml").write_text(yaml.safe_dump(template))
    for atoms in (frames := ase.io.read("my.extxyz", ":")):
        atoms.set_cell([8, 8, 8])
        atoms.pbc = True
    ase.io.write("my.extxyz", frames)
    for name in ("finetune", "export"):
        result = invoke(*example_of(name))
        assert result.exit_code == 0, result.output
    assert (folder / "finetuned.pth.tar").is_file()


def test_json_for_machines(folder, monkeypatch):
    monkeypatch.chdir(folder)
    predicted = json.loads(
        invoke("predict", "model.safetensors", "data.extxyz", "-o", "p.extxyz", "--json").stdout
    )
    frames = ase.io.read("p.extxyz", ":")
    assert predicted["structures"] == 8
    energies = [frame.info["energy_uncertainty"] for frame in frames]
    assert predicted["energy_uncertainty"] == pytest.approx(energies, rel=1e-5)
    largest = [np.linalg.norm(f.arrays["forces_uncertainty"], axis=1).max() for f in frames]
    assert predicted["largest_force_uncertainty"] == pytest.approx(largest, rel=1e-5)
    arguments = ["model.safetensors", "data.extxyz", "--bootstrap", 10, "--json"]
    evaluated = json.loads(invoke("evaluate", *arguments).stdout)
    stored = json.loads(Path(evaluated["file"]).read_text())["model"]
    assert evaluated["forces"]["mae"] == stored["forces"]["mae"]
    arguments = ["model.safetensors", "data.extxyz", "-o", "c.safetensors", "--json"]
    calibrated = json.loads(invoke("calibrate", *arguments).stdout)
    assert calibrated["calibration"]["forces"]["kind"] == "scale"
    described = json.loads(invoke("info", "c.safetensors", "--json").stdout)
    assert described["calibration"] == calibrated["calibration"]
    assert "edge rows" in described["bayesian_maps"]
    valid = json.loads(invoke("validate", "config.yaml", "--json").stdout)
    assert valid["training"]["epochs"] == 2


def test_the_schema_describes_what_is_accepted(folder):
    schema = json.loads(invoke("template", "--schema").stdout)
    assert set(schema["properties"]) == {"model", "data", "training", "seed", "folder"}
    assert schema["additionalProperties"] is False
    assert "batch_size" in schema["$defs"]["TrainingConfig"]["properties"]


@pytest.mark.parametrize("name", ["train", "finetune", "active"])
def test_every_key_of_a_template_has_a_comment_and_none_is_lost(name):
    lines = invoke("template", name).stdout.splitlines()
    assert all(re.search(r": .*# \S|:  # \S", line) for line in lines)
    assert not [line for line in lines if line.rstrip().endswith("one of")]
    load = load_campaign if name == "active" else load_config
    expected = load(*TEMPLATES[name]).model_dump(mode="json")
    assert yaml.safe_load("\n".join(lines)) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell, tmp_path):
    words = {"bash": "COMP_WORDS", "zsh": "_TYPER_COMPLETE_ARGS", "fish": "_TYPER_COMPLETE_ARGS"}
    options = {"_BLIPS_COMPLETE": f"complete_{shell}", words[shell]: "blips pre", "COMP_CWORD": "1"}
    options["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    program = "import sys; sys.argv = ['blips']; from blips.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **options}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert "predict" in result.stdout
    assert "train" not in result.stdout


def wait_for(path, process, seconds=120):
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.05)


def test_ctrl_c_leaves_a_run_that_resumes(folder, monkeypatch):
    arguments = ["train", "config.yaml", "folder=runs/long", "training.epochs=100000"]
    process = in_process(folder, *arguments)
    run = folder / "runs" / "long"
    wait_for(run / "metrics.csv", process)  # written after the checkpoint
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert not list(run.glob(".*tmp"))
    with (run / "metrics.csv").open() as file:
        done = len(list(csv.DictReader(file)))
    assert done >= 1
    monkeypatch.chdir(folder)
    arguments[-1] = f"training.epochs={done + 2}"
    assert invoke(*arguments, "--resume").exit_code == 0
    with (run / "metrics.csv").open() as file:
        epochs = [int(float(row["epoch"])) for row in csv.DictReader(file)]
    assert epochs == list(range(1, done + 3))


def exit_of(monkeypatch, capsys, folder, *arguments):
    """Exit code and stderr of the command, without a new process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["blips", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["train", "training.epoch=3"], ["'training.epoch'", "did you mean 'epochs'"]),
        (["train", "config.yaml", "model.backbone=pain"], ["pain"]),
        (["train", "absent.yaml"], ["absent.yaml"]),
        (["predict", "model.safetensors", "absent.xyz", "-o", "x"], ["absent.xyz", "no such file"]),
        (["predict", "model.safetensors", "half.xyz", "-o", "x"], ["half.xyz", "frame 1"]),
        (
            ["predict", "model.safetensors", "silicon.xyz", "-o", "x"],
            ["silicon.xyz, frame 0", "unknown elements Si", "trained on H, N"],
        ),
        (["md", "model.safetensors", "silicon.xyz"], ["unknown elements Si"]),
        (["predict", "plain.safetensors", "data.extxyz", "-o", "x"], ["PaiNN", "blips condition"]),
        (["predict", "data.extxyz", "data.extxyz", "-o", "x"], ["safetensors"]),
        (["predict", "model.safetensors", "data.extxyz", "-o", "no/x"], ["no", "create it"]),
        (["predict", "model.safetensors", "data.extxyz", "-o", "x", "--method", "mp"], ["mp"]),
        (
            ["calibrate", "model.safetensors", "data.extxyz", "-o", "x", "--kind", "k"],
            ["conformal"],
        ),
        (["report", "absent"], ["absent is not there"]),
        (["predict"], ["Missing argument"]),
        (["prdict"], ["No such command"]),
    ],
)
def test_mistakes_end_with_2_one_message_and_nothing_written(
    folder, monkeypatch, capsys, arguments, messages
):
    good = (folder / "data.extxyz").read_text().splitlines(keepends=True)
    (folder / "half.xyz").write_text("".join(good[:9]))
    ase.io.write(folder / "silicon.xyz", molecule("SiH4"))
    blips.save(PaiNN(**TINY), folder / "plain.safetensors")
    before = set(folder.rglob("*"))
    code, errors = exit_of(monkeypatch, capsys, folder, *arguments)
    assert code == 2
    for message in messages:
        assert message in errors
    assert "Traceback" not in errors
    assert set(folder.rglob("*")) == before


def test_debug_shows_the_traceback(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["blips", "info", "absent.safetensors", "--debug"])
    with pytest.raises(CheckpointError):
        main()


def test_a_run_that_fails_ends_with_1(folder, monkeypatch, capsys):
    arguments = ["train", "config.yaml", "folder=runs/nan", "training.lr=1e30"]
    arguments += ["model.bayes.enabled=false"]
    code, errors = exit_of(monkeypatch, capsys, folder, *arguments, "training.epochs=30")
    assert code == 1
    assert "not finite" in errors
    (folder / "blocked").write_text("a file")
    arguments = ["evaluate", "model.safetensors", "data.extxyz", "--folder", "blocked/here"]
    code, errors = exit_of(monkeypatch, capsys, folder, *arguments, "--bootstrap", 2)
    assert code == 1
    assert "blocked" in errors
    assert "Traceback" not in errors
