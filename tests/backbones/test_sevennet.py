"""SevenNet: the released models, and a small random one with parity for the whole contract."""

import copy
import pickle
import sys
import warnings

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

import blips
from blips import keys, testing
from blips.backbones import build, load
from blips.backbones.derivatives import EnergyFunction, energy_and_derivatives
from blips.backbones.sevennet import SevenNet
from blips.bayes import noise
from blips.bayes.linear import StochasticMap
from blips.bayes.noise import FrozenDraw, Noise
from blips.errors import CheckpointError, InputError, MissingPackageError
from blips.testing import rotation_matrix
from helpers import QUICK, morse_ammonia, quartz

SETTINGS = {
    "cutoff": 3.5,
    "channel": 4,
    "lmax": 1,
    "num_convolution_layer": 2,
    "is_parity": True,
    "self_connection_type": "linear",
    "use_bias_in_linear": True,
    "weight_nn_hidden_neurons": [8],
    "radial_basis": {"radial_basis_name": "bessel", "bessel_basis_num": 4},
    "conv_denominator": 3.0,
}
NUMBERS = [7, 1, 8, 14]
FOUNDATION = {"prior_dropout": 0.01, "bounds": (1e-5, 0.11)}


def package(module: str):
    """A module of sevenn, whose import warns of what its own dependencies lack."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"sevenn.{module}")


def calculator(model: str, **options):
    with warnings.catch_warnings():  # of accelerators for GPUs that are not installed
        warnings.simplefilter("ignore")
        return package("calculator").SevenNetCalculator(model, device="cpu", **options)


@pytest.fixture(scope="module")
def released() -> SevenNet:
    package("util")
    return load("sevennet-0")


@pytest.fixture
def small() -> SevenNet:
    package("util")
    torch.manual_seed(0)
    backbone = build("sevennet", settings=SETTINGS, numbers=NUMBERS)
    assert isinstance(backbone, SevenNet)
    return backbone


def ammonia(scale: float = 0.05) -> Atoms:
    return morse_ammonia(1, seed=0, scale=scale)[0]


def evaluate(backbone: SevenNet, atoms: Atoms) -> dict[str, torch.Tensor]:
    graph = backbone.graph(atoms)
    return energy_and_derivatives(energies_of(backbone), graph, stress=bool(graph.pbc.all()))


def assert_agrees(backbone: SevenNet, atoms: Atoms, calculator) -> None:
    """Energy, energies, forces and stress are those of the package's calculator."""
    outputs = evaluate(backbone, atoms)
    atoms = atoms.copy()
    atoms.calc = calculator
    expected = {"energy": [atoms.get_potential_energy()], "forces": atoms.get_forces()}
    expected["energies"] = calculator.results["energies"]
    if atoms.pbc.all():
        expected["stress"] = atoms.get_stress(voigt=False)[None]
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name], values, rtol=0, atol=1e-5 * max(1, len(atoms)))
        if name != "energy":
            np.testing.assert_allclose(outputs[name], values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("sevennet-0", "7net-0", {}),
        ("sevennet-l3i5", "7net-l3i5", {}),
        ("sevennet-mf-0", "7net-mf-0", {"modal": "PBE"}),
    ],
)
def test_released_models_give_the_numbers_of_the_packages_calculator(
    name, theirs, options, released
):
    backbone = released if name == "sevennet-0" else load(name, **options)
    reference = calculator(theirs, **options)
    assert_agrees(backbone, quartz(rattle=0.05), reference)
    if name == "sevennet-0":
        assert_agrees(backbone, ammonia(), reference)
    if options:
        backbone.modal = 0
        reference.modal = "R2SCAN"
        reference.reset()
        assert_agrees(backbone, quartz(rattle=0.05), reference)


def test_energies_are_bitwise_those_of_the_packages_model_on_the_same_graph(released):
    graph = released.graph([quartz(rattle=0.05), ammonia()])
    energies = released(graph)[keys.ENERGIES]
    data = {
        **released._data(graph),
        "edge_vec": graph.vectors().float().requires_grad_(),
        "atomic_numbers": graph.numbers,
        "num_atoms": torch.tensor([9, 4]),
        "cell_volume": torch.tensor([113.0, 1.0]),
    }
    own = released.model(data)
    assert torch.equal(own["atomic_energy"].double().squeeze(1), energies)


def energies_of(backbone: SevenNet) -> EnergyFunction:
    return lambda graph: backbone(graph)[keys.ENERGIES]


def test_a_released_model_turns_with_its_input_but_is_not_its_mirror_image(released):
    """SevenNet-0 has no parity: features of both handednesses are told apart."""
    testing.check_symmetry(released, quartz(rattle=0.05), "rotation")
    with pytest.raises(AssertionError, match="reflection") as found:
        testing.check_symmetry(released, quartz(rattle=0.05), "reflection")
    deviation = float(str(found.value).split("difference: ")[1].split()[0])
    assert deviation < 0.02  # eV of nine atoms; the left and the right crystal differ by that


