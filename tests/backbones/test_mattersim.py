"""MatterSim: the package's own numbers, with error bars."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule

import blips
from blips import keys, testing
from blips.backbones import build, load
from blips.backbones.derivatives import plain_outputs
from blips.backbones.mattersim import MatterSim
from blips.bayes.noise import generators
from blips.errors import CheckpointError, InputError, MissingPackageError
from blips.testing import rotation_matrix
from helpers import QUICK, morse_ammonia, quartz
from recipes.fetch_weights import fetch

FOUNDATION = {"prior_dropout": 0.01, "bounds": (1e-5, 0.11)}
SMALL = {"num_blocks": 2, "units": 8, "max_l": 4, "max_n": 4}
# The package tells of the box that it puts around a molecule.
pytestmark = pytest.mark.filterwarnings("ignore:No PBC detected:UserWarning")


@pytest.fixture(scope="module")
def weights() -> Path:
    """The released checkpoint, downloaded where it is not in the cache yet."""
    pytest.importorskip("mattersim", reason="mattersim is not installed")
    try:
        return fetch("mattersim-1m")[0]
    except CheckpointError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(f"no weights of MatterSim: {error}")


@pytest.fixture
def released(weights: Path) -> MatterSim:
    return load("mattersim-1m", weights=weights)


@pytest.fixture
def small() -> MatterSim:
    pytest.importorskip("mattersim", reason="mattersim is not installed")
    torch.manual_seed(0)
    return build("mattersim", architecture=SMALL)


@pytest.fixture
def calculator(monkeypatch, tmp_path):
    """Makes the package's calculator of a checkpoint; it wants to write into the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(path: Path):
        from mattersim.forcefield import MatterSimCalculator

        return MatterSimCalculator.from_checkpoint(str(path), device="cpu")

    return make


def boxed_ammonia() -> Atoms:
    atoms = molecule("NH3")
    atoms.rattle(0.05, seed=0)
    atoms.set_cell([12.0] * 3)
    atoms.pbc = True
    return atoms


STRUCTURES = {
    "quartz": quartz,
    "rattled quartz": lambda: quartz(rattle=0.1),
    "ammonia in a box": boxed_ammonia,
    "ammonia": lambda: molecule("NH3"),
}


# ---- the package's own numbers ----


@pytest.mark.parametrize("structure", STRUCTURES)
def test_results_are_those_of_the_packages_calculator(
    released: MatterSim, weights: Path, calculator, structure: str
):
    atoms = STRUCTURES[structure]()
    periodic = bool(atoms.pbc.all())
    outputs = plain_outputs(released, released.graph(atoms), stress=periodic)
    atoms.calc = calculator(weights)
    assert outputs[keys.ENERGY].item() == pytest.approx(atoms.get_potential_energy(), rel=1e-6)
    # the package puts a molecule across the corner of a box of 27 A: that costs it two digits
    atol = 1e-5 if periodic else 1e-4
    testing.assert_close(outputs[keys.FORCES], torch.as_tensor(atoms.get_forces()), atol, "forces")
    if periodic:
        stress = torch.as_tensor(atoms.get_stress(voigt=False))
        testing.assert_close(outputs[keys.STRESS][0], stress, 1e-5, "stress")


def test_the_contract_holds(released: MatterSim):
    crystal = Atoms("SiO", [[0, 0, 0], [1.1, 1.2, 1.3]], cell=[2.7, 3.0, 3.2], pbc=True)
    testing.check_contract(released, [crystal, testing.random_structure(2, periodic=False)])


def test_nothing_jumps_where_a_bond_becomes_too_long_for_angles(released: MatterSim):
    released.double()
    inside, outside = (
        plain_outputs(
            released, released.graph(Atoms("SiO2", [[0, 0, 0], [1.2, 1.0, 0], [x, 0, 0]]))
        )
        for x in (4.0 - 1e-6, 4.0 + 1e-6)
    )
    for name in (keys.ENERGIES, keys.FORCES):
        testing.assert_close(inside[name], outside[name], 1e-4, name)


