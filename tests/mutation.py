"""Do the tests notice when the code is wrong? Change it in one place at a time, and run them.

    python tests/mutation.py --mutants 20 --output results/mutants.json      (make mutants)

A mutant is a module with one operator, comparison, sign or number changed. It is killed if a test
of that module fails or hangs, and survives if all pass. Each module has `--mutants` of them, drawn
with a seed; results are kept as they come, by seed, and a mutant that was killed is not tried again
until its module changes. A mutant of `EXPLAINED` computes the same as the code, or what is as good,
for the reason given there; it is counted apart. Survivors that are killed or explained in a later
run are "killed later" and "explained later": `first_pass` has the score without them, which is
that of the tests as they were when the sample was drawn.
"""

import argparse
import ast
import copy
import gc
import hashlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from explained_mutants import EXPLAINED

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "blips"
PATIENCE = 8  # a mutant whose tests take so many times longer than usual hangs
CONDITIONED = " ".join(
    f"tests/inference/test_conditioned{part}.py" for part in ("_draws", "", "_scale", "_std")
)
OWN = "not chgnet and not sevennet and not orb and not mattersim"  # other packages import slowly
SLOW_IMPORTS = (  # of tests; children of one process share them
    "ase.build",
    "hypothesis",
    "lightning_fabric",
    "pydantic",
    "scipy.stats",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "vesin",
)
TESTS: dict[str, str] = {
    "bayes/estimators": "tests/bayes/test_estimators.py tests/bayes/test_moments.py "
    "tests/bayes/test_random.py",
    "bayes/linear": "tests/bayes/test_linear.py tests/backbones/test_e3nn_samples.py "
    "tests/bayes/test_convert.py tests/bayes/test_estimators.py tests/bayes/test_random.py",
    "bayes/kl": "tests/bayes/test_kl.py",
    "bayes/noise": "tests/bayes/test_noise.py tests/bayes/test_random.py "
    "tests/bayes/test_estimators.py tests/bayes/test_moments.py "
    "tests/backbones/test_e3nn_samples.py",
    "bayes/encoder": "tests/bayes/test_encoder.py",
    "bayes/sketch": "tests/bayes/test_sketch.py",
    "bayes/condition": f"tests/bayes/test_condition.py {CONDITIONED}",
    "inference/scale": f"tests/inference/test_scale.py {CONDITIONED}",
    "inference/posterior": "tests/inference/test_scale.py tests/inference/test_staleness.py "
    f"{CONDITIONED} tests/train/test_checkpoint.py",
    "inference/conditioned": f"{CONDITIONED} tests/inference/test_conditioned_members.py "
    "tests/inference/test_conditioned_errors.py tests/inference/test_maps.py",
    "uq/metrics": "tests/uq/test_metrics.py tests/uq/test_ranking.py tests/uq/test_forces.py "
    "tests/uq/test_assess.py",
    "uq/bootstrap": "tests/uq/test_bootstrap.py tests/uq/test_evaluate.py",
    "uq/calibrate": "tests/uq/test_calibrate.py tests/uq/test_conformal.py "
    "tests/uq/test_scale.py tests/uq/test_evaluate.py",
    "train/objective": "tests/train/test_objective.py tests/train/test_fit.py",
    "train/loss": "tests/train/test_loss.py",
    "sim/guard": "tests/sim/test_guard.py",
    "active/select": "tests/active/test_select.py",
    "active/rules": "tests/active/test_rules.py",
}
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
COMPARISONS: dict[type, type] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


def mutants(source: str) -> Iterator[tuple[str, ast.Module]]:
    """Every changed tree of a module, and what was changed."""
    tree = ast.parse(source)
    places = [node for node in _computing(tree) if _changed(copy.deepcopy(node)) is not None]
    for number, place in enumerate(places):
        whole = copy.deepcopy(tree)
        node = [found for found in _computing(whole) if _changed(copy.deepcopy(found))][number]
        what = _changed(node)
        yield f"{place.lineno}:{place.col_offset}-{place.end_col_offset} {what}", whole


