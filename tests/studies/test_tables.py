import math

import pytest

from studies.tables import Column, Row, Table, mean_and_spread, paper_results


def result(**metrics: float) -> dict:
    return {"metrics": {k: {"value": v, "low": None, "high": None} for k, v in metrics.items()}}


@pytest.fixture
def table() -> Table:
    columns = (
        Column("MSE x10", "mse", factor=10.0, paper=0, paper_digits=2),
        Column("NLL_3", "nll", digits=1),
    )
    rows = [
        Row(("A & B",), [result(mse=0.01, nll=-3.0), result(mse=0.03, nll=-4.0)], [0.25], [0.04]),
        Row(("C",), [result(mse=0.5)], [0.75]),
        Row(("D",), []),
    ]
    return Table(("method",), columns, rows, title="Title", note="100 % made up")


def test_mean_and_spread():
    assert mean_and_spread([]) is None
    assert mean_and_spread([2.0]) == (2.0, None)
    mean, spread = mean_and_spread([1.0, 2.0, 6.0]) or (math.nan, math.nan)
    assert mean == pytest.approx(3.0)
    assert spread == pytest.approx(math.sqrt(7.0))


def test_markdown(table: Table):
    assert table.markdown().splitlines() == [
        "Title",
        "",
        "| method | seeds | MSE x10 | paper | NLL_3 |",
        "| --- | --- | --- | --- | --- |",
        "| A & B | 2 | 0.200 ± 0.141 | 0.25 ± 0.04 | -3.5 ± 0.7 |",
        "| C | 1 | 5.000 | 0.75 | - |",
        "",
        "100 % made up",
    ]


def test_a_column_can_count_seeds():
    rows = [
        Row(("A",), [result(won=1.0), result(won=0.0), result(won=1.0)]),
        Row(("B",), [result()]),
    ]
    table = Table(("method",), [Column("better", "won", counted=True)], rows)
    assert table.markdown().splitlines()[2:] == ["| A | 3 | 2 of 3 |", "| B | 1 | - |"]
    assert r"A & 3 & 2 of 3 \\" in table.latex()


def test_latex(table: Table):
    assert table.latex().splitlines() == [
        "% Title",
        "% 100 % made up",
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r"method & seeds & MSE x10 & paper & NLL\_3 \\",
        r"\midrule",
        r"A \& B & 2 & $0.200 \pm 0.141$ & $0.25 \pm 0.04$ & $-3.5 \pm 0.7$ \\",
        r"C & 1 & $5.000$ & $0.75$ & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_the_paper_s_numbers_are_shipped():
    nbody = paper_results()["nbody"]
    assert nbody["columns"] == ["mse_x10", "nll", "crps"]
    assert nbody["egnn"]["blip"] == [0.060, -12.52, 0.022]