def test_atoms_without_neighbours_have_energies(small: MatterSim):
    alone = plain_outputs(small, small.graph(Atoms("N")))
    assert alone[keys.FORCES].tolist() == [[0.0, 0.0, 0.0]]
    apart = plain_outputs(small, small.graph(Atoms("NH", [[0, 0, 0], [0, 0, 9]])))
    testing.assert_close(apart[keys.ENERGIES][0], alone[keys.ENERGIES][0], 1e-6, "lone atom")


def test_unknown_elements_are_named(small: MatterSim):
    with pytest.raises(InputError, match="does not know Am"):
        small(small.graph(Atoms(["Am", "O"], [[0, 0, 0], [0, 0, 2]])))


# ---- with error bars ----


def test_every_parameter_is_bayesian_but_biases(released: MatterSim):
    potential = blips.bayesianize(released, **FOUNDATION)
    assert not [m.name for m in potential.conversion.maps if m.reason]
    assert sum(m.parameters for m in potential.conversion.maps) == 890034
    assert set(potential.conversion.roles.values()) == {"edge", "node"}


def test_map_is_the_plain_model_to_the_bit_and_comes_back(released: MatterSim, weights: Path):
    potential = blips.bayesianize(load("mattersim-1m", weights=weights), **FOUNDATION)
    graph = released.graph(quartz(rattle=0.1))
    expected = plain_outputs(released, graph, stress=True)
    outputs = potential(graph, stress=True)
    for name, value in expected.items():
        assert torch.equal(outputs[name], value), name
    base = potential.to_base()
    assert isinstance(base, MatterSim)
    state = released.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in base.model.state_dict().items())
    assert {type(m) for m in base.modules()} == {type(m) for m in released.modules()}


def test_samples_are_equivariant_and_do_not_depend_on_the_batch(released: MatterSim):
    potential = blips.bayesianize(released, **FOUNDATION).double()
    graph = potential.backbone.graph([quartz(rattle=0.1), molecule("NH3")])
    samples = potential.sample(graph, generators(0, 2)).outputs
    turn = torch.as_tensor(rotation_matrix())
    turned = replace(graph, positions=graph.positions @ turn.T, cell=graph.cell @ turn.T)
    of_turned = potential.sample(turned, generators(0, 2)).outputs
    testing.assert_close(of_turned[keys.ENERGY], samples[keys.ENERGY], 1e-10, "turned")
    testing.assert_close(of_turned[keys.FORCES], samples[keys.FORCES] @ turn.T, 1e-10, "turned")
    second = potential.sample(graph, generators(0, 1, first=1)).outputs
    testing.assert_close(second[keys.ENERGY], samples[keys.ENERGY][2:], 1e-10, "alone")
    testing.assert_close(second[keys.FORCES], samples[keys.FORCES][13:], 1e-10, "alone")
    assert float((samples[keys.ENERGY][:2] - samples[keys.ENERGY][2:]).abs().min()) > 1e-3


def test_error_bars_are_finite(released: MatterSim):
    potential = blips.bayesianize(released, **FOUNDATION)
    prediction = potential.predict([quartz(), boxed_ammonia()], samples=4, stress=True)
    for std in (prediction.energy_std, prediction.forces_std, prediction.stress_std):
        assert np.isfinite(std).all()
        assert (std > 0).all()


def test_training_keeps_everything_finite(released: MatterSim, tmp_path):
    potential = blips.bayesianize(released, **FOUNDATION)
    config = {
        "training": {**QUICK, "epochs": 2, "batch_size": 2, "lr": 1e-4},
        "data": {"reference_energies": "none"},
    }
    frames, valid = morse_ammonia(4, seed=0), morse_ammonia(2, seed=1)
    result = blips.fit(
        potential, frames, valid=valid, config=config, folder=tmp_path, display=False
    )
    history = result.progress.history
    losses = [epoch[name] for epoch in history for name in ("train_loss", "valid_loss")]
    assert np.isfinite(losses).all()
    assert all(bool(p.isfinite().all()) for p in potential.parameters())


