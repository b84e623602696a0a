"""The command that learns actively."""

from typing import Annotated

import typer

from blips.cli.app import Files, app


@app.command()
def active(
    sources: Files,
    quiet: Annotated[bool, typer.Option("--quiet", help="show nothing while it runs")] = False,
) -> None:
    """Explore, select, label, retrain, until a budget or a target is reached.

    A campaign that was interrupted goes on when it is started again.

    Example: blips active campaign.yaml stop.labels=8
    """
    from blips.active.campaign import run_campaign
    from blips.active.config import load_campaign
    from blips.config import is_override

    typed = [text for text in sources if is_override(text)]
    config = load_campaign(*sources, typed=typed)
    summary = run_campaign(config, display=not quiet)
    typer.echo(
        f"{summary['labels']} labels, {summary['quarantined']} set aside; {summary['ended']}; "
        f"everything is in {config.folder}"
    )
