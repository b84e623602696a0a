"""Modules that know nothing of blips: a toy, and the page that explains it."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from torch import Tensor, nn

import blips
from blips import keys, testing
from blips.backbones import Adapter
from blips.data.graph import AtomGraph
from blips.errors import CheckpointError, ConversionError, InputError
from blips.train.checkpoint import read_tensors
from helpers import QUICK, morse_ammonia, quartz

CUTOFF = 3.5
PAGE = (Path(__file__).parents[2] / "docs" / "add-your-own-model.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class Toy(nn.Module):
    """One message, one readout, and maps that cannot be Bayesian."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.filter = nn.Linear(2, width)
        self.readout = nn.Linear(width, 1)
        self.of_structures = nn.Linear(1, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, graph: AtomGraph) -> Tensor:
        receiver, sender = graph.edge_index
        distance = graph.vectors().norm(dim=1, keepdim=True)
        envelope = 0.5 * (1 + torch.cos(torch.pi * distance / CUTOFF))
        h = self.embedding(graph.numbers)
        messages = self.filter(torch.cat([distance, distance**2], dim=1)) * envelope * h[sender]
        h = torch.tanh(h.index_add(0, receiver, messages))
        return self.readout(h).squeeze(1)


def energies_of(module: Toy, graph: AtomGraph) -> Tensor:
    energies = module(graph)
    total = graph.sum_over_structures(energies)[:, None]  # [S, 1]
    return energies + 0.1 * module.of_structures(total)[graph.structure, 0]


def toy(**options) -> blips.BayesianPotential:
    torch.manual_seed(0)
    options = {"energies_of": energies_of, "cutoff": CUTOFF, **options}
    return blips.bayesianize(Adapter(Toy(), **options))


# ---- row types and reasons ----


def test_row_types_are_found_and_reasons_given():
    conversion = toy().conversion
    assert conversion.roles == {"model.filter": keys.EDGE, "model.readout": keys.NODE}
    reasons = {m.name: m.reason for m in conversion.maps}
    assert reasons["model.unused"] == "not called on the probe graph"
    assert "structure rows are not described" in reasons["model.of_structures"]
    assert "not known as a linear map" in reasons["model.embedding"]


def test_roles_can_be_given():
    potential = toy(roles={"model.read*": keys.NODE})
    assert potential.conversion.roles == {"model.readout": keys.NODE}


def test_examples_that_tell_nothing_apart_are_refused():
    alone = [Atoms("H")]  # one atom, one structure
    with pytest.raises(ConversionError, match="equal row counts"):
        toy(example=alone)


def test_the_module_may_know_few_elements():
    with pytest.raises(IndexError):
        toy(energies_of=lambda module, graph: module(_numbers_times(graph, 3)))
    known = [Atoms("H2", [[0, 0, 0], [0, 0, 1]]), molecule("CH4")]
    toy(energies_of=lambda module, graph: module(_numbers_times(graph, 3)), example=known)


def _numbers_times(graph: AtomGraph, factor: int) -> AtomGraph:
    return replace(graph, numbers=graph.numbers * factor)  # oxygen is beyond the embedding


