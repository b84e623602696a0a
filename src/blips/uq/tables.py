"""Evaluations as tables for the terminal."""

from collections.abc import Mapping

from rich.table import Table

from blips.uq.evaluation import Evaluation


def evaluation_table(evaluations: Mapping[str, Evaluation]) -> Table:
    """One row per metric, one column per model, with 95 % bootstrap intervals."""
    table = Table(title="metrics, 95 % bootstrap intervals over structures")
    for header in ("level", "metric", "unit", *evaluations):
        table.add_column(header)
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for label, evaluation in evaluations.items():
        for row in evaluation.rows():
            key = (row["level"], row["metric"], row["unit"])
            rows.setdefault(key, {})[label] = _cell(row["value"], row["low"], row["high"])
    for (level, metric, unit), cells in rows.items():
        table.add_row(level, metric, unit, *(cells.get(label, "-") for label in evaluations))
    return table


def _cell(value: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"{value:.4g}"
    return f"{value:.4g} ({low:.4g} to {high:.4g})"
