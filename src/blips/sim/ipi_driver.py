r"""i-PI: a committee of members as a driver of its path-integral dynamics.

    i-pi-py_driver -m custom -P $(python -m blips.sim.ipi_driver) -u -a nh3 \
        -o model=model.safetensors,template=start.xyz,members=8

Energies, forces and virials of all members go to i-PI with those of the plain model, as its
`ffcommittee` reads them (`<parse_json>`), so that its `active_thresh`, its reweighting and its
weighted baseline work on them. The committee is shifted so that its mean is the plain model:

    E_k -> E + (E_k - mean over members),    which leaves the spread as it is.

i-PI counts in Hartree and Bohr.
"""

import json
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase.units import Bohr, Hartree

from blips.backbones.base import graph_batches
from blips.data.neighbours import NeighbourCache
from blips.errors import refuse_below, require
from blips.prediction import Prediction
from blips.train.released import load_once

Dummy_driver: Any = require("ipi.pes.dummy", "pip install ipi").Dummy_driver
__DRIVER_NAME__ = "blips"
__DRIVER_CLASS__ = "Committee"


class Committee(Dummy_driver):
    """A committee of K members of a posterior, as i-PI calls drivers.

    The template is a file with the elements and the periodicity, any that ASE reads; the model one
    written by blips, or a released one's name.
    """

    def __init__(
        self, template: str, model: str, members: int = 8, seed: int = 0, **options: Any
    ) -> None:
        refuse_below(2, members=members)
        self.potential = load_once(model)
        self.members = self.potential.draw(int(members), seed=int(seed))
        self.atoms: Any = ase.io.read(template, -1)
        self.neighbours = NeighbourCache()
        super().__init__(**options)

    def compute_structure(
        self, cell: np.ndarray, pos: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray, str]:
        """Evaluate one structure: columns of `cell` and rows of `pos` in Bohr."""
        self.atoms.set_cell(cell.T * Bohr)
        self.atoms.positions = pos.reshape(-1, 3) * Bohr
        (graph,) = graph_batches(self.potential.backbone, self.atoms, 1, [self.neighbours])
        plain = self.potential.predict(graph, method="map", stress=True)
        means = self._atomic_units(plain)
        committee = [self._atomic_units(m.predict(graph, stress=True)) for m in self.members]
        shifted: dict[str, Any] = {}
        for name, mean in means.items():
            members = np.array([member[name] for member in committee])  # [K, ...]
            centred = mean + members - members.mean(axis=0)
            flat = centred.reshape(len(members), -1)
            shifted[f"committee_{name}"] = (flat[:, 0] if name == "pot" else flat).tolist()
        return float(means["pot"]), means["force"], means["virial"], json.dumps(shifted)

    def _atomic_units(self, prediction: Prediction) -> dict[str, np.ndarray]:
        """Return energy, forces [N, 3] and virial [3, 3] by i-PI's names, in Hartree and Bohr."""
        names = ("energy", "forces", "stress")
        energy, forces, stress = (prediction.array(name).astype(float) for name in names)
        virial = -stress[0] * self.atoms.get_volume()
        values = {"pot": energy[0], "force": forces * Bohr, "virial": virial}
        return {name: value / Hartree for name, value in values.items()}


if __name__ == "__main__":
    print(Path(__file__).resolve())