def test_a_released_model_is_smooth_and_its_derivatives_are_derivatives(released):
    silicon = bulk("Si")
    silicon.rattle(0.05, seed=0)
    testing.check_symmetry(released, silicon, "translation")
    testing.check_symmetry(released, ammonia(), "permutation")
    testing.check_forces(released, ammonia())
    testing.check_stress(released, silicon)
    testing.check_batching(released, [silicon, ammonia()])
    testing.check_smoothness(released, ("Si", "O"))
    testing.check_second_derivatives(released, ("Si", "O"))


def test_a_small_model_with_parity_keeps_the_whole_contract(small):
    structures = [testing.random_structure(0), testing.random_structure(1, periodic=False)]
    testing.check_contract(small, structures)


def with_coefficient(potential, atoms: Atoms, frozen: bool, count: int) -> torch.Tensor:
    """Energies of `count` samples with coefficient 0.01 for every row, eV."""
    graph = potential.backbone.graph(atoms)
    coef = torch.full((graph.num_nodes,), 0.01, dtype=torch.float32)
    coefficients = dict.fromkeys(potential.conversion.roles, coef)
    energies = []
    for first in range(0, count, 8):
        drawn: Noise = (
            Noise(coefficients, [FrozenDraw(0, first + k) for k in range(8)])
            if frozen
            else Noise(coefficients, noise.generators(0, 8, first), "flipout")
        )
        replicas = graph.replicate(8)
        with noise.use(drawn), torch.no_grad():
            outputs = potential.backbone(replicas)
        energies.append(replicas.sum_over_structures(outputs[keys.ENERGIES]))
    return torch.cat(energies)


def turned(atoms: Atoms) -> Atoms:
    turn, other = rotation_matrix(), atoms.copy()
    other.set_cell(atoms.cell.array @ turn.T)
    other.positions = atoms.positions @ turn.T
    return other


@pytest.mark.statistical
def test_samples_of_all_equivariant_maps_turn_and_shared_noise_adds_up(released):
    """Rows with noise of their own add in quadrature (0.30 eV), shared noise linearly (0.7)."""
    potential = blips.bayesianize(copy.deepcopy(released), **FOUNDATION, maps="*.linear")
    assert len(potential.conversion.roles) == 18
    spread = {}
    for frozen in (False, True):
        energies = with_coefficient(potential, quartz(), frozen, 24)
        again = with_coefficient(potential, turned(quartz()), frozen, 8)
        torch.testing.assert_close(again, energies[:8], rtol=0, atol=5e-5)  # single precision
        spread[frozen] = float(energies.std())
    assert 0.18 < spread[False] < 0.45  # 24 samples: 15 % standard error, tails included 20 %
    assert 0.4 < spread[True] < 1.1


@pytest.mark.parametrize("frozen", [False, True])
def test_every_sample_is_exactly_equivariant_in_double_precision(small, frozen):
    potential = blips.bayesianize(small.double(), **FOUNDATION, maps="*.linear")
    atoms = quartz(rattle=0.1)
    energies = with_coefficient(potential, atoms, frozen, 16)
    assert float(energies.std()) > 1e-2
    again = with_coefficient(potential, turned(atoms), frozen, 16)
    torch.testing.assert_close(again, energies, rtol=1e-12, atol=1e-11)
    mirror = atoms.copy()
    mirror.set_cell(-atoms.cell.array)
    mirror.positions = -atoms.positions
    reflected = with_coefficient(potential, mirror, frozen, 16)
    torch.testing.assert_close(reflected, energies, rtol=1e-12, atol=1e-11)


def test_every_linear_map_is_bayesian_and_the_plain_model_comes_back(released):
    plain = copy.deepcopy(released)
    graph = plain.graph(quartz(rattle=0.05))
    before = plain(graph)[keys.ENERGIES]
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    potential = blips.bayesianize(plain, **FOUNDATION)
    roles = list(potential.conversion.roles.values())
    assert (roles.count(keys.NODE), roles.count(keys.EDGE)) == (18, 15)
    reasons = {m.name: m.reason for m in potential.conversion.maps if not m.role}
    assert len(reasons) == 7
    assert "not known as a linear map" not in "".join(reasons.values())
    assert torch.equal(potential.backbone(graph)[keys.ENERGIES], before)
    base = potential.to_base()
    assert type(base.model) is type(released.model)
    assert torch.equal(base(graph)[keys.ENERGIES], before)
    assert all(torch.equal(value, state[name]) for name, value in base.state_dict().items())
    assert not any(isinstance(module, StochasticMap) for module in base.modules())
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_checkpoint_rebuilds_the_model_without_a_file_of_the_package(small, tmp_path, dtype):
    small.reference.set({7: 0.5, 1: -0.1})
    potential = blips.bayesianize(small.to(dtype), **FOUNDATION)
    path = blips.save(potential, tmp_path / "model.safetensors")
    loaded = blips.load(path)
    assert isinstance(loaded.backbone, SevenNet)
    one, other = (model.predict(ammonia(), samples=3) for model in (potential, loaded))
    np.testing.assert_array_equal(one.energy, other.energy)
    np.testing.assert_array_equal(one.forces_std, other.forces_std)
    assert loaded.conversion == potential.conversion


