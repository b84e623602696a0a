"""ANI: a network for each element on symmetry functions of its surroundings; eight members.

Smith et al., "Less is more: sampling chemical space with active learning" (2018), package
`torchani` 2.2, whose wheel carries the weights of ANI-1x (molecules of H, C, N and O,
omegaB97X/6-31G(d)) and placeholders of ANI-2x's. One member is a backbone; the released model is
the mean of eight, whose spread is its own measure of uncertainty.

Atoms exchange no messages, so every map belongs to the readout. A network runs on all atoms and
counts for those of its element: maps have a row for each atom, as everywhere in blips.

An example of an adapter outside of blips: with its name in `BACKBONES`, `blips.save` and
`blips.load` know it wherever this module is imported.
"""

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import torch
from ase.data import atomic_numbers
from ase.units import Hartree
from torch import Tensor

from blips import keys
from blips.backbones import BACKBONES
from blips.backbones.foreign import ForeignBackbone
from blips.backbones.rows import edge_pairs
from blips.data.graph import AtomGraph
from blips.errors import CheckpointError, ConfigError, require

MEMBERS = 8


class ANI(ForeignBackbone):
    """One member of an ANI ensemble.

    Args:
        variant: "1x", or "2x" (which also knows F, S and Cl) where its files are.
        member: 0 to 7, whose weights to begin with.
        weights: folder of the ensemble's files; None for that of the package.
    """

    double_positions = False
    pip_line = "pip install torchani==2.2.4"
    roles: ClassVar = {"model.neural_networks.*": keys.NODE}
    readout_maps: Mapping[str, str] = {"model.neural_networks.*": keys.NODE}

    def __init__(
        self, variant: str = "1x", member: int = 0, weights: str | Path | None = None
    ) -> None:
        if not 0 <= member < MEMBERS:
            raise ConfigError(f"ANI has members 0 to {MEMBERS - 1}, not {member}")
        model = _package_model(variant, member, weights)
        self.symbols: list[str] = list(model.species)
        numbers = [atomic_numbers[symbol] for symbol in self.symbols]
        super().__init__(model, float(model.aev_computer.Rcr), numbers)
        self.hyperparameters = {"variant": variant, "member": member}
        index = torch.full((max(numbers) + 1,), -1)
        index[numbers] = torch.arange(len(numbers))
        self.register_buffer("species_of_number", index, persistent=False)

    @classmethod
    def released(
        cls, *, variant: str = "1x", member: int = 0, weights: str | Path | None = None
    ) -> Self:
        """Load one of the eight released members; arguments as for the class."""
        backbone = cls(variant, member, weights)
        backbone.pretrained = True
        return backbone

    def package_energies(self, graph: AtomGraph) -> Tensor:
        """Compute the package's own energies of the atoms, [N] eV."""
        index: Any = self.species_of_number
        species = index[graph.numbers]  # [N]
        features = self._features(graph, species)  # [N, F]
        networks: Any = self.model.neural_networks
        total = features.new_zeros(graph.num_nodes)
        for place, symbol in enumerate(self.symbols):
            own = species == place
            if bool(own.any()):
                total = total + networks[symbol](features)[:, 0] * own
        shift = self.model.energy_shifter.self_energies.double()[species]  # [N] Hartree
        return (total.double() + shift) * Hartree

    def _features(self, graph: AtomGraph, species: Tensor) -> Tensor:
        """Compute symmetry functions, [N, F]: radial by element, angular by pair of elements."""
        aev = self.model.aev_computer
        functions = require("torchani.aev", self.pip_line)
        vectors = graph.vectors()  # [E, 3]
        receiver, sender = graph.edge_index
        element = species[sender]  # [E]
        radial = functions.radial_terms(aev.Rcr, aev.EtaR, aev.ShfR, vectors.norm(dim=-1))
        count = aev.num_species
        rows = radial.new_zeros(graph.num_nodes * count, radial.shape[1])
        rows = rows.index_add(0, receiver * count + element, radial)

        pairs = edge_pairs(graph, vectors.norm(dim=-1), aev.Rca)  # [2, P], both orders
        first, second = pairs[:, pairs[0] < pairs[1]]
        both = torch.stack([vectors.index_select(0, first), vectors.index_select(0, second)])
        constants = (aev.ShfZ, aev.EtaA, aev.Zeta, aev.ShfA)
        angular = functions.angular_terms(aev.Rca, *constants, both)
        inside = (both.detach().norm(dim=-1) <= aev.Rca).all(dim=0)  # the cosine rises again
        angular = angular * inside[:, None]
        kinds = aev.angular_length // aev.angular_sublength
        kind = aev.triu_index[element[first], element[second]]  # [P]
        corners = angular.new_zeros(graph.num_nodes * kinds, angular.shape[1])
        corners = corners.index_add(0, receiver[first] * kinds + kind, angular)
        n_atoms = graph.num_nodes
        return torch.cat([rows.view(n_atoms, -1), corners.view(n_atoms, -1)], dim=1)


BACKBONES["ani"] = ANI


def _package_model(variant: str, member: int, weights: str | Path | None) -> Any:
    """Load the package's model of one member, from the ensemble's files."""
    package = _package()
    neurochem, models = package.neurochem, package.models
    carried = Path(str(package.__file__)).parent / "resources" / f"ani-{variant}_8x"
    folder = carried if weights is None else Path(weights)
    files = [path for path in sorted(folder.glob("*.params")) if path.stat().st_size]
    if not files:
        raise CheckpointError(
            f"{folder} has no parameters of ANI-{variant}; the wheel of torchani carries those of "
            "ANI-1x only, for others give weights=folder (ani-model-zoo: resources/ani-2x_8x)"
        )
    constants = neurochem.Constants(str(files[0]))
    networks = neurochem.load_model(constants.species, str(folder / f"train{member}" / "networks"))
    shifter, by_symbol = neurochem.load_sae(str(folder / "sae_linfit.dat"), return_dict=True)
    return models.BuiltinModel(
        package.SpeciesConverter(constants.species),
        package.AEVComputer(**constants),
        networks,
        shifter,
        constants.species_to_tensor,
        constants,
        by_symbol,
        periodic_table_index=True,
    )


def _package() -> Any:
    """Import the package, whose version check fails with current setuptools."""
    if "torchani" not in sys.modules:
        old: Any = ModuleType("pkg_resources")
        old.DistributionNotFound = metadata.PackageNotFoundError
        old.get_distribution = metadata.distribution
        before = sys.modules.get("pkg_resources")
        sys.modules["pkg_resources"] = before or old
        try:
            require("torchani", ANI.pip_line)
        finally:
            if before is None:
                del sys.modules["pkg_resources"]
    return sys.modules["torchani"]
