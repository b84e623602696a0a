"""MACE: a released model, and a small random one with vectors for the whole contract."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

import blips
from blips import keys, testing
from blips.backbones import build, load
from blips.backbones.derivatives import EnergyFunction, energy_and_derivatives
from blips.backbones.e3nn_maps import UNPICKLE_ANYTHING
from blips.backbones.mace import MACE, _package
from blips.bayes import noise
from blips.bayes.linear import StochasticMap
from blips.bayes.noise import FrozenDraw, Noise
from blips.errors import CheckpointError, InputError, MissingPackageError
from blips.testing import rotation_matrix
from helpers import QUICK, morse_ammonia, quartz
from recipes.fetch_weights import fetch

# e3nn 0.4 keeps its generated code as TorchScript, of which torch warns whenever it is copied.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
FOUNDATION = {"prior_dropout": 0.01, "bounds": (1e-5, 0.11)}
NUMBERS = [1, 7, 8, 14]
SETTINGS = {
    "r_max": 3.5,
    "num_bessel": 4,
    "num_polynomial_cutoff": 5,
    "max_ell": 2,
    "interaction_cls": "RealAgnosticResidualInteractionBlock",
    "interaction_cls_first": "RealAgnosticResidualInteractionBlock",
    "num_interactions": 2,
    "num_elements": 4,
    "hidden_irreps": "4x0e+4x1o",
    "MLP_irreps": "4x0e",
    "edge_irreps": None,
    "readout_cls": "NonLinearReadoutBlock",
    "gate": "silu",
    "atomic_energies": [-1.0, -2.0, -3.0, -4.0],
    "avg_num_neighbors": 4.0,
    "atomic_numbers": NUMBERS,
    "correlation": 2,
    "radial_MLP": [8, 8],
    "atomic_inter_scale": [0.5],
    "atomic_inter_shift": [0.1],
    "heads": ["Default"],
}


@pytest.fixture(scope="module")
def weights() -> Path:
    """The released checkpoint, downloaded where it is not in the cache yet."""
    try:
        return fetch("mace-omat-0-small")[0]
    except CheckpointError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(f"MACE-OMAT-0-small is not in the cache: {error}")


@pytest.fixture(scope="module")
def released(weights) -> MACE:
    return load("mace", weights=weights, trust=True)


@pytest.fixture
def small() -> MACE:
    torch.manual_seed(0)
    backbone = build("mace", settings=SETTINGS)
    assert isinstance(backbone, MACE)
    return backbone


@pytest.fixture
def calculator(monkeypatch) -> Iterator:
    """Makes the package's calculator, which needs its permission to unpickle anything."""
    before = torch.get_default_dtype()
    monkeypatch.setenv(UNPICKLE_ANYTHING, "1")

    def make(path: Path, **options):
        from mace.calculators import MACECalculator

        with pytest.warns(UserWarning, match=UNPICKLE_ANYTHING):
            return MACECalculator(model_paths=str(path), device="cpu", **options)

    yield make
    torch.set_default_dtype(before)  # the calculator changes it


def ammonia() -> Atoms:
    return morse_ammonia(1, seed=0)[0]


def energies_of(backbone: MACE) -> EnergyFunction:
    return lambda graph: backbone(graph)[keys.ENERGIES]


def evaluate(backbone: MACE, atoms: Atoms) -> dict[str, torch.Tensor]:
    graph = backbone.graph(atoms)
    return energy_and_derivatives(energies_of(backbone), graph, stress=bool(graph.pbc.all()))


def assert_agrees(backbone: MACE, atoms: Atoms, calculator, tolerance: float) -> None:
    """Energy, energies, forces and stress are those of the package's calculator."""
    outputs = evaluate(backbone, atoms)
    atoms = atoms.copy()
    atoms.calc = calculator
    expected = {"energy": [atoms.get_potential_energy()], "forces": atoms.get_forces()}
    expected["energies"] = calculator.results["energies"]
    if atoms.pbc.all():
        expected["stress"] = atoms.get_stress(voigt=False)[None]
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name], values, rtol=tolerance, atol=tolerance)


def test_a_released_model_gives_the_numbers_of_the_packages_calculator(
    released, weights, calculator
):
    assert next(released.parameters()).dtype == torch.float64  # as in the file
    theirs = calculator(weights, default_dtype="float64")
    for atoms in (quartz(rattle=0.05), ammonia()):
        assert_agrees(released, atoms, theirs, 1e-12)


def test_a_released_model_in_single_precision(released, weights, calculator):
    theirs = calculator(weights, default_dtype="float32")
    assert_agrees(copy.deepcopy(released).float(), quartz(rattle=0.05), theirs, 1e-5)


