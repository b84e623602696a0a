"""Files from strangers run no code: nothing in the package can make them."""

import ast
from pathlib import Path

import pytest

import blips

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


def test_a_class_in_a_campaign_needs_trust():
    from blips.active.calculators import make_calculator
    from blips.errors import ConfigError

    with pytest.raises(ConfigError, match=r"label\.trust"):
        make_calculator("os.system", {"command": "false"})
