"""The page: text that is escaped without exception, tables, and embedded scripts and styles.

A content security policy forbids everything but these scripts and this style, which it names by
their SHA-256: no network, no code made of strings.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from blips.uq.bootstrap import Interval
from blips.uq.plots import Plot

LICENCE = "vendor/3Dmol-LICENSE.txt"
SCRIPTS = ("vendor/3Dmol-min.js", "page/plot.js", "page/report.js")
CREDIT = (
    "The 3D view is 3Dmol.js (BSD-3-Clause, University of Pittsburgh and contributors); its "
    "licence is a comment in this file."
)
Section = tuple[str, str, str]  # identifier, title and body (HTML)


def document(title: str, lead: str, sections: Sequence[Section], data: Mapping[str, Any]) -> str:
    """Return the whole page.

    `lead` is a sentence below the title. Sections with an empty body are left out; the first is
    "summary". `data` are plots and structures: {"sets": [...], "figures": {identifier: plot}}.
    """
    in_3d = any(one["structures"] for one in data["sets"])
    scripts = [resource(name) for name in (SCRIPTS if in_3d else SCRIPTS[1:])]
    style = resource("page/report.css")
    present = [section for section in sections if section[2]]
    links = (f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text, _ in present)
    bodies = (
        f'<section id="{name}" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{escape(text)}</h2>{body}</section>'
        for name, text, body in present
    )
    licence = resource(LICENCE).replace("--", "- -").replace(">", "&gt;")  # it ends no comment
    return Template(resource("page/report.html")).substitute(
        title=escape(title),
        lead=escape(lead),
        policy=escape(policy(scripts, style)),
        style=style,
        navigation="".join(links),
        sections="\n".join(bodies),
        credit=CREDIT if in_3d else "",
        licence=f"<!--\n{licence}\n-->\n" if in_3d else "",
        data=_json(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def policy(scripts: Sequence[str], style: str) -> str:
    """Return the content security policy that allows these texts and nothing else."""
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'sha256-{_digest(style)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


@cache
def resource(name: str) -> str:
    """Read the text of a file of this package."""
    return (files("blips.report") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(data: Any) -> str:
    """Write JSON in which no text can end or open a tag."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class Html(str):
    """A text that is HTML already."""


def table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table, which scrolls where it is too wide, or nothing where there are no rows.

    The first cell of a row is its head.
    """
    heads = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = "".join(
        f'<tr><th scope="row">{_text(first)}</th>{"".join(map(_cell, others))}</tr>'
        for first, *others in rows
    )
    whole = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
    return whole if body else ""


def _cell(value: Any) -> str:
    if not isinstance(value, Interval):
        return f"<td>{_text(value)}</td>"
    text = f"{value.value:.3g}"
    if value.low is not None and value.high is not None:
        text += f' <span class="interval">{value.low:.3g} to {value.high:.3g}</span>'
    return f'<td class="number">{text}</td>'


def _text(value: Any) -> str:
    """Return a value as HTML."""
    if isinstance(value, Html):
        return value
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{escape(str(key))} {_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "-" if value is None else escape(str(value))


def figure(identifier: str, title: str, plot: str = "", note: str = "") -> str:
    """Return the place of one plot, which the page's script draws."""
    data = f' data-plot="{plot}"' if plot else ""
    return (
        f'<figure id="{identifier}"{data}><figcaption><h3>{escape(title)}</h3>'
        f'<span class="soft note">{escape(note)}</span></figcaption>'
        f'<svg class="plot" role="img" tabindex="0" aria-label="{escape(title)}" '
        f'aria-describedby="{identifier}-says"></svg><ul class="legend"></ul>'
        f'<p class="readout" id="{identifier}-says" aria-live="polite"></p></figure>'
    )


def drawn(identifier: str, title: str, plot: Plot | None) -> tuple[str, dict[str, Any]]:
    """Return the place of a plot that belongs to no set, and its data; nothing for None."""
    if plot is None:
        return "", {}
    place = figure(identifier, title, note=plot.note)
    return f'<div class="grid">{place}</div>', {identifier: plot.to_dict()}


def choice(sets: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return buttons to choose one of several sets of structures."""
    if len(sets) < 2:
        return ""
    inputs = "".join(
        f'<label><input type="radio" name="{name}" value="{k}"> {escape(one["name"])}</label>'
        for k, one in enumerate(sets)
    )
    return f"<fieldset><legend>Structures</legend>{inputs}</fieldset>"


def viewer(sets: Sequence[Mapping[str, Any]]) -> str:
    """Show structures in 3D, with the std of their atoms."""
    if not any(one["structures"] for one in sets):
        return ""
    return Template(resource("page/viewer.html")).substitute(choice=choice(sets, "set3d"))


def details(name: str, text: str) -> str:
    """Return a long text that opens at a click."""
    return (
        f"<details><summary>{escape(name)}</summary>"
        f'<pre tabindex="0">{escape(text)}</pre></details>'
    )