@pytest.mark.parametrize("size", ["small", "released"])
def test_single_precision_holds_far_from_the_origin(size: str, request):
    backbone = copy.deepcopy(request.getfixturevalue(size)).float()
    here, there = quartz(rattle=0.1), quartz(rattle=0.1)
    there.translate([1e6 + 0.123, -7e5 + 4.567, 3e5 + 8.9])
    expected, found = (evaluate(backbone, atoms)[keys.FORCES] for atoms in (here, there))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_released_model_keeps_the_contract(released):
    silicon = bulk("Si")
    silicon.rattle(0.05, seed=0)
    for name in ("rotation", "reflection", "translation"):
        testing.check_symmetry(released, quartz(rattle=0.05), name)
    testing.check_symmetry(released, ammonia(), "permutation")
    testing.check_forces(released, ammonia())
    testing.check_stress(released, silicon)
    testing.check_batching(released, [silicon, ammonia()])
    testing.check_smoothness(released, ("Si", "O"))
    testing.check_second_derivatives(released, ("Si", "O"))


def test_a_small_model_with_vectors_keeps_the_whole_contract(small):
    structures = [testing.random_structure(0), testing.random_structure(1, periodic=False)]
    testing.check_contract(small, structures)


def sampled(potential, atoms: Atoms, frozen: bool, count: int = 6) -> torch.Tensor:
    """Energies of samples with coefficient 0.01 for every row, eV."""
    graph = potential.backbone.graph(atoms)
    rows = potential.backbone.row_counts(graph)
    coefficients = {
        name: torch.full((rows[role],), 0.01, dtype=graph.positions.dtype)
        for name, role in potential.conversion.roles.items()
    }
    drawn = (
        Noise(coefficients, [FrozenDraw(0, k) for k in range(count)])
        if frozen
        else Noise(coefficients, noise.generators(0, count), "flipout")
    )
    replicas = graph.replicate(count)
    with noise.use(drawn), torch.no_grad():
        outputs = potential.backbone(replicas)
    return replicas.sum_over_structures(outputs[keys.ENERGIES])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("model", ["released", "small"])
def test_every_sample_turns_and_reflects_exactly(request, model, frozen):
    """Edges keep their order under these operations, and so each its noise."""
    backbone = copy.deepcopy(request.getfixturevalue(model)).double()
    potential = blips.bayesianize(backbone, **FOUNDATION)
    atoms = ammonia()
    energies = sampled(potential, atoms, frozen)
    assert float(energies.std()) > 1e-3
    for turn in (rotation_matrix(), -rotation_matrix()):
        other = atoms.copy()
        other.positions = atoms.positions @ turn.T
        torch.testing.assert_close(sampled(potential, other, frozen), energies, rtol=0, atol=1e-9)


def test_every_linear_map_is_bayesian_and_the_plain_model_comes_back(released):
    plain = copy.deepcopy(released)
    graph = plain.graph(quartz(rattle=0.05))
    before = plain(graph)[keys.ENERGIES]
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    potential = blips.bayesianize(plain, **FOUNDATION)
    roles = list(potential.conversion.roles.values())
    assert (roles.count(keys.NODE), roles.count(keys.EDGE)) == (10, 10)
    reasons = {m.name: m.reason for m in potential.conversion.maps if not m.role}
    assert all("skip_tp" in name or "contractions" in name for name in reasons)
    assert "not known as a linear map" not in "".join(reasons.values())
    assert torch.equal(potential.backbone(graph)[keys.ENERGIES], before)
    base = potential.to_base()
    assert not any(isinstance(module, StochasticMap) for module in base.modules())
    assert torch.equal(base(graph)[keys.ENERGIES], before)
    assert all(torch.equal(value, state[name]) for name, value in base.state_dict().items())
    prediction = potential.predict(quartz(rattle=0.05), samples=4, stress=True)
    for name in ("energy_std", "forces_std", "stress_std"):
        values = getattr(prediction, name)
        assert np.isfinite(values).all()
        assert (values > 0).any()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_bayesian_model_is_copied_whole(small, duplicate):
    potential = blips.bayesianize(small, **FOUNDATION)
    expected = potential.predict(ammonia(), samples=3)
    prediction = duplicate(potential).predict(ammonia(), samples=3)
    np.testing.assert_array_equal(prediction.forces_std, expected.forces_std)


