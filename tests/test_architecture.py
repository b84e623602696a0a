"""Imports flow one way: a module may import from its own layer's folder and from lower layers."""

import ast
from pathlib import Path

import pytest

import blips

PACKAGE = Path(blips.__file__).parent

# Lower layers first. `bayes` stands beside `data` and `backbones`: it may import errors alone.
LAYERS = [
    {"errors", "keys"},
    {"config", "units", "files", "defaults", "progress"},
    {"bayes", "data"},
    {"backbones"},
    {"prediction"},
    {"inference"},
    {"potential"},
    {"conversion", "testing", "uq"},
    {"train"},
    {"baselines"},
    {"sim"},
    {"properties"},
    {"active"},
    {"report"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ONLY = {"bayes": {"errors", "bayes"}}
TOP_LEVEL_ONLY_TORCH = "bayes"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "blips":
                names = [f"blips.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("blips.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_to_lower_layers(path: Path):
    part = part_of(path)
    if part == "__init__":
        return
    for imported in imported_parts(path) & LEVEL.keys():
        if imported == part:
            continue
        assert LEVEL[imported] < LEVEL[part], f"{part} imports {imported}, which lies above it"
        assert imported in ONLY.get(part, {imported}), f"{part} must not import {imported}"


def test_the_package_knows_nothing_of_studies_benchmarks_and_recipes():
    for path in modules():
        above = {name.split(".")[0] for name in imported_modules(path)}
        assert not above & {"studies", "benchmarks", "recipes"}, path.name


def test_every_module_has_a_layer():
    parts = {part_of(path) for path in modules()} - {"__init__"}
    assert parts <= LEVEL.keys()


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


# These modules of uq take arrays, and import each other but nothing that knows a potential.
ARRAY_MODULES = ("checks", "metrics", "bootstrap", "calibrate")
ARRAYS = {"numpy", "scipy", "blips.errors"} | {f"blips.uq.{name}" for name in ARRAY_MODULES}


@pytest.mark.parametrize(
    ("target", "allowed"),
    [("bayes", {"torch", "blips"}), *((f"uq/{name}", ARRAYS) for name in ARRAY_MODULES)],
)
def test_the_mathematics_needs_few_packages(target: str, allowed: set[str]):
    import sys

    paths = [path for path in modules() if path.is_relative_to(PACKAGE / target)]
    paths += [path for path in modules() if path == PACKAGE / f"{target}.py"]
    assert paths, f"{target} is missing"
    for path in paths:
        for name in imported_modules(path):
            known = name.split(".")[0] in sys.stdlib_module_names
            known |= any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed)
            assert known, f"{path.name} imports {name}"


def test_figures_are_made_without_pyplot():
    for path in modules():
        assert not any("pyplot" in name for name in imported_modules(path)), path.name


def test_importing_blips_is_free_of_side_effects():
    import subprocess
    import sys

    code = (
        "import torch; before = (torch.get_default_dtype(), torch.is_grad_enabled());"
        "import blips, blips.uq;"
        "assert before == (torch.get_default_dtype(), torch.is_grad_enabled());"
        "import sys; heavy = {'matplotlib', 'pyscf', 'lightning_fabric', 'tensorboard'};"
        "heavy |= {'distributed', 'tblite'};"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
