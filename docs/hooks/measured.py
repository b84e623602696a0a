"""Pages that read `results/` as the site is built: tables and figures are never copied by hand.

<!-- studies -->                  every results/STUDY/VARIANT/table.md, with its figures
<!-- benchmarks -->               every results/benchmarks/*.md
<!-- table: STUDY/VARIANT -->     results/STUDY/VARIANT/table.md alone
<!-- figure: NAME.png, TEXT -->   docs/assets/NAME.png, which a recipe draws from results

A table or figure that is not there yet leaves a line that says so.
"""

import html
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
MARK = re.compile(r"<!-- (studies|benchmarks|table: [\w/-]+|figure: [^>]+) -->")
ASSETS = ROOT / "docs" / "assets"
BENCHMARKS = RESULTS / "benchmarks"
FIRST_SEED = re.compile(r"-seed0-|^(?!.*-seed\d)")  # figures of further seeds look alike


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Bring the figures that the pages show into the site."""
    for figure in shown_figures():
        uri = f"measured/{figure.relative_to(RESULTS).as_posix()}"
        files.append(File.generated(config, uri, abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables and figures in the place of their marks."""
    return MARK.sub(
        lambda match: f'<div class="measured" markdown>\n\n{section(match.group(1))}\n\n</div>',
        markdown,
    )


def section(mark: str) -> str:
    """What a mark stands for."""
    kind, _, what = mark.partition(": ")
    if kind == "table":
        return one_table(what)
    if kind == "figure":
        return one_figure(*what.split(", ", 1))
    return studies() if kind == "studies" else benchmarks()


def one_table(name: str) -> str:
    """The table of one variant of a study."""
    path = RESULTS / name / "table.md"
    return demoted(path.read_text()) if path.exists() else "The study has not been run yet."


def one_figure(name: str, text: str = "") -> str:
    """A figure of the folder of assets."""
    return f"![{text}](assets/{name})" if (ASSETS / name).exists() else "No figure yet."


def tables() -> list[Path]:
    """Tables of all studies that have one."""
    found = sorted(RESULTS.glob("*/**/table.md"))
    return [path for path in found if BENCHMARKS not in path.parents]


def shown_figures() -> list[Path]:
    """Figures beside the tables, of one seed."""
    found = [figure for table in tables() for figure in figures(table.parent)]
    return found + figures(BENCHMARKS)


def figures(folder: Path) -> list[Path]:
    """Figures of a folder or of its folder `figures`, one seed of each."""
    found = sorted({*folder.glob("*.png"), *(folder / "figures").rglob("*.png")})
    return [path for path in found if FIRST_SEED.search(path.name)]


def studies() -> str:
    """A section for each study: its table and its figures."""
    parts: list[str] = []
    for path in tables():
        study, *variant = path.parent.relative_to(RESULTS).parts
        title = study.replace("-", " ").capitalize()
        named = [name for name in variant if name != "default"]
        parts.append(f"## {title}" + (f" ({', '.join(named)})" if named else ""))
        parts.append(demoted(path.read_text()))
        parts.append(gallery(figures(path.parent)))
        command = f"blips reproduce {study}"
        parts.append(f"`{command}` writes this to `results/{path.parent.relative_to(RESULTS)}`.")
    return "\n\n".join(parts)


def benchmarks() -> str:
    """A section for each table of benchmarks."""
    parts: list[str] = []
    for path in sorted(BENCHMARKS.glob("**/*.md")):
        name = path.stem if path.stem != "table" else path.parent.name
        parts.append(f"## {name.replace('_', ' ').capitalize()}")
        parts.append(demoted(path.read_text()))
    parts.append(gallery(figures(BENCHMARKS)))
    return "\n\n".join(parts)


def demoted(markdown: str) -> str:
    """The text with headings two levels lower, its pipes as they are."""
    return re.sub(r"^(#+) ", r"##\1 ", markdown, flags=re.MULTILINE).strip()


def gallery(paths: list[Path]) -> str:
    """Figures, folded away where they are many."""
    if not paths:
        return ""
    shown = []
    for path in paths:
        name = html.escape(path.stem.replace("-", ", ").replace("_", " "))
        source = f"measured/{path.relative_to(RESULTS).as_posix()}"
        shown.append(
            f'<figure><img loading="lazy" src="{source}" alt="{name}">'
            f"<figcaption>{name}</figcaption></figure>"
        )
    body = f'<div class="gallery">{"".join(shown)}</div>'
    if len(paths) <= 4:
        return body
    return f"<details><summary>{len(paths)} figures</summary>{body}</details>"
