"""Pages that read `results/` as the site is built: tables and figures are never copied by hand.

<!-- table: STUDY/VARIANT -->     results/STUDY/VARIANT/table.md alone
<!-- figure: NAME.png, TEXT -->   docs/assets/NAME.png, which a recipe draws from results

A table or figure that is not there yet leaves a line that says so.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
MARK = re.compile(r"<!-- (table: [\w/-]+|figure: [^>]+) -->")
ASSETS = ROOT / "docs" / "assets"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables and figures in the place of their marks."""
    return MARK.sub(
        lambda match: f'<div class="measured" markdown>\n\n{section(match.group(1))}\n\n</div>',
        markdown,
    )


def section(mark: str) -> str:
    """Return what a mark stands for."""
    kind, _, what = mark.partition(": ")
    return one_table(what) if kind == "table" else one_figure(*what.split(", ", 1))


def one_table(name: str) -> str:
    """Return the table of one variant of a study."""
    path = RESULTS / name / "table.md"
    return demoted(path.read_text()) if path.exists() else "The study has not been run yet."


def one_figure(name: str, text: str = "") -> str:
    """Return a figure of the folder of assets."""
    return f"![{text}](assets/{name})" if (ASSETS / name).exists() else "No figure yet."


def demoted(markdown: str) -> str:
    """Lower the headings of a text by two levels; leave its pipes."""
    return re.sub(r"^(#+) ", r"##\1 ", markdown, flags=re.MULTILINE).strip()
