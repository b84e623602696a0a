"""Charged particles: the paper's n-body study, with data and backbones from outside the package.

What blips needs to know of a model is in `particles`, `egnn` and `gnn` (what rows its maps act on,
and what these rows look like), of the data in `data` (`batch(indices)` gives graphs and targets).
Added to `BACKBONES`, the models have names in configurations and checkpoints.
"""

from blips.backbones import BACKBONES
from studies.nbody.data import ParticleData, ParticleGraph
from studies.nbody.egnn import EGNN
from studies.nbody.gnn import GNN

__all__ = ["EGNN", "GNN", "ParticleData", "ParticleGraph"]

BACKBONES.update(egnn=EGNN, gnn=GNN)
