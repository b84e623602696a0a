"""CHGNet: the package's own numbers, with error bars."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule

import blips
from blips import keys, testing
from blips.backbones import build, load
from blips.backbones.chgnet import CHGNet
from blips.backbones.derivatives import plain_outputs
from blips.bayes.noise import generators
from blips.errors import CheckpointError, InputError, MissingPackageError
from blips.testing import rotation_matrix
from helpers import QUICK, morse_ammonia, quartz

chgnet_model = pytest.importorskip("chgnet.model", reason="chgnet is not installed")
# The package makes a list of numbers from a tensor that autograd follows.
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
FOUNDATION = {"prior_dropout": 0.01, "bounds": (1e-5, 0.11)}
GPA = 160.21766208  # GPa in eV/A^3, as the package has it
SMALL = {
    **{f"{part}_fea_dim": 8 for part in ("atom", "bond", "angle")},
    **{f"{part}_conv_hidden_dim": 8 for part in ("atom", "bond")},
    "mlp_hidden_dims": [8, 8],
    "num_radial": 9,
    "num_angular": 9,
    "n_conv": 3,
}


@pytest.fixture(scope="module")
def released() -> CHGNet:
    return load("chgnet")


@pytest.fixture
def small() -> CHGNet:
    torch.manual_seed(0)
    return build("chgnet", architecture=SMALL)


def boxed_ammonia() -> Atoms:
    atoms = molecule("NH3")
    atoms.rattle(0.05, seed=0)
    atoms.set_cell([12.0] * 3)
    atoms.center()
    atoms.pbc = True
    return atoms


STRUCTURES = {
    "quartz": quartz,
    "rattled quartz": lambda: quartz(rattle=0.1),
    "ammonia in a box": boxed_ammonia,
}


def calculator(model):
    return chgnet_model.CHGNetCalculator(model, use_device="cpu")


# ---- the package's own numbers ----


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["chgnet", "chgnet-r2scan"])
def test_results_are_those_of_the_packages_calculator(name: str, structure: str):
    backbone, atoms = load(name), STRUCTURES[structure]()
    outputs = plain_outputs(backbone, backbone.graph(atoms), stress=True)
    version = {"chgnet": "0.3.0", "chgnet-r2scan": "r2scan"}[name]
    atoms.calc = calculator(chgnet_model.CHGNet.load(model_name=version, use_device="cpu"))
    assert outputs[keys.ENERGY].item() == pytest.approx(atoms.get_potential_energy(), rel=1e-6)
    # Arc cosines cost the package digits: its forces on rattled quartz are 1.5e-4 eV/A, of 13,
    # from its own in double precision (next test), where both are the same to 1e-10.
    forces = torch.as_tensor(atoms.get_forces())
    testing.assert_close(outputs[keys.FORCES], forces, 5e-5, "forces")
    stress = torch.as_tensor(atoms.get_stress(voigt=False))
    testing.assert_close(outputs[keys.STRESS][0], stress, 1e-5, "stress")


@pytest.mark.parametrize("name", STRUCTURES)
def test_results_are_those_of_the_package_in_double_precision(name: str):
    atoms = STRUCTURES[name]()
    double = load("chgnet").double()
    outputs = plain_outputs(double, double.graph(atoms), stress=True)
    model = chgnet_model.CHGNet.load(use_device="cpu").double()
    model.composition_model.float()  # the package counts elements in single precision
    structure = _pymatgen(atoms)
    graph = model.graph_converter(structure)
    graph.atom_frac_coord = torch.tensor(structure.frac_coords, requires_grad=True)
    graph.lattice = torch.tensor(structure.lattice.matrix, requires_grad=True)
    graph.neighbor_image = graph.neighbor_image.double()
    theirs = model.predict_graph(graph, task="efs", return_site_energies=True)
    forces, sites = torch.as_tensor(theirs["f"]), torch.as_tensor(theirs["site_energies"])
    testing.assert_close(outputs[keys.FORCES], forces, 1e-10, "forces")
    testing.assert_close(outputs[keys.ENERGIES], sites, 1e-10, "energies of atoms")
    assert outputs[keys.ENERGY].item() == pytest.approx(len(atoms) * theirs["e"], abs=1e-5)
    stress = torch.as_tensor(theirs["s"] / GPA)  # with a volume in single precision
    testing.assert_close(outputs[keys.STRESS][0], stress, 1e-6, "stress")


def _pymatgen(atoms: Atoms):
    from pymatgen.io.ase import AseAtomsAdaptor

    return AseAtomsAdaptor.get_structure(atoms)


def test_rows_are_those_of_the_packages_graph(released: CHGNet):
    atoms = quartz(rattle=0.1)
    theirs = released.model.graph_converter(_pymatgen(atoms))
    assert released.row_counts(released.graph(atoms)) == {
        "node": 9,
        "edge": len(theirs.atom_graph),
        "bond": len(theirs.undirected2directed),
        "angle": len(theirs.bond_graph),
    }


def test_the_contract_holds(released: CHGNet):
    crystal = Atoms("SiO", [[0, 0, 0], [1.1, 1.2, 1.3]], cell=[2.7, 3.0, 3.2], pbc=True)
    testing.check_contract(released, [crystal, testing.random_structure(2, periodic=False)])
    # third derivatives are large here: with steps of 1e-4 A the differences are off by 1.2e-5
    testing.check_forces(released, molecule("NH3"), step=1e-5, atol=1e-6)


def test_nothing_jumps_where_a_bond_becomes_too_long_for_angles():
    double = load("chgnet").double()
    inside, outside = (
        plain_outputs(double, double.graph(Atoms("SiO2", [[0, 0, 0], [1.2, 1.0, 0], [x, 0, 0]])))
        for x in (3.0 - 1e-6, 3.0 + 1e-6)
    )
    for name in (keys.ENERGIES, keys.FORCES):
        testing.assert_close(inside[name], outside[name], 1e-4, name)


def test_atoms_without_neighbours_or_angles_have_energies(released: CHGNet):
    alone = plain_outputs(released, released.graph(Atoms("N")))
    assert alone[keys.FORCES].tolist() == [[0.0, 0.0, 0.0]]
    pair = released.graph([Atoms("N"), Atoms("NH", [[0, 0, 0], [0, 0, 3.5]])])
    assert released.row_counts(pair)["angle"] == 0
    outputs = plain_outputs(released, pair)
    testing.assert_close(outputs[keys.ENERGIES][0], alone[keys.ENERGIES][0], 1e-6, "lone atom")
    assert bool(outputs[keys.FORCES].isfinite().all())


def test_unknown_elements_are_named(released: CHGNet):
    with pytest.raises(InputError, match="does not know Am"):
        released(released.graph(Atoms(["Am", "O"], [[0, 0, 0], [0, 0, 2]])))


# ---- with error bars ----


def test_every_map_is_bayesian_or_has_a_reason():
    potential = blips.bayesianize(load("chgnet"), **FOUNDATION)
    reasons = {m.name: m.reason for m in potential.conversion.maps if m.layer == "Linear"}
    assert {name: reason for name, reason in reasons.items() if reason} == {
        "model.composition_model.fc": "frozen energies of the elements",
        "model.site_wise": "magnetic moments, not used by the energy",
        "model.angle_layers.2.twoBody_bond.mlp_core.layers.1": "its output is not used",
        "model.angle_layers.2.twoBody_bond.mlp_gate.layers.1": "its output is not used",
    }
    others = {m.layer for m in potential.conversion.maps if m.reason} - {"Linear"}
    assert others == {"Embedding", "LayerNorm", "RadialBessel", "Fourier"}
    assert len(potential.conversion.roles) == 47


def test_maps_that_are_said_to_be_unused_are(small: CHGNet):
    graph = small.graph(quartz())
    before = small(graph)[keys.ENERGIES]
    with torch.no_grad():
        for module in (small.model.angle_layers[-1], small.model.site_wise):
            for parameter in module.parameters():
                parameter += 1.0
    assert torch.equal(small(graph)[keys.ENERGIES], before)


def test_map_is_the_plain_model_to_the_bit_and_comes_back(released: CHGNet):
    potential = blips.bayesianize(load("chgnet"), **FOUNDATION)
    graph = released.graph(quartz(rattle=0.1))
    expected = plain_outputs(released, graph, stress=True)
    outputs = potential(graph, stress=True)
    for name, value in expected.items():
        assert torch.equal(outputs[name], value), name
    base = potential.to_base()
    assert isinstance(base, CHGNet)
    state = released.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in base.model.state_dict().items())
    assert {type(m) for m in base.modules()} == {type(m) for m in released.modules()}


def test_samples_are_equivariant_and_do_not_depend_on_the_batch():
    potential = blips.bayesianize(load("chgnet"), **FOUNDATION).double()
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


def test_error_bars_are_finite():
    potential = blips.bayesianize(load("chgnet"), **FOUNDATION)
    prediction = potential.predict([quartz(), boxed_ammonia()], samples=4, stress=True)
    for std in (prediction.energy_std, prediction.forces_std, prediction.stress_std):
        assert np.isfinite(std).all()
        assert (std > 0).all()


def test_features_of_bonds_and_angles_do_not_depend_on_the_order_of_atoms(small: CHGNet):
    atoms = quartz(rattle=0.1)
    order = np.random.default_rng(0).permutation(len(atoms))
    features, permuted = (
        small.double().row_features(small.graph(one)) for one in (atoms, atoms[order])
    )
    for name in ("bond", "angle"):
        assert features[name].shape[1] == small.feature_sizes[name]
        rows = [np.round(f[name].numpy(), 8) for f in (features, permuted)]
        sorted_rows = [row[np.lexsort(row.T)] for row in rows]
        np.testing.assert_allclose(sorted_rows[0], sorted_rows[1], atol=1e-7)


def test_rows_belong_to_atoms_of_their_structure(small: CHGNet):
    graph = small.graph([quartz(), molecule("NH3")])
    counts, atoms = small.row_counts(graph), small.row_atoms(graph)
    assert {name: len(rows) for name, rows in atoms.items()} == counts
    alone = [small.row_counts(small.graph(one)) for one in (quartz(), molecule("NH3"))]
    for name, rows in atoms.items():
        per_structure = torch.bincount(graph.structure[rows]).tolist()
        assert per_structure == [count[name] for count in alone], name


def test_training_keeps_everything_finite(tmp_path):
    potential = blips.bayesianize(load("chgnet"), **FOUNDATION)
    before = potential.backbone.model.composition_model.fc.weight.clone()
    config = {
        "training": {**QUICK, "epochs": 2, "batch_size": 2, "lr": 1e-4},
        "data": {"reference_energies": "none"},
    }
    frames, valid = morse_ammonia(4, seed=0), morse_ammonia(2, seed=1)
    result = blips.fit(
        potential, frames, valid=valid, config=config, folder=tmp_path, display=False
    )
    losses = [
        epoch[f"{part}_loss"] for epoch in result.progress.history for part in ("train", "valid")
    ]
    assert np.isfinite(losses).all()
    assert all(bool(p.isfinite().all()) for p in potential.parameters())
    assert torch.equal(potential.backbone.model.composition_model.fc.weight, before)


# ---- files ----


def test_a_checkpoint_of_blips_needs_no_file_of_the_package(small: CHGNet, tmp_path):
    potential = blips.bayesianize(small, **FOUNDATION)
    path = blips.save(potential, tmp_path / "model.safetensors")
    again = blips.load(path)
    assert again.report() == potential.report()
    first, second = (p.predict(quartz(), samples=2) for p in (potential, again))
    np.testing.assert_array_equal(first.energy, second.energy)
    np.testing.assert_array_equal(first.forces, second.forces)


@pytest.mark.parametrize("is_bayesian", [False, True])
def test_the_packages_calculator_reads_the_export(small: CHGNet, tmp_path, is_bayesian: bool):
    small.reference.set({8: -1.5, 14: 2.5}, scale=1.3)
    if is_bayesian:
        small = blips.bayesianize(small, **FOUNDATION).backbone
    path = small.export(tmp_path / "chgnet.pth.tar")
    atoms = quartz(rattle=0.1)
    outputs = plain_outputs(small, small.graph(atoms))
    atoms.calc = chgnet_model.CHGNetCalculator.from_file(path, use_device="cpu")
    assert outputs[keys.ENERGY].item() == pytest.approx(atoms.get_potential_energy(), abs=1e-5)
    forces = torch.as_tensor(atoms.get_forces())
    testing.assert_close(outputs[keys.FORCES], forces, 1e-5, "forces")
    again = load("chgnet", weights=path)
    reread = again(again.graph(quartz(rattle=0.1)))[keys.ENERGIES].detach()
    testing.assert_close(reread, outputs[keys.ENERGIES], 1e-6, "energies")


class Surprise:
    def __reduce__(self):
        return print, ("code of the file runs",)


def test_a_file_that_could_run_code_is_refused(tmp_path, capsys):
    path = tmp_path / "chgnet.pth.tar"
    torch.save({"model": Surprise()}, path)
    with pytest.raises(CheckpointError, match="trust=True"):
        load("chgnet", weights=path)
    assert capsys.readouterr().out == ""
    with pytest.raises(CheckpointError, match="no checkpoint of CHGNet"):
        load("chgnet", weights=path, trust=True)
    with pytest.raises(CheckpointError, match="check the path"):
        load("chgnet", weights=tmp_path / "nothing")


def test_models_are_made_quietly(capsys):
    load("chgnet")
    build("chgnet", architecture=SMALL)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("setting", [{"mlp_first": False}, {"composition_model": None}])
def test_models_without_energies_of_atoms_are_refused(setting: dict):
    with pytest.raises(InputError, match="no energies of single atoms"):
        build("chgnet", architecture={**SMALL, **setting})


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "chgnet.model", None)
    with pytest.raises(MissingPackageError, match="pip install chgnet"):
        load("chgnet")