def test_further_rows_get_coefficients_of_their_own():
    class WithAngles(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.of_angles = nn.Linear(3, 8)

    def pairs(graph: AtomGraph) -> tuple[Tensor, Tensor]:
        same = graph.edge_index[0][:, None] == graph.edge_index[0][None]
        return tuple((same & ~torch.eye(graph.num_edges, dtype=torch.bool)).nonzero().T)

    def angles(graph: AtomGraph) -> dict[str, Tensor]:
        first, second = pairs(graph)
        vectors = graph.vectors()
        dot = (vectors[first] * vectors[second]).sum(1)
        lengths = vectors.norm(dim=1)
        return {"angle": torch.stack([dot, lengths[first], lengths[second]], dim=1)}

    def energies(module: WithAngles, graph: AtomGraph) -> Tensor:
        per_angle = torch.tanh(module.of_angles(angles(graph)["angle"])).sum(1)
        atoms = graph.edge_index[0][pairs(graph)[0]]
        return module(graph).index_add(0, atoms, per_angle)

    potential = blips.bayesianize(
        Adapter(WithAngles(), energies, CUTOFF, rows=angles), exclude="*structures"
    )
    assert potential.conversion.roles["model.of_angles"] == "angle"
    graph = potential.backbone.graph([molecule("NH3"), molecule("CH4")])
    coefficients = potential.coefficients(graph)["model.of_angles"]
    assert coefficients.shape == (4 * 3 * 2 + 5 * 4 * 3,)
    assert coefficients.std() > 0
    prediction = potential.predict([molecule("NH3"), molecule("CH4")], samples=3)
    assert (prediction.array("energy_std") > 0).all()
    testing.check_declarations(potential.to_base(), graph)


# ---- what it computes ----


def test_map_is_the_module_and_samples_differ():
    potential = toy()
    atoms = [molecule("NH3"), molecule("CH4")]
    graph = potential.backbone.graph(atoms)
    module = potential.to_base().model
    assert type(module) is Toy
    assert all(type(part).__module__ != "blips.bayes.linear" for part in module.modules())
    expected = graph.sum_over_structures(energies_of(module, graph).double())
    assert torch.equal(potential(graph)[keys.ENERGY], expected.detach())
    prediction = potential.predict(atoms, samples=8)
    assert (prediction.array("energy_std") > 0).all()
    assert (prediction.array("forces_std") > 0).any()


def test_the_contract_is_kept():
    testing.check_contract(toy().to_base())


def test_energies_of_structures_are_shared_by_their_atoms():
    of_atoms = toy()
    of_structures = toy(
        energies_of=lambda module, graph: graph.sum_over_structures(energies_of(module, graph))
    )
    graph = of_atoms.backbone.graph([molecule("NH3"), molecule("CH4")])
    one, other = of_atoms(graph), of_structures(graph)
    testing.assert_close(other[keys.ENERGY], one[keys.ENERGY], 1e-6, "energy")
    testing.assert_close(other[keys.FORCES], one[keys.FORCES], 1e-6, "forces")
    assert len(other[keys.ENERGIES][:4].unique()) == 1


def test_direct_forces():
    def outputs(module: Toy, graph: AtomGraph) -> dict[str, Tensor]:
        energy = graph.sum_over_structures(module(graph))
        forces = graph.vectors() * module.filter(graph.vectors()[:, :2])[:, :1]
        return {
            keys.ENERGY: energy,
            keys.FORCES: graph.positions.new_zeros(graph.num_nodes, 3).index_add(
                0, graph.edge_index[0], forces
            ),
        }

    potential = toy(energies_of=outputs)
    assert not potential.backbone.conservative
    assert potential.estimator == "auto"
    potential.backbone.reference.set({7: -1.0, 1: 0.5})
    graph = potential.backbone.graph(molecule("NH3"))
    plain = outputs(potential.to_base().model, graph)
    result = potential(graph)
    testing.assert_close(result[keys.FORCES], plain[keys.FORCES], 1e-6, "forces")
    testing.assert_close(result[keys.ENERGY], plain[keys.ENERGY].double() + 0.5, 1e-6, "energy")
    prediction = potential.predict(molecule("NH3"), samples=4)
    assert (prediction.array("forces_std") > 0).any()
    assert prediction.energies is None
    with pytest.raises(InputError, match="no stress"):
        potential.predict(quartz(), samples=2, stress=True)


def test_its_own_neighbours_are_used():
    asked = []

    def nearer(atoms: Atoms, dtype: torch.dtype) -> AtomGraph:
        asked.append(len(atoms))
        return AtomGraph.from_atoms(atoms, 1.3, dtype)

    potential = toy(graph_of=nearer)
    assert asked == [3, 5, 3, 5]  # shapes, row types
    graph = potential.backbone.graph(molecule("NH3"))
    assert graph.num_edges == 6
    assert graph.positions.dtype == torch.float32


def test_double_precision_modules_stay_so():
    torch.manual_seed(0)
    potential = blips.bayesianize(Adapter(Toy().double(), energies_of, CUTOFF))
    assert potential(potential.backbone.graph(molecule("NH3")))[keys.FORCES].dtype == torch.float64


# ---- training and files ----


def test_it_trains_and_keeps_its_weights_by_hand(tmp_path):
    potential = toy()
    data = morse_ammonia(8, seed=0)
    arguments = {"valid": data[6:], "config": {"training": QUICK}, "folder": tmp_path / "run"}
    result = blips.fit(potential, data[:6], display=False, **arguments)
    losses = [row["valid_loss"] for row in result.progress.history]
    assert losses[-1] < losses[0]
    again = toy()
    again.load_state_dict(read_tensors(tmp_path / "run" / "best.safetensors")[0])
    one, other = (p.predict(data, samples=2) for p in (potential, again))
    np.testing.assert_array_equal(one.array("forces_std"), other.array("forces_std"))
    arguments["config"] = {"training": {**QUICK, "epochs": 7}}
    resumed = blips.fit(toy(), data[:6], display=False, resume=True, **arguments)
    assert len(resumed.progress.history) == 7


def test_files_that_could_not_build_it_are_refused(tmp_path):
    potential = toy()
    with pytest.raises(CheckpointError, match="load_state_dict"):
        blips.save(potential, tmp_path / "toy.safetensors")
    assert not (tmp_path / "toy.safetensors").exists()
    data = morse_ammonia(4, seed=0)
    quick = {"training": {**QUICK, "epochs": 1}}
    blips.fit(potential, data, valid=data, config=quick, folder=tmp_path, display=False)
    with pytest.raises(CheckpointError, match="cannot build by itself"):
        blips.load(tmp_path / "best.safetensors")


# ---- errors ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"energies_of": None}, "energies_of is None; expected a function"),
        ({"cutoff": -1.0}, "cutoff must be positive"),
        ({"energies_of": lambda m, g: m(g)[:, None]}, r"gave shape \(8, 1\).*\(8,\).*\(2,\)"),
        ({"energies_of": lambda m, g: {keys.ENERGY: m(g)}}, r"expected .*'forces': \(8, 3\)"),
        (
            {"energies_of": lambda m, g: {keys.ENERGY: m(g), keys.FORCES: g.positions}},
            r"'energy': \(8,\).*expected .*'energy': \(2,\)",
        ),
        (
            {
                "energies_of": lambda m, g: {
                    keys.ENERGY: g.sum_over_structures(m(g)),
                    keys.FORCES: g.positions,
                    "charge": m(g),
                }
            },
            "'charge'.*expected ",
        ),
        ({"rows": lambda g: {"angle": g.numbers}}, r"'angle' features of shape \(8,\)"),
    ],
)
def test_what_is_wrong_is_said(options: dict, message: str):
    with pytest.raises(InputError, match=message):
        toy(**options)


def test_modules_are_wrapped_first():
    with pytest.raises(InputError, match=r"Toy is no backbone.*blips\.backbones\.Adapter"):
        blips.bayesianize(Toy())


# ---- the page ----


def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    own = [block for block in BLOCKS if "schnetpack" not in block]
    assert len(own) == 3
    for block in own:
        exec(compile(block, "add-your-own-model.md", "exec"), names)
    out = capsys.readouterr().out
    assert "4 of 5 modules Bayesian" in out
    assert re.search(r"E = -?\d+\.\d+ ± \d+\.\d+ eV", out)
    one, other = (
        names[name].predict(molecule("NH3"), samples=2) for name in ("potential", "again")
    )
    assert one.array("energy") == other.array("energy")
