"""Files from strangers run no code: nothing in the package can make them."""

import ast
import json
from pathlib import Path

import pytest

import blips
from blips.active.config import load_campaign
from blips.errors import ConfigError
from blips.sim.reference import make_calculator, needs_trust

PACKAGE = Path(blips.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# (file, name): what may be imported from them all the same, because it runs nothing.
ALLOWED_IMPORTS = {("backbones/foreign.py", "UnpicklingError")}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "__import__",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
}
# torch.load may unpickle where the user said so, and only there.
TRUSTED_LOADS = {"backbones/foreign.py": "not trust"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_runs_code_from_files(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            assert not names & FORBIDDEN_IMPORTS, names
        if isinstance(node, ast.ImportFrom) and node.module in FORBIDDEN_IMPORTS:
            names = {alias.name for alias in node.names}
            assert all((name_of(path), name) in ALLOWED_IMPORTS for name in names), names
        if isinstance(node, ast.Call):
            check_call(path, node)


def check_call(path: Path, node: ast.Call) -> None:
    called = dotted(node.func)
    where = f"{name_of(path)}:{node.lineno}"
    assert called not in FORBIDDEN_CALLS, f"{where} calls {called}"
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    assert options.get("allow_pickle", "False") == "False", f"{where} allows pickles"
    assert options.get("shell", "False") == "False", f"{where} uses a shell"
    if called == "torch.load":
        allowed = {"True", TRUSTED_LOADS.get(name_of(path), "True")}
        assert options.get("weights_only") in allowed, f"{where} unpickles"


DOORS = {
    "a class": {"label": {"calculator": "os.system"}},
    "a class with a colon": {"label": {"calculator": "os:system", "options": {"command": "false"}}},
    "a command": {"label": {"calculator": "espresso", "options": {"command": "sh -c false"}}},
    "pseudopotentials": {"label": {"calculator": "espresso", "options": {"pseudo_dir": "/tmp"}}},
    "a pseudopotential": {
        "label": {"calculator": "espresso", "options": {"pseudopotentials": {"Si": "../../x.upf"}}}
    },
    "a folder to write": {"label": {"calculator": "espresso", "options": {"directory": "/tmp/x"}}},
    "a path in the input": {
        "label": {
            "calculator": "espresso",
            "options": {"input_data": {"CONTROL": {"OutDir": "/tmp/x"}}},
        }
    },
    "lines of a job": {"executor": {"kind": "slurm", "prologue": ["false"]}},
    "directives of a job": {"executor": {"kind": "pbs", "extra": ["-W block=true"]}},
    "a line in a name": {"executor": {"kind": "slurm", "account": "mine\nfalse"}},
}


def leaves(settings, prefix=""):
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"


@pytest.mark.parametrize("door", DOORS)
def test_what_a_file_lets_run_needs_trust_and_what_is_typed_does_not(door, tmp_path):
    """Commands, modules and paths of a campaign, in a file and on the command line."""
    (section,) = DOORS[door]
    start = {"initial": {"structures": "start.extxyz"}}
    file = tmp_path / "campaign.json"
    file.write_text(json.dumps(start | DOORS[door]))
    with pytest.raises(ConfigError, match=rf"{section}\.trust"):
        load_campaign(file)
    trusted = load_campaign(file, {section: {"trust": True}})
    assert getattr(trusted, section).trust
    file.write_text(json.dumps(start))
    typed = list(leaves(DOORS[door]))
    assert getattr(load_campaign(file, *typed), section).trust
    harmless = [text.partition("=")[0] + "=null" for text in typed]
    file.write_text(json.dumps(start | DOORS[door]))
    with pytest.raises(ConfigError, match=rf"{section}\.trust"):
        load_campaign(*harmless, file)  # the file has the last word


@pytest.mark.parametrize("door", [name for name in DOORS if "label" in DOORS[name]])
def test_the_process_that_labels_asks_for_trust_too(door):
    label = DOORS[door]["label"]
    with pytest.raises(ConfigError, match=r"label\.trust"):
        make_calculator(label["calculator"], label.get("options", {}))


def test_the_reference_of_md_is_typed_and_needs_no_trust():
    assert type(make_calculator("ase.calculators.lj:LennardJones", trust=True)).__name__ == (
        "LennardJones"
    )


@pytest.mark.parametrize("name", ["gfn2-xtb", "pyscf", "emt"])
def test_numbers_and_methods_need_no_trust(name):
    assert needs_trust(name, {"charge": 1}) == []
    silicon = {"pseudopotentials": {"Si": "Si.upf"}, "kpts": [2, 2, 2], "input_data": {"a": {}}}
    assert needs_trust("espresso", silicon) == []