def test_training_moves_weights_and_widths_but_no_constants(small, tmp_path):
    potential = blips.bayesianize(small, **FOUNDATION)
    before = {name: p.detach().clone() for name, p in potential.named_parameters()}
    structures = morse_ammonia(4, seed=1)
    config = {"training": {**QUICK, "epochs": 2, "batch_size": 2, "lr": 1e-3, "condition": True}}
    result = blips.fit(
        potential, structures[:3], valid=structures[3:], config=config, folder=tmp_path / "run",
        display=False,
    )  # fmt: skip
    assert all(np.isfinite(list(row.values())).all() for row in result.progress.history)
    moved = {n for n, p in potential.named_parameters() if not torch.equal(p, before[n])}
    assert "backbone.model.0_self_interaction_2.linear.weight" in moved
    assert "backbone.model.1_convolution.weight_nn.layer0.weight" in moved
    assert any(name.startswith("encoder.") for name in moved)
    assert not any("rescale" in name or "denominator" in name for name in moved)


def test_one_step_of_the_released_model_is_finite(released):
    potential = blips.bayesianize(copy.deepcopy(released), **FOUNDATION)
    graph = potential.backbone.graph(ammonia())
    sample = potential.sample(graph, noise.generators(0, 1), create_graph=True)
    loss = sample.outputs[keys.ENERGY].sum() + sample.outputs[keys.FORCES].square().sum()
    (loss.float() + potential.kl(sample.coefficients)).backward()
    for name in potential.conversion.roles:
        gradient = potential.backbone.get_submodule(name).weight.grad
        assert gradient is not None
        assert bool(gradient.isfinite().all())
        assert bool((gradient != 0).any())


@pytest.mark.parametrize(("modals", "corrected"), [({}, False), ({"a": 0, "b": 1}, True)])
def test_an_export_is_read_by_the_packages_calculator(small, tmp_path, modals, corrected):
    options = {}
    if modals:
        settings = {
            **SETTINGS,
            "use_modality": True,
            "_modal_map": modals,
            "use_modal_self_inter_intro": True,
            "use_modal_output_block": True,
            "use_modal_wise_shift": True,
            "use_modal_wise_scale": False,
        }
        small = SevenNet(settings, NUMBERS, modal="b")
        options = {"modal": "b"}
    if corrected:
        small.reference.set({7: -3.0, 1: 0.5}, scale=1.2)
    potential = blips.bayesianize(small, **FOUNDATION)
    path = potential.backbone.export(tmp_path / "exported.pth")
    assert_agrees(potential.to_base(), ammonia(), calculator(str(path), **options))
    with pytest.raises(CheckpointError, match="trust=True"):
        load("sevennet-0", weights=path, **options)
    again = load("sevennet-0", weights=path, trust=True, **options)
    assert_same_outputs(again, small)


def assert_same_outputs(one: SevenNet, other: SevenNet) -> None:
    expected = evaluate(other, ammonia())
    for name, value in evaluate(one, ammonia()).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


def test_a_checkpoint_made_for_an_accelerator_is_converted(small, tmp_path):
    path = small.export(tmp_path / "exported.pth")
    saved = torch.load(path, weights_only=True)
    saved["config"]["use_flash_tp"] = True
    torch.save(saved, path)
    assert_same_outputs(load("sevennet-0", weights=path, trust=True), small)


def test_mistakes_are_explained(small, monkeypatch, tmp_path):
    with pytest.raises(InputError, match=r"does not know Au.*4 elements"):
        small(small.graph(molecule("NH3") + Atoms("Au", [[0, 0, 2]])))
    with pytest.raises(InputError, match="R2SCAN, PBE; got None"):
        SevenNet({**SETTINGS, "_modal_map": {"R2SCAN": 0, "PBE": 1}}, NUMBERS)
    with pytest.raises(InputError, match=r"\(modal=\) None; got \'PBE\'"):
        SevenNet(SETTINGS, NUMBERS, modal="PBE")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load("sevennet-0", weights=tmp_path / "missing.pth")
    monkeypatch.setitem(sys.modules, "sevenn.model_build", None)
    with pytest.raises(MissingPackageError, match=r"pip install sevenn==0\.13\.0"):
        SevenNet(SETTINGS, NUMBERS)
