"""Active learning: explore, select, label, retrain, evaluate, until a budget or a target.

    from blips.active import load_campaign, run_campaign

    run_campaign(load_campaign("campaign.yaml"))

Everything is in the campaign's folder, and its labels and decisions in one SQLite file there that
`ase.db` reads. A campaign that was interrupted at any moment goes on where it was.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blips.active.config import CampaignConfig, load_campaign

if TYPE_CHECKING:
    from blips.active.campaign import run_campaign
    from blips.active.summary import campaign_summary

__all__ = ["CampaignConfig", "campaign_summary", "load_campaign", "run_campaign"]

_LAZY = {"run_campaign": "blips.active.campaign", "campaign_summary": "blips.active.summary"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'blips.active' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
