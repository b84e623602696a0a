"""A page of the API reference for every part of the package, from its docstrings."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).parents[2] / "src" / "blips"
SURFACE = {
    "bayesianize": (
        "blips.conversion.bayesianize",
        "a Bayesian potential of any backbone or module",
    ),
    "BayesianPotential": ("blips.potential.BayesianPotential", "what it returns"),
    "Prediction": ("blips.prediction.Prediction", "means and standard deviations"),
    "fit": ("blips.train.fit.fit", "train"),
    "evaluate": ("blips.uq.assess.evaluate", "metrics on labelled structures"),
    "calibrate": ("blips.uq.assess.calibrate", "error bars that fit labelled structures"),
    "load": ("blips.train.released.load", "a potential from a file, or a released one by its name"),
    "save": ("blips.train.checkpoint.save", "and into one"),
    "Calculator": ("blips.sim.calculator.Calculator", "an ASE calculator with uncertainties"),
}
NOT_SHOWN = {"__init__", "__main__", "cli", "defaults", "demo", "files", "keys", "memory"}


def parts() -> list[str]:
    """Sub-packages and modules of blips."""
    found = [path.stem for path in PACKAGE.glob("*.py")]
    found += [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    return sorted(set(found) - NOT_SHOWN)


def on_config(config: Any, **_: Any) -> Any:
    """Add the pages to the navigation."""
    pages = [{"blips": "api/index.md"}]
    pages += [{f"blips.{name}": f"api/{name}.md"} for name in parts()]
    for section in config.nav:
        if "API" in section:
            section["API"] = pages
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Write the pages."""
    links = "\n".join(f"- [`blips.{name}`]({name}.md): {summary(name)}" for name in parts())
    names = "\n".join(
        f"| [`blips.{name}`][{where}] | {what} |" for name, (where, what) in SURFACE.items()
    )
    index = (
        "# API\n\n`import blips` gives these names:\n\n"
        f"| name | |\n|---|---|\n{names}\n\nThe rest is in its parts:\n\n{links}\n"
    )
    files.append(File.generated(config, "api/index.md", content=index))
    for name in parts():
        content = f"::: blips.{name}\n    options:\n      heading_level: 1\n"
        files.append(File.generated(config, f"api/{name}.md", content=content))
    return files


def summary(name: str) -> str:
    """First line of the docstring, as an end of a sentence."""
    import ast

    path = PACKAGE / f"{name}.py"
    path = path if path.exists() else PACKAGE / name / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ")
