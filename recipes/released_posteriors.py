"""Make the posteriors that are shipped for released models, from geometries and labels of MPtrj.

Geometries and labels are those of `studies.released.data`. Energies of these labels are
without the corrections that some models include (anions, Hubbard U), so that they are no measure of
a model's error: forces alone give the scale, which energies share.

    python -m recipes.released_posteriors chgnet sevennet-0 mattersim-1m

Weights that may not be redistributed, as those of MACE-OMAT-0 (Academic Software License), ship no
numbers that were made of them. The same recipe writes a checkpoint for yourself, in the environment
of their package; `blips.load("mace.safetensors")` is then the model with its error bars:

    python recipes/fetch_weights.py mace-omat-0-small
    python -m recipes.released_posteriors mace --weights FILE --output mace.safetensors
"""

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from blips.backbones import load
from blips.conversion import bayesianize
from blips.inference.domain import Domain
from blips.potential import BayesianPotential
from blips.train.checkpoint import save, write_tensors
from blips.train.references import moved
from blips.train.released import SHIPPED, weights_digest
from blips.train.run import environment
from studies.released.data import CONDITIONED, SOURCE, VALID, mptrj_split

ROWS, DIMENSION, DRAWS = 6, 2048, 64  # more dimensions than rows: directions have to stay open
OUTPUT = Path(__file__).parents[1] / "src/blips/data" / SHIPPED.name


def condition(
    name: str, data: Path, weights: Path | None = None, count: int = CONDITIONED
) -> BayesianPotential:
    """Condition the released model; the scale is that of its force errors."""
    options = {} if weights is None else {"weights": weights, "trust": True}
    potential = bayesianize(load(name, **options))
    geometries, valid, _ = mptrj_split(data, potential.backbone)
    no_shift = dict.fromkeys(range(119), 0.0)
    labelled = moved(valid[:count], no_shift, ("forces",))
    potential.condition(geometries[:count], valid=labelled, rows=ROWS, dimension=DIMENSION)
    posterior = potential.conditioned().only_draws(DRAWS)
    potential.posterior = replace(posterior, domain=_without_pairs(posterior.domain))
    return potential


def _without_pairs(domain: Domain) -> Domain:
    """Leave least distances to covalent radii: 100 structures show few pairs of elements."""
    return Domain(farthest=domain.farthest)


def ship(name: str, potential: BayesianPotential, folder: Path, seconds: float) -> Path:
    """Write the posterior alone, as package data, with where it comes from."""
    posterior = potential.conditioned()
    header = {
        "posterior": posterior.to_dict(),
        "weights": weights_digest(potential),
        "provenance": {
            "model": name,
            "data": f"{SOURCE}: MPtrj, CC-BY-4.0",
            "conditioned_on": CONDITIONED,
            "scale_fitted_on": VALID,
            "seconds": round(seconds),
            "environment": environment(),
        },
    }
    return write_tensors(folder / f"{name}.safetensors", posterior.tensors(), header)


def main() -> None:
    """Condition the named models and write their posteriors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", default=os.environ.get("BLIPS_DATA", "."))
    parser.add_argument("--weights", type=Path, help="of one model: a pickle that you trust")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="with weights: a checkpoint")
    parser.add_argument("--count", type=int, default=CONDITIONED, help="with weights: structures")
    options = parser.parse_args()
    if options.count != CONDITIONED and not options.weights:
        parser.error("what is shipped is conditioned on all structures")
    if options.weights and (len(options.models) > 1 or options.output == OUTPUT):
        parser.error("weights are those of one model; say where its checkpoint goes, --output")
    torch.set_num_threads(1)
    for name in options.models:
        start = time.perf_counter()
        potential = condition(name, Path(options.data), options.weights, options.count)
        if options.weights:
            path = save(potential, options.output)
        else:
            path = ship(name, potential, options.output, time.perf_counter() - start)
        print(f"{name}: {potential.posterior}; {path.stat().st_size / 1e6:.2f} MB", flush=True)


if __name__ == "__main__":
    main()