def _computing(node: ast.AST) -> Iterator[Any]:
    """Nodes that compute something: no annotations, and no messages of errors and warnings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Raise | ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.keyword) and child.arg in ("strict", "stacklevel"):
                continue  # of zip, where lengths agree, and of a warning
            yield child
            yield from _computing(child)


def _changed(node: Any) -> str | None:
    """Change a node in place; what was done, None where there is nothing to change."""
    match node:
        case ast.BinOp(op=op) if type(op) in OPERATORS and not _is_text(node):
            node.op = OPERATORS[type(op)]()
            return f"{type(op).__name__} -> {type(node.op).__name__}"
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            node.ops = [COMPARISONS[type(op)]()]
            return f"{type(op).__name__} -> {type(node.ops[0]).__name__}"
        case ast.BoolOp(op=op):
            node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            return f"{type(op).__name__} -> {type(node.op).__name__}"
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            what, node.op = type(node.op).__name__, ast.UAdd()
            if what == "Not":
                node.operand = ast.Call(_name("bool"), [node.operand], [])
            ast.fix_missing_locations(node)
            return f"without {what}"
        case ast.Constant(value=bool() as value):
            node.value = not value
            return f"{value} -> {node.value}"
        case ast.Constant(value=int() | float() as value):
            node.value = value + 1 if isinstance(value, int) else 2 * value + (value == 0)
            return f"{value} -> {node.value}"
    return None


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _is_text(node: ast.BinOp) -> bool:
    """Whether a side is a text, which has no arithmetic."""
    sides = (node.left, node.right)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str))
        for s in sides
    )


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import a mutant in the place of its module."""

    def __init__(self, module: str, path: Path, tree: ast.Module) -> None:
        self.module, self.path, self.tree = module, path, tree

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Answer for the one module."""
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: Any) -> None:
        """Run the mutant."""
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def outcome(module: str, tree: ast.Module | None, seconds: float) -> str:
    """Run the tests of a module in a process of their own: killed, survived or hangs."""
    path = PACKAGE / f"{module}.py"
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        if tree is not None:
            sys.meta_path.insert(0, Instead(f"blips.{module.replace('/', '.')}", path, tree))
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they load in seconds, and are not used
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-k", OWN]
        os._exit(int(pytest.main([*options, *TESTS[module].split()])))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def try_module(module: str, count: int, seed: int, known: dict[str, str]) -> None:
    """Try a random choice of a module's mutants; `known` takes what became of each."""
    start = time.monotonic()
    if outcome(module, None, 1800) != "survived":
        raise SystemExit(f"the tests of {module} fail as it is; mend them first")
    seconds = 30 + PATIENCE * (time.monotonic() - start)
    every = list(mutants((PACKAGE / f"{module}.py").read_text()))
    random.Random(seed).shuffle(every)
    for what, tree in every[:count]:
        before = known.get(what, "")
        if before not in ("", "survived"):
            continue
        if _why(module, what) is None:
            now = outcome(module, ast.fix_missing_locations(tree), seconds)
        else:
            now = "explained"
        known[what] = f"{now} later" if before and now != "survived" else now
        print(f"{module}:{what}: {known[what]}   {_line(module, what)}", flush=True)


def _line(module: str, what: str) -> str:
    """Source line of a mutant."""
    number = int(what.split(":")[0])
    return (PACKAGE / f"{module}.py").read_text().splitlines()[number - 1].strip()


def _why(module: str, what: str) -> str | None:
    return EXPLAINED.get((module, _line(module, what), what.split(maxsplit=1)[1]))


def _digest(module: str) -> str:
    return hashlib.sha256((PACKAGE / f"{module}.py").read_bytes()).hexdigest()[:12]


def summary(modules: dict[str, Any]) -> dict[str, Any]:
    """Counts of outcomes, the score of the first pass, and the lines of what was not killed."""
    tried = [(m, what, how) for m in modules for what, how in modules[m]["mutants"].items()]
    hows = [how for *_, how in tried]
    counted = len(tried) - hows.count("explained")
    described = [
        {"mutant": f"{m}:{what}", "outcome": how, "line": _line(m, what), "why": _why(m, what)}
        for m, what, how in tried
        if how not in ("killed", "hangs")
    ]
    return {
        "mutants": len(tried),
        "explained": sum(how.startswith("explained") for how in hows),
        "survived": hows.count("survived"),
        "first_pass": round((hows.count("killed") + hows.count("hangs")) / max(counted, 1), 4),
        "not_killed_at_first": described,
    }


def main() -> None:
    """Try mutants of the modules that are named, or of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(TESTS), help=", ".join(TESTS))
    parser.add_argument("--mutants", type=int, default=20, help="of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ROOT / "results/mutants.json")
    options = parser.parse_args()
    os.chdir(ROOT)
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    gc.freeze()
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    samples = json.loads(options.output.read_text()) if options.output.exists() else {}
    modules = samples.get(f"seed {options.seed}", {}).get("modules", {})
    modules = {
        m: kept for m, kept in modules.items() if m in TESTS and kept["source"] == _digest(m)
    }
    for module in options.modules:
        found = modules.setdefault(module, {"source": _digest(module), "mutants": {}})
        try_module(module, options.mutants, options.seed, found["mutants"])
        found["commit"] = commit
        samples[f"seed {options.seed}"] = content = {**summary(modules), "modules": modules}
        options.output.write_text(json.dumps(samples, indent=1) + "\n")
        print(f"{content['mutants']} mutants, {content['survived']} survived", flush=True)


if __name__ == "__main__":
    main()
