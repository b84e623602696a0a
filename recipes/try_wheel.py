"""Install a wheel into an empty environment with its plain dependencies alone, and try it there.

The dependencies are linked from the environment that runs this (torch is large), but only those
that the wheel declares, with all that these need: a package that is missing from the declaration
is missing there. Then the commands of the README's first screen run, in small.

    python recipes/try_wheel.py build/dist/blips_mlip-0.1.0-py3-none-any.whl
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

README = Path(__file__).parents[1] / "README.md"
TRAINING = "training.epochs=1 model.hyperparameters.features=8 training.tensorboard=false"
COMMANDS = (
    "--version",
    "template",
    "template active",
    f"train config.yaml data.train=structures.extxyz data.valid=structures.extxyz {TRAINING}",
    "calibrate runs/blips/best.safetensors structures.extxyz -o model.safetensors --samples 4",
    "evaluate model.safetensors structures.extxyz --bootstrap 10",
    "demo --epochs 1 --folder runs/demo",
    "report runs/blips --structures structures.extxyz --bootstrap 10 -o report.html",
)
REFUSED = (  # an extra is missing: one line that says how to install it
    "predict chgnet structures.extxyz -o out.extxyz",
    "active initial.structures=structures.extxyz label.calculator=gfn2-xtb stop.labels=1",
)
STRUCTURES = """
import ase.io
from blips.data.ammonia import load_ammonia
ase.io.write("structures.extxyz", load_ammonia("train")[:8])
"""


def plain_closure(requirements: list[str], found: dict[str, Path]) -> None:
    """Add names and folders of the installed packages that these requirements need."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found:
            continue
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:
            continue
        found[name] = Path(str(package.locate_file("")))
        plain_closure(package.requires or [], found)


def link(name: str, folder: Path, target: Path) -> None:
    """Link the files of an installed package into another site-packages."""
    for top in {Path(file).parts[0] for file in distribution(name).files or []}:
        if top not in ("..", "__pycache__") and not (target / top).exists():
            (target / top).symlink_to(folder / top)


def environment(wheel: Path, folder: Path) -> Path:
    """Make the environment; return its folder of programs."""
    venv.create(folder, with_pip=False)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    pip = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", site, wheel], check=True)
    about = next(site.glob("blips_mlip-*.dist-info")) / "METADATA"
    declared = re.findall(r"^Requires-Dist: (.*)$", about.read_text(), re.MULTILINE)
    found: dict[str, Path] = {}
    plain_closure(declared, found)
    for name, place in found.items():
        link(name, place, site)
    return folder / "bin"


def main() -> None:
    """Try the wheel; the first failure ends it."""
    parser = argparse.ArgumentParser(description="Try a wheel in an empty environment.")
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        python = environment(wheel, place / "venv") / "python"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [str(python), *arguments]
            return subprocess.run(command, cwd=place, env=clean, capture_output=True, text=True)

        own_data = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
        small = own_data.replace('"epochs": 20', '"epochs": 1').replace("features=32", "features=8")
        for name, code in (("structures", STRUCTURES), ("README.md, own data", small)):
            _report(name, run("-c", code), expected=0)
        (place / "config.yaml").write_text(run("-m", "blips", "template").stdout)
        for command in COMMANDS:
            _report(f"blips {command}", run("-m", "blips", *command.split()), expected=0)
        for command in REFUSED:
            done = run("-m", "blips", *command.split())
            _report(f"blips {command}", done, expected=2)
            last = done.stderr.strip().splitlines()[-1]
            if "Traceback" in done.stderr or "pip install" not in last:
                sys.exit(f"no line that says what to install: {done.stderr[-500:]}")


def _report(name: str, done: subprocess.CompletedProcess[str], expected: int) -> None:
    print(f"{name[:70]}: {done.returncode}", flush=True)
    if done.returncode != expected or "Traceback" in done.stderr:
        sys.exit(f"{name} ended with {done.returncode}\n{done.stdout[-500:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
