"""What a campaign shows: rounds, budget, errors, queue."""

import io

from rich.console import Console

from blips.active.display import CampaignDisplay

ROWS = (
    {"round": 1, "labels": 6, "energy_mae": 0.0512, "force_mae": 0.3456, "force_std": 0.2},
    {"round": 2, "labels": 9, "energy_mae": 0.0401, "force_mae": 0.1234, "force_std": None},
)


def shown(terminal: bool) -> str:
    console = Console(
        file=io.StringIO(), record=True, width=100, force_terminal=terminal, _environ={}
    )
    with CampaignDisplay("campaign in runs/x", console) as display:
        display.stage(1, "training")
        display.finished(ROWS[0])
        display.stage(1, "exploring", "1 of 4")
        display.finished(ROWS[1])
        display.stage(2, "labelling")
        display.labels(8, 3, 1, budget=20)
    return console.export_text()


def test_a_terminal_has_a_live_table():
    text = shown(terminal=True)
    last = text[text.rindex("campaign in runs/x") :]
    for part in ("force MAE eV/A", "0.3456", "0.1234", "0.0401", "round 2: labelling"):
        assert part in last
    assert "8 of 20 labels, 3 in the queue, 1 set aside" in last


def test_a_file_has_a_line_for_each_stage_and_the_table():
    text = shown(terminal=False)
    assert "round 1: training\n" in text
    assert "1 of 4" not in text  # only stages, not every step of them
    assert text.index("round 2: labelling") < text.index("campaign in runs/x")
    assert "0.1234" in text