# ---- files ----


def test_a_checkpoint_of_blips_needs_no_file_of_the_package(small: MatterSim, tmp_path):
    potential = blips.bayesianize(small, **FOUNDATION)
    path = blips.save(potential, tmp_path / "model.safetensors")
    again = blips.load(path)
    assert again.report() == potential.report()
    first, second = (p.predict(quartz(), samples=2) for p in (potential, again))
    np.testing.assert_array_equal(first.energy, second.energy)
    np.testing.assert_array_equal(first.forces, second.forces)


@pytest.mark.parametrize("is_bayesian", [False, True])
def test_the_packages_calculator_reads_the_export(
    small: MatterSim, calculator, tmp_path, is_bayesian: bool
):
    small.reference.set({8: -1.5, 14: 2.5}, scale=1.3)
    if is_bayesian:
        small = blips.bayesianize(small, **FOUNDATION).backbone
    path = small.export(tmp_path / "mattersim.pth")
    atoms = quartz(rattle=0.1)
    outputs = plain_outputs(small, small.graph(atoms))
    atoms.calc = calculator(path)
    assert outputs[keys.ENERGY].item() == pytest.approx(atoms.get_potential_energy(), abs=1e-5)
    forces = torch.as_tensor(atoms.get_forces())
    testing.assert_close(outputs[keys.FORCES], forces, 1e-5, "forces")
    again = load("mattersim-1m", weights=path)
    reread = again(again.graph(quartz(rattle=0.1)))[keys.ENERGIES].detach()
    testing.assert_close(reread, outputs[keys.ENERGIES], 1e-6, "energies")


def test_weights_are_looked_for_in_the_cache_then_where_the_package_has_them(
    small: MatterSim, weights: Path, monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BLIPS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match=r"recipes/fetch_weights\.py"):
        load("mattersim-1m")
    own = tmp_path / ".local/mattersim/pretrained_models/mattersim-v1.0.0-1M.pth"
    own.parent.mkdir(parents=True)
    small.export(own)
    assert load("mattersim-1m").hyperparameters["architecture"]["units"] == 8
    cached = tmp_path / "cache" / "checkpoints" / weights.name
    cached.parent.mkdir(parents=True)
    cached.symlink_to(weights)
    assert load("mattersim-1m").hyperparameters["architecture"]["units"] == 128
    assert load("mattersim-1m", weights=own).hyperparameters["architecture"]["units"] == 8


def test_files_of_another_kind_are_refused(tmp_path):
    torch.save({"model_name": "graphormer"}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="no checkpoint of MatterSim"):
        load("mattersim-1m", weights=tmp_path / "other.pth")


@pytest.mark.usefixtures("small")
def test_the_package_cannot_replace_the_handlers_of_loguru(monkeypatch):
    from loguru import logger

    def importing(module: str, _pip_line: str) -> ModuleType:
        if module != "loguru":
            logger.remove()
            logger.add(sys.stdout)
        return sys.modules[module]

    before = dict(logger._core.handlers)
    monkeypatch.setattr("blips.backbones.mattersim.require", importing)
    build("mattersim", architecture=SMALL)
    assert before
    assert logger._core.handlers == before


@pytest.mark.slow
def test_importing_the_package_leaves_logging_and_warnings_alone():
    code = (
        "import warnings, torch, loguru;"
        "from blips.backbones import build;"
        "handlers = dict(loguru.logger._core.handlers);"
        "before = warnings.filters[0], torch.get_default_dtype(), torch.load;"
        "build('mattersim', architecture={'num_blocks': 1, 'units': 8});"
        "import sys; assert 'mattersim' in sys.modules;"
        "assert before == (warnings.filters[0], torch.get_default_dtype(), torch.load);"
        "assert handlers == loguru.logger._core.handlers"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "mattersim.forcefield.m3gnet.m3gnet", None)
    with pytest.raises(MissingPackageError, match="pip install --no-deps mattersim"):
        build("mattersim")