def test_a_checkpoint_rebuilds_the_model_without_a_file_of_the_package(released, tmp_path):
    potential = blips.bayesianize(copy.deepcopy(released), **FOUNDATION)
    path = blips.save(potential, tmp_path / "model.safetensors")
    loaded = blips.load(path)
    assert isinstance(loaded.backbone, MACE)
    assert next(loaded.backbone.parameters()).dtype == torch.float64
    one, other = (model.predict(ammonia(), samples=3) for model in (potential, loaded))
    np.testing.assert_array_equal(one.energy, other.energy)
    np.testing.assert_array_equal(one.forces_std, other.forces_std)
    assert loaded.conversion == potential.conversion


@pytest.mark.parametrize("model", ["released", "small"])
def test_training_moves_weights_and_widths_and_stays_finite(request, model, tmp_path):
    backbone = copy.deepcopy(request.getfixturevalue(model))
    potential = blips.bayesianize(backbone, **FOUNDATION, initial=1e-4)
    before = {name: p.detach().clone() for name, p in potential.named_parameters()}
    structures = morse_ammonia(4, seed=1)
    config = {"training": {**QUICK, "epochs": 2, "batch_size": 2, "lr": 1e-5, "condition": True}}
    result = blips.fit(
        potential, structures[:3], valid=structures[3:], config=config, folder=tmp_path / "run",
        display=False,
    )  # fmt: skip
    assert all(np.isfinite(list(row.values())).all() for row in result.progress.history)
    moved = {n for n, p in potential.named_parameters() if not torch.equal(p, before[n])}
    for name in potential.conversion.roles:
        assert f"backbone.{name}.weight" in moved
    assert any(name.startswith("encoder.") for name in moved)
    assert potential.posterior is not None
    found = potential.predict(structures)
    assert found.method == "conditioned"
    assert (found.forces_total_std > 0).all()
    np.testing.assert_array_equal(found.forces, potential.predict(structures, method="map").forces)


@pytest.mark.parametrize("heads", [["Default"], ["pbe", "scan"]])
def test_an_export_is_read_by_the_packages_calculator(tmp_path, calculator, heads):
    settings = {
        **SETTINGS,
        "heads": heads,
        "atomic_energies": [[-1.0, -2.0, -3.0, -4.0]] * len(heads),
        "atomic_inter_scale": [0.5] * len(heads),
        "atomic_inter_shift": [0.1] * len(heads),
    }
    torch.manual_seed(0)
    backbone = MACE(settings, head=heads[-1])
    backbone.reference.set({7: -3.0, 1: 0.5}, scale=1.2)
    potential = blips.bayesianize(backbone, **FOUNDATION)
    path = potential.backbone.export(tmp_path / "exported.model")
    theirs = calculator(path, default_dtype="float32", head=heads[-1])
    assert_agrees(potential.to_base(), ammonia(), theirs, 1e-5)
    again = load("mace", weights=path, trust=True, head=heads[-1])
    expected = evaluate(backbone, ammonia())
    for name, value in evaluate(again, ammonia()).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


def test_nothing_of_the_package_stays_in_the_process():
    """Importing mace alone lets every later torch.load unpickle anything."""
    code = (
        "import os, sys, torch, warnings; import blips.backbones;"
        "before = torch.get_default_dtype(), list(warnings.filters);"
        "assert 'mace' not in sys.modules;"
        f"blips.backbones.build('mace', settings={SETTINGS!r});"
        f"assert {UNPICKLE_ANYTHING!r} not in os.environ;"
        "assert before == (torch.get_default_dtype(), list(warnings.filters))"
    )
    clean = {k: v for k, v in os.environ.items() if k != UNPICKLE_ANYTHING}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=clean, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_mistakes_are_explained(small, weights, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"does not know Au.*4 elements"):
        small(small.graph(molecule("NH3") + Atoms("Au", [[0, 0, 2]])))
    with pytest.raises(InputError, match=r"give weights="):
        load("mace")
    with pytest.raises(CheckpointError, match="trust=True"):
        load("mace", weights=weights)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load("mace", weights=tmp_path / "missing.model", trust=True)
    with pytest.raises(InputError, match=r"give head= one of pbe, scan; got None"):
        MACE({**SETTINGS, "heads": ["pbe", "scan"]})
    torch.save(torch.nn.Linear(2, 2), tmp_path / "other.model")
    with pytest.raises(CheckpointError, match="holds a Linear"):
        load("mace", weights=tmp_path / "other.model", trust=True)
    _package("mace.modules")
    monkeypatch.setitem(sys.modules, "mace.modules", None)
    with pytest.raises(MissingPackageError, match=r"pip install mace-torch==0\.3\.16"):
        MACE(SETTINGS)
