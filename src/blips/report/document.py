"""The page: text that is escaped without exception, tables, and embedded scripts and styles.

A content security policy forbids everything but these scripts and this style, which it names by
their SHA-256: no network, no code made of strings.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from blips.uq.assess import by_metric, verdict
from blips.uq.bootstrap import Interval
from blips.uq.evaluate import Evaluation

LICENCE = "vendor/3Dmol-LICENSE.txt"
SCRIPTS = ("vendor/3Dmol-min.js", "page/plot.js", "page/report.js")
TRAINING = "training-plot"
CREDIT = (
    "The 3D view is 3Dmol.js (BSD-3-Clause, University of Pittsburgh and contributors); its "
    "licence is a comment in this file."
)
SMALL, ONE = "smaller is better", "up to 1"
HEADLINES = (
    ("Energy MAE (eV)", "energy", "mae", SMALL),
    ("Energy MAE per atom (eV)", "energy_per_atom", "mae", SMALL),
    ("Energies within the 90 % interval", "energy", "coverage_90", "0.90, if calibrated"),
    ("Force MAE (eV/Å)", "forces", "mae", SMALL),
    ("Force RMSE (eV/Å)", "forces", "rmse", SMALL),
    ("RMS std of forces (eV/Å)", "forces", "rms_std", "the RMSE, if calibrated"),
    ("Mean squared z of forces", "forces", "zms", "1, if calibrated"),
    ("ECE of forces", "forces", "ece", "0, if calibrated"),
    ("CRPS of forces (eV/Å)", "forces", "crps", SMALL),
    ("Forces within the 68 % interval", "forces", "coverage_68", "0.68, if calibrated"),
    ("Forces within the 90 % interval", "forces", "coverage_90", "0.90, if calibrated"),
    ("Forces within the 95 % interval", "forces", "coverage_95", "0.95, if calibrated"),
    ("Spearman, std and error of structures", "forces_per_structure", "spearman", ONE),
    (
        "Spearman, predicted force and error of structures",
        "forces_per_structure",
        "spearman_force",
        "a baseline without error bars",
    ),
    (
        "Partial Spearman, std and error given the force",
        "forces_per_structure",
        "spearman_given_force",
        "above 0: the std adds to the baseline",
    ),
)

Section = tuple[str, str, str]
"""Identifier, title and body (HTML) of a section."""


def document(title: str, lead: str, sections: Sequence[Section], data: Mapping[str, Any]) -> str:
    """Return the whole page.

    Args:
        title: of the report.
        lead: a sentence below it.
        sections: in order; those with an empty body are left out. The first is "summary".
        data: of plots and structures: {"sets": [...], "figures": {identifier: plot}}.
    """
    in_3d = any(one["structures"] for one in data["sets"])
    scripts = [resource(name) for name in (SCRIPTS if in_3d else SCRIPTS[1:])]
    style = resource("page/report.css")
    present = [section for section in sections if section[2]]
    links = (f'<li><a href="#{name}">{escape(text)}</a></li>' for name, text, _ in present)
    return Template(resource("page/report.html")).substitute(
        title=escape(title),
        lead=escape(lead),
        policy=escape(policy(scripts, style)),
        style=style,
        navigation="".join(links),
        sections="\n".join(_section(*section) for section in present),
        credit=CREDIT if in_3d else "",
        licence=f"<!--\n{_comment(resource(LICENCE))}\n-->\n" if in_3d else "",
        data=_json(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def render(
    *,
    title: str,
    lead: str,
    evaluations: Mapping[str, Evaluation],
    data: Mapping[str, Any],
    notes: Sequence[str],
    settings: Mapping[str, str],
    provenance: Mapping[str, str],
) -> str:
    """Render the page of a run.

    Args:
        title: of the report.
        lead: a sentence below it.
        evaluations: metrics by the name of the set.
        data: see `document`.
        notes: for the reader.
        settings: long texts by their headings.
        provenance: short texts by their names.
    """
    sections = [
        ("summary", "Summary", _summary(evaluations, notes)),
        ("predictions", "Predictions", _predictions(data["sets"])),
        ("structures", "Most uncertain structures", viewer(data["sets"])),
        ("training", "Training", figures(data["figures"], {TRAINING: "Loss"})),
        ("settings", "Settings", "\n".join(details(*item) for item in settings.items())),
        ("provenance", "Provenance", _rows(provenance)),
    ]
    return document(title, lead, sections, data)


def figures(plots: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """Return figures for the plots that are there."""
    found = [
        _figure(name, titles[name], note=plots[name]["note"]) for name in titles if name in plots
    ]
    return f'<div class="grid">{"".join(found)}</div>' if found else ""


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


def _comment(text: str) -> str:
    """Escape a text so that it cannot end an HTML comment."""
    return text.replace("--", "- -").replace(">", "&gt;")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(data: Any) -> str:
    """Write JSON in which no text can end or open a tag."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _summary(evaluations: Mapping[str, Evaluation], notes: Sequence[str]) -> str:
    parts = [f'<p class="soft">{escape(note)}</p>' for note in notes]
    if evaluations:
        parts = [_said(name, evaluation) for name, evaluation in evaluations.items()] + parts
        parts += [_headline_table(evaluations), _full_table(evaluations)]
    return "\n".join(parts)


