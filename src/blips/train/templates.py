"""Configurations to start from; `blips template NAME` prints them with every default."""

from typing import Any

from blips.config import RunConfig, load_config
from blips.errors import ConfigError

TEMPLATES: dict[str, dict[str, Any]] = {
    "train": {"data": {"train": "train.extxyz"}},
    # The paper's settings for silica, without its noise on the weights: see docs/fine-tuning.md.
    "finetune": {
        "model": {
            "backbone": "chgnet",
            "bayes": {"prior_dropout": 0.01, "bounds": [1e-5, 0.11], "encoder": {"depth": 4}},
        },
        "data": {"train": "train.extxyz"},
        "training": {
            "epochs": 50,
            "batch_size": 8,
            "loss": "huber",
            "huber_delta": 0.01,
            "energy_per_atom": True,
            "weights": {"energy": 1.0, "forces": 1.0},
            "kl_weight": 0.001,
            "optimizer": "adamw",
            "lr": 1e-5,
            "encoder_lr": 1e-4,
            "schedule": {"kind": "cosine", "warmup": 0.05},
            "clip_norm": 0.5,
        },
        "folder": "runs/finetune",
    },
}


def template(name: str = "train") -> RunConfig:
    """A configuration by its name, with every default."""
    if name not in TEMPLATES:
        raise ConfigError(f"unknown template {name!r}; use one of {', '.join(TEMPLATES)}")
    return load_config(TEMPLATES[name])
