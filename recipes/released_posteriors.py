"""Make the posteriors that are shipped for released models, from geometries and labels of MPtrj.

Geometries and labels are those of `studies.released.data`. Energies of these labels are
without the corrections that some models include (anions, Hubbard U), so that they are no measure of
a model's error: forces alone give the scale, which energies share.

    python -m recipes.released_posteriors chgnet sevennet-0 mattersim-1m
"""

import argparse
import os
import time
from pathlib import Path

import torch

from blips.backbones import load
from blips.conversion import bayesianize
from blips.potential import BayesianPotential
from blips.train.checkpoint import write_tensors
from blips.train.references import moved
from blips.train.released import FOLDER, weights_digest
from blips.train.run import environment
from studies.released.data import CONDITIONED, SOURCE, VALID, mptrj_split

ROWS, DIMENSION, DRAWS = 6, 2048, 64  # more dimensions than rows: directions have to stay open
OUTPUT = Path(__file__).parents[1] / "src/blips/data" / FOLDER


def condition(name: str, data: Path) -> BayesianPotential:
    """The released model, conditioned; the scale is that of its force errors."""
    potential = bayesianize(load(name))
    geometries, valid, _ = mptrj_split(data, potential.backbone)
    no_shift = dict.fromkeys(range(119), 0.0)
    potential.condition(
        geometries, valid=moved(valid, no_shift, ("forces",)), rows=ROWS, dimension=DIMENSION
    )
    return potential


def main() -> None:
    """Condition the named models and write their posteriors."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", default=os.environ.get("BLIPS_DATA", "."))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        start = time.perf_counter()
        potential = condition(name, Path(options.data))
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
