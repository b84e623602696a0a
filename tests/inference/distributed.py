"""A posterior that test_condition_parallel.py makes in several processes: see its `main`."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from blips.data.graph import AtomGraph
from blips.inference import linearise
from blips.inference.linearise import Linearised, LinearModel
from blips.inference.posterior import ConditionedPosterior
from helpers import rattled_molecules
from inference.models import labelled, small

VALID = 3
ROWS = {"components": 48, "sums": 4}


def posterior(structures: int, rows: str, dimension: int) -> ConditionedPosterior:
    potential = small("painn")
    valid = labelled(rattled_molecules(VALID, 0.1, first=20))
    given = iter(rattled_molecules(structures, 0.05))
    options = {"rows": ROWS[rows], "maps": "all", "dimension": dimension}
    potential.condition(given, valid=valid, **options)
    return potential.condition(rattled_molecules(1, 0.05, first=30), **options)  # a second call


CASES = [(5, "components", 24), (5, "sums", 24), (5, "sums", 200), (1, "sums", 24)]


class Counted(Linearised):
    """Counts the structures that this process looks at."""

    structures = 0

    def __init__(self, model: LinearModel, graph: AtomGraph, **options: Any) -> None:
        Counted.structures += graph.num_structures
        super().__init__(model, graph, **options)


def main(folder: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=limit)
    linearise.Linearised = Counted
    for number, case in enumerate(CASES):
        Counted.structures = 0
        found = posterior(*case)
        tensors = {"gram": found.evidence.gram(), "draws": found.draws(3)}
        torch.save(tensors, f"{folder}/{number}-{rank}.pt")
        content = {"content": found.to_dict(), "looked_at": Counted.structures}
        Path(f"{folder}/{number}-{rank}.json").write_text(json.dumps(content))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