def _said(name: str, evaluation: Evaluation) -> str:
    """Return the verdict on one set, a line for each quantity."""
    lines = "<br>".join(escape(line) for line in verdict(evaluation).splitlines())
    return f"<p><strong>{escape(name)}</strong>: {lines}</p>"


def _headline_table(evaluations: Mapping[str, Evaluation]) -> str:
    rows = []
    for label, level, metric, ideal in HEADLINES:
        found = [getattr(evaluation, level).get(metric) for evaluation in evaluations.values()]
        if any(interval is not None for interval in found):
            cells = "".join(_cell(interval) for interval in found)
            head = f'{label} <span class="ideal">{ideal}</span>'
            rows.append(f'<tr><th scope="row">{head}</th>{cells}</tr>')
    one = next(iter(evaluations.values()))
    caption = f"With {100 * one.level:g} % bootstrap intervals over structures"
    return table(caption, ["Metric, and what is good", *evaluations], rows)


def _full_table(evaluations: Mapping[str, Evaluation]) -> str:
    rows = [
        f'<tr><th scope="row">{escape(level)}</th><td>{escape(metric)}</td><td>{escape(unit)}</td>'
        + "".join(_cell(found.get(name)) for name in evaluations)
        + "</tr>"
        for (level, metric, unit), found in by_metric(evaluations).items()
    ]
    whole = table("Definitions are in blips.uq", ["Level", "Metric", "Unit", *evaluations], rows)
    return f"<details><summary>All metrics</summary>{whole}</details>"


def table(caption: str, headers: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table of rows that are HTML already, which scrolls where it is too wide."""
    heads = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(interval: Interval | None) -> str:
    if interval is None:
        return "<td>-</td>"
    text = f"{interval.value:.3g}"
    if interval.low is not None and interval.high is not None:
        text += f' <span class="interval">{interval.low:.3g} to {interval.high:.3g}</span>'
    return f'<td class="number">{text}</td>'


PLOTS = {
    "parity_energy": "Energies",
    "parity_forces": "Forces",
    "reliability": "Are error bars the right size?",
    "std_error": "Do errors grow with std?",
    "rejection": "Does std find the errors?",
    "std_force": "How large are the error bars?",
}


def _predictions(sets: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in PLOTS if any(name in one["plots"] for one in sets)]
    if not names:
        return ""
    drawn = "".join(_figure(f"plot-{name}", PLOTS[name], name) for name in names)
    return (
        '<p class="soft">Click a point, or move along the points with the arrow keys; Enter shows '
        "its structure below.</p>" + _choice(sets, "set") + f'<div class="grid">{drawn}</div>'
    )


def _figure(identifier: str, title: str, plot: str = "", note: str = "") -> str:
    data = f' data-plot="{plot}"' if plot else ""
    return (
        f'<figure id="{identifier}"{data}><figcaption><h3>{escape(title)}</h3>'
        f'<span class="soft note">{escape(note)}</span></figcaption>'
        f'<svg class="plot" role="img" tabindex="0" aria-label="{escape(title)}" '
        f'aria-describedby="{identifier}-says"></svg><ul class="legend"></ul>'
        f'<p class="readout" id="{identifier}-says" aria-live="polite"></p></figure>'
    )


def _choice(sets: Sequence[Mapping[str, Any]], name: str) -> str:
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
    return Template(resource("page/viewer.html")).substitute(choice=_choice(sets, "set3d"))


def _section(identifier: str, title: str, body: str) -> str:
    return (
        f'<section id="{identifier}" aria-labelledby="{identifier}-title">'
        f'<h2 id="{identifier}-title">{escape(title)}</h2>{body}</section>'
    )


def details(name: str, text: str) -> str:
    """Return a long text that opens at a click."""
    return (
        f"<details><summary>{escape(name)}</summary>"
        f'<pre tabindex="0">{escape(text)}</pre></details>'
    )


def _rows(provenance: Mapping[str, str]) -> str:
    rows = [
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in provenance.items()
    ]
    return table("Versions, platform and command", [], rows)
