"""Make the posteriors that are shipped for released models, from geometries and labels of MPtrj.

Reads $BLIPS_DATA/mptrj/mptrj-random-1k.xyz (1000 frames of MPtrj, CC-BY-4.0, as chosen for the
benchmark of MatterSim, MIT). Structures of at most 60 atoms, in a seeded order: the first 500 are
conditioned on (geometries; their energies align the model's per-element energies), the next 100
give the scale; the rest is left for tests.

    python recipes/released_posteriors.py chgnet sevennet-0 mattersim-1m
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from ase import Atoms

from blips.backbones import load
from blips.data.structures import read_structures
from blips.factory import bayesianize
from blips.potential import BayesianPotential
from blips.train.checkpoint import write_tensors
from blips.train.references import moved, unexplained_energies
from blips.train.released import FOLDER, weights_digest
from blips.train.run import environment

CONDITIONED, VALID, LARGEST, ROWS, DRAWS = 500, 100, 60, 4, 64
OUTPUT = Path(__file__).parents[1] / "src/blips/data" / FOLDER
SOURCE = "mptrj/mptrj-random-1k.xyz"


def split(structures: list[Atoms]) -> tuple[list[Atoms], list[Atoms], list[Atoms]]:
    """Structures to condition on, to fit the scale on, and to test on."""
    small = [atoms for atoms in structures if len(atoms) <= LARGEST]
    order = np.random.default_rng(0).permutation(len(small))
    shuffled = [small[k] for k in order]
    return shuffled[:CONDITIONED], shuffled[CONDITIONED:][:VALID], shuffled[CONDITIONED + VALID :]


def condition(name: str, structures: list[Atoms]) -> BayesianPotential:
    """The released model, conditioned; energies up to a constant for each element."""
    potential = bayesianize(load(name))
    known = potential.backbone.trained_numbers
    usable = [a for a in structures if known is None or set(a.numbers.tolist()) <= known]
    geometries, valid, _ = split(usable)
    shift = dict.fromkeys(range(119), 0.0)
    shift |= unexplained_energies(potential.backbone, geometries)
    valid = moved(valid, shift, ("energy", "forces"))
    potential.condition(geometries, valid=valid, rows=ROWS)
    return potential


def main() -> None:
    """Condition the named models and write their posteriors."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", default=os.environ.get("BLIPS_DATA", "."))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    structures = read_structures(Path(options.data) / SOURCE)
    for name in options.models:
        start = time.perf_counter()
        potential = condition(name, structures)
        posterior = potential.conditioned().only_draws(DRAWS)
        header = {
            "posterior": posterior.to_dict(),
            "weights": weights_digest(potential),
            "provenance": {
                "model": name,
                "data": f"{SOURCE}: MPtrj, CC-BY-4.0",
                "conditioned_on": CONDITIONED,
                "scale_fitted_on": VALID,
                "seconds": round(time.perf_counter() - start),
                "environment": environment(),
            },
        }
        path = write_tensors(options.output / f"{name}.safetensors", posterior.tensors(), header)
        print(f"{name}: {potential.posterior}; {path.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
