"""SchNetPack's models, which know nothing of blips."""

import importlib
import importlib.util
import re
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import blips
from blips import keys, testing
from blips.backbones import Adapter
from blips.bayes.noise import generators
from blips.data.graph import AtomGraph
from blips.testing import rotation_matrix
from helpers import QUICK, morse_ammonia

CUTOFF = 3.5
PAGE = (Path(__file__).parents[2] / "docs" / "add-your-own-model.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def schnetpack() -> types.ModuleType:
    """SchNetPack's networks, without its training and data modules.

    Those need PyTorch Lightning, hydra and an older torch; importing the package would load them.
    """
    if "schnetpack" not in sys.modules:
        spec = importlib.util.find_spec("schnetpack")
        if spec is None or spec.submodule_search_locations is None:
            pytest.skip("SchNetPack is missing: pip install --no-deps schnetpack==2.0.4")
        package = types.ModuleType("schnetpack")
        package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
        sys.modules["schnetpack"] = package
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit.script is deprecated
            for part in ("properties", "nn", "representation", "atomistic"):
                importlib.import_module(f"schnetpack.{part}")
    return sys.modules["schnetpack"]


@pytest.fixture(params=["PaiNN", "SchNet"])
def representation(schnetpack: types.ModuleType, request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Module()
    module.representation = getattr(schnetpack.representation, request.param)(
        n_atom_basis=16,
        n_interactions=2,
        radial_basis=schnetpack.nn.GaussianRBF(8, CUTOFF),
        cutoff_fn=schnetpack.nn.CosineCutoff(CUTOFF),
    )
    module.output_modules = nn.ModuleList(
        [
            schnetpack.atomistic.Atomwise(
                16, aggregation_mode=None, per_atom_output_key="e", output_key="energy"
            )
        ]
    )
    return module


def schnetpack_energies(model: nn.Module, graph: AtomGraph) -> Tensor:
    from schnetpack import properties

    inputs = {
        properties.Z: graph.numbers,
        properties.Rij: graph.vectors(),
        properties.idx_i: graph.edge_index[0],
        properties.idx_j: graph.edge_index[1],
    }
    return model.output_modules[0](model.representation(inputs))["e"][:, 0]


def wrapped(representation: nn.Module, **options) -> blips.BayesianPotential:
    return blips.bayesianize(Adapter(representation, schnetpack_energies, CUTOFF), **options)


def test_the_contract_is_kept(representation: nn.Module):
    testing.check_contract(Adapter(representation, schnetpack_energies, CUTOFF))


def test_every_dense_layer_becomes_bayesian(representation: nn.Module):
    potential = wrapped(representation)
    bayesian = {m.layer for m in potential.conversion.maps if m.role}
    others = {m.layer for m in potential.conversion.maps if not m.role}
    assert bayesian == {"Dense"}
    assert "Dense" not in others
    edges = [name for name, role in potential.conversion.roles.items() if role == keys.EDGE]
    assert edges
    assert all("filter" in name for name in edges)


def test_the_activation_inside_is_applied_to_samples(representation: nn.Module):
    potential = wrapped(representation, bounds=(1e-14, 2e-14), initial=1e-14).double()
    graph = potential.backbone.graph(testing.random_structure(0))
    best = potential(graph, stress=True)
    plain = schnetpack_energies(potential.to_base().model, graph)
    assert torch.equal(best[keys.ENERGIES], plain.detach())
    for sample in (
        potential.sample(graph, generators(0, 1), stress=True).outputs,
        potential.draw(1)[0](graph, stress=True),
    ):
        for name, value in best.items():
            testing.assert_close(sample[name], value, 1e-5, name)
            assert not torch.equal(sample[name], value)


def test_samples_are_equivariant(representation: nn.Module):
    potential = wrapped(representation).double()
    atoms = testing.random_structure(0)
    turn = rotation_matrix()
    turned = atoms.copy()
    turned.set_cell(atoms.cell.array @ turn.T)
    turned.positions = atoms.positions @ turn.T
    one, other = (
        potential.sample(potential.backbone.graph(a), generators(3, 2)).outputs
        for a in (atoms, turned)
    )
    testing.assert_close(other[keys.ENERGY], one[keys.ENERGY], 1e-10, "energy")
    expected = one[keys.FORCES] @ torch.as_tensor(turn).T
    testing.assert_close(other[keys.FORCES], expected, 1e-9, "forces")
    spread = potential.predict(atoms, samples=4)
    assert (spread.array("forces_std") > 0).all()


def test_it_trains(representation: nn.Module, tmp_path):
    potential = wrapped(representation)
    data = morse_ammonia(6, seed=0)
    quick = {"training": {**QUICK, "epochs": 2}}
    result = blips.fit(
        potential, data[:4], valid=data[4:], config=quick, folder=tmp_path, display=False
    )
    assert all(np.isfinite(list(row.values())).all() for row in result.progress.history)


@pytest.mark.usefixtures("schnetpack")
def test_the_page_runs_as_printed(capsys):
    (block,) = [block for block in BLOCKS if "schnetpack" in block]
    exec(compile(block, "add-your-own-model.md", "exec"), {})
    match = re.search(r"E = (-?\d+\.\d+) ± (\d+\.\d+) eV", capsys.readouterr().out)
    assert match is not None
    assert float(match.group(2)) > 0
