"""A training that test_distributed.py runs with torchrun: see its `main`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import blips
from blips.backbones import PaiNN
from helpers import TINY, morse_ammonia


def main(folder: str, kind: str, processes: int, epochs: int, batch: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = PaiNN(**TINY)
    if kind == "bayesian":
        model = blips.bayesianize(model, seed=0)
    training = {
        "epochs": epochs,
        "batch_size": batch,  # of one process
        "lr": 0.01,
        "dtype": "float64",
        "accelerator": "cpu",
        "devices": processes,
        "strategy": "ddp" if processes > 1 else "auto",
        "threads": 1,
        "tensorboard": False,
    }
    blips.fit(
        model,
        morse_ammonia(12, seed=0),
        valid=morse_ammonia(6, seed=1),
        config={"training": training},
        folder=folder,
        resume=True,
        display=False,
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
