"""What is left behind when a loss is not finite: the structures of that step, as a file."""

from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms

from blips import keys
from blips.data.batch import Batch
from blips.data.graph import AtomGraph


def write_batch(path: Path, batch: Batch) -> None:
    """Write the structures of a batch with their labels (target_energy, ...) as extxyz."""
    graph = batch.graph
    if not isinstance(graph, AtomGraph):
        raise TypeError(f"only atoms have a file form, not {type(graph).__name__}")
    targets = {name: target.cpu().numpy() for name, target in batch.targets.items()}
    frames = []
    for index in range(graph.num_structures):
        mine = (graph.structure == index).cpu().numpy()
        frame = Atoms(
            numbers=graph.numbers.cpu().numpy()[mine],
            positions=graph.positions.detach().cpu().numpy()[mine],
            cell=graph.cell[index].cpu().numpy(),
            pbc=graph.pbc[index].cpu().numpy(),
            info={"index": batch.indices[index]},
        )
        for name, target in targets.items():
            if name == keys.FORCES:
                frame.arrays[f"target_{name}"] = target[mine]
            else:
                frame.info[f"target_{name}"] = np.asarray(target[index]).tolist()
        frames.append(frame)
    ase.io.write(path, frames, format="extxyz")
