"""The page: a Jinja template in which every text is escaped, with embedded scripts and styles.

A content security policy forbids everything but these scripts and this style, which it names by
their SHA-256: no network, no code made of strings.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from blips.uq.bootstrap import Interval
from blips.uq.plots import Plot

SCRIPTS = ("vendor/3Dmol-min.js", "page/plot.js", "page/report.js")


def document(
    template: str,
    title: str,
    lead: str,
    *,
    sets: Sequence[Mapping[str, Any]],
    figures: Mapping[str, Plot | None],
    **content: Any,
) -> str:
    """Return the whole page of a template that extends "report.html".

    `lead` is a sentence below the title, `sets` are structures (`blips.report.structures`),
    `figures` plots that belong to no set, and `content` is what the template says beside these.
    """
    in_3d = any(one["structures"] for one in sets)
    scripts = [resource(name) for name in (SCRIPTS if in_3d else SCRIPTS[1:])]
    style = resource("page/report.css")
    text = resource("vendor/3Dmol-LICENSE.txt")
    licence = text.replace("--", "- -").replace(">", "&gt;")  # it ends no comment
    drawn = {name: vars(plot) for name, plot in figures.items() if plot is not None}
    page = _environment().get_template(template)
    return page.render(
        title=title,
        lead=lead,
        policy=policy(scripts, style),
        style=style,
        scripts=scripts,
        licence=licence if in_3d else "",
        data={"sets": sets, "figures": drawn},
        sets=sets,
        figures=figures,
        **content,
    )


def policy(scripts: Sequence[str], style: str) -> str:
    """Return the content security policy that allows these texts and nothing else."""
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'sha256-{_digest(style)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def resource(name: str) -> str:
    """Read the text of a file of this package."""
    return (files("blips.report") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _environment() -> Environment:
    loader = PackageLoader("blips.report", "page")
    made = Environment(autoescape=True, undefined=StrictUndefined, loader=loader)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    made.filters["words"] = _words
    made.tests["interval"] = lambda value: isinstance(value, Interval)
    return made


def _words(value: Any) -> str:
    """Return a value of a table as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return "-" if value is None else str(value)
