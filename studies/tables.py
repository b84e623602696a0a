"""Tables of a study: methods by metrics, mean ± spread over seeds, the paper's numbers beside.

The spread is the standard deviation over seeds, (n-1)-normalised; a single seed has none. Metrics
are those of `blips.uq.assess`, on the test set.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

Number = tuple[float, float | None]  # mean and spread
MISSING = "-"


@dataclass(frozen=True)
class Column:
    """A metric of the results.

    Attributes:
        header: what the table calls it.
        metric: its name in the results.
        factor: what its values are multiplied with.
        digits: after the decimal point.
        paper: index of the paper's column of numbers beside it, or None.
        paper_digits: those that the paper gives; default: `digits`.
        counted: shown is in how many seeds the metric is 1, "4 of 5", instead of mean and spread.
    """

    header: str
    metric: str
    factor: float = 1.0
    digits: int = 3
    paper: int | None = None
    paper_digits: int | None = None
    counted: bool = False


@dataclass(frozen=True)
class Row:
    """A method.

    Attributes:
        labels: one for each leading column, such as the backbone and the method.
        results: those of its seeds, as `Layout.read` gives them.
        paper: the paper's means, by index of column; empty where it has none.
        paper_spread: the paper's spreads, likewise.
    """

    labels: tuple[str, ...]
    results: Sequence[dict[str, Any]]
    paper: Sequence[float | None] = ()
    paper_spread: Sequence[float | None] = ()


@dataclass(frozen=True)
class Table:
    """Rows and columns, the headers of the leading columns, and what a reader has to know.

    Rows without a result of ours or of the paper's are left out.
    """

    headers: tuple[str, ...]
    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    note: str = ""

    def markdown(self) -> str:
        """Format as a Markdown table."""
        lines = [self._titles(), ["---"] * len(self._titles())]
        lines += [self._cells(row, _plain) for row in self._known_rows()]
        pipes = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return "\n\n".join(part for part in (self.title, pipes, self.note) if part) + "\n"

    def latex(self) -> str:
        """Format as a tabular environment of LaTeX, for the package booktabs."""
        leading = len(self.headers)
        alignment = "l" * leading + "r" * (len(self._titles()) - leading)
        lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
        lines += [_tex_line([_tex(title) for title in self._titles()]), r"\midrule"]
        for row in self._known_rows():
            cells = self._cells(row, _math)
            lines.append(_tex_line([_tex(c) for c in cells[:leading]] + cells[leading:]))
        lines += [r"\bottomrule", r"\end{tabular}"]
        comments = [f"% {line}" for part in (self.title, self.note) for line in part.splitlines()]
        return "\n".join(comments + lines) + "\n"

    def _known_rows(self) -> list[Row]:
        return [row for row in self.rows if row.results or row.paper]

    def _titles(self) -> list[str]:
        titles = [*self.headers, "seeds"]
        for column in self.columns:
            titles.append(column.header)
            if column.paper is not None:
                titles.append("paper")
        return titles

    def _cells(self, row: Row, form: Callable[[Number | None, int], str]) -> list[str]:
        cells = [*row.labels, str(len(row.results))]
        for column in self.columns:
            values = _values(row, column)
            if column.counted:
                cells.append(f"{sum(values):.0f} of {len(values)}" if values else form(None, 0))
            else:
                cells.append(form(mean_and_spread(values), column.digits))
            if column.paper is not None:
                digits = column.digits if column.paper_digits is None else column.paper_digits
                cells.append(form(_published(row, column.paper), digits))
        return cells


def mean_and_spread(values: Sequence[float]) -> Number | None:
    """Compute mean and (n-1)-normalised std; no std of one value, None of none."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def paper_results() -> dict[str, Any]:
    """Read the numbers that the paper reports, by study; each study lists its columns."""
    text = files("studies").joinpath("paper_results.json").read_text(encoding="utf-8")
    return json.loads(text)


def _values(row: Row, column: Column) -> list[float]:
    """Return the metric of all seeds that have it."""
    found = [r["metrics"][column.metric] for r in row.results if column.metric in r["metrics"]]
    return [column.factor * metric["value"] for metric in found]


def _published(row: Row, index: int) -> Number | None:
    mean = row.paper[index] if index < len(row.paper) else None
    spread = row.paper_spread[index] if index < len(row.paper_spread) else None
    return None if mean is None else (mean, spread)


def _plain(number: Number | None, digits: int) -> str:
    if number is None:
        return MISSING
    mean, spread = number
    return f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _math(number: Number | None, digits: int) -> str:
    return "--" if number is None else "$" + _plain(number, digits).replace("±", r"\pm") + "$"


def _tex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _tex(text: str) -> str:
    for character in "&%$#_":
        text = text.replace(character, "\\" + character)
    return text
