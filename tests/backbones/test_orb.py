"""ORB: the package's own numbers, with error bars; small random models and one of full size."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.morse import MorsePotential
from ase.calculators.singlepoint import SinglePointCalculator

import blips
from blips import keys, testing
from blips.backbones import load
from blips.backbones.derivatives import plain_outputs
from blips.backbones.orb import Orb
from blips.bayes.noise import generators
from blips.data.graph import AtomGraph
from blips.errors import InputError
from helpers import orb_package, quartz, small_orb

# The package hands torch tensors to functions of ASE that expect arrays.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
FOUNDATION = {"prior_dropout": 0.01, "bounds": (1e-5, 0.11)}


@pytest.fixture(params=["orb", "orb-direct"])
def orb(request: pytest.FixtureRequest) -> Orb:
    return small_orb(request.param)


def outside() -> Atoms:
    """Rattled quartz, one atom two cells away from the others."""
    atoms = quartz(rattle=0.1)
    atoms.positions[3] += 2 * atoms.cell[0] - atoms.cell[1]
    return atoms


def boxed_ammonia() -> Atoms:
    atoms = molecule("NH3", vacuum=6.0)
    atoms.pbc = False
    return atoms


STRUCTURES = {
    "quartz": quartz,
    "rattled quartz": lambda: quartz(rattle=0.1),
    "an atom outside the cell": outside,
    "diamond, ties everywhere": lambda: bulk("Si"),
    "rock salt, ties everywhere": lambda: bulk("NaCl", "rocksalt", a=5.6, cubic=True),
    "two close atoms": lambda: Atoms("H2", [[0, 0, 0], [0, 0, 0.3]]),
    "ammonia": lambda: molecule("NH3"),
    "ammonia in a box, not periodic": boxed_ammonia,
}


# ---- the package's own numbers ----


@pytest.mark.parametrize("structure", STRUCTURES)
def test_results_are_those_of_the_packages_calculator(orb: Orb, structure: str):
    atoms = STRUCTURES[structure]()
    periodic = bool(atoms.pbc.all())
    outputs = plain_outputs(orb, orb.graph(atoms), stress=periodic)
    atoms.calc = orb_package("calculator").ORBCalculator(orb.model, device="cpu")
    energy, forces = atoms.get_potential_energy(), torch.as_tensor(atoms.get_forces())
    # the package works in single precision: the close pair repels with 22 eV/A
    assert outputs[keys.ENERGY].item() == pytest.approx(energy, rel=1e-6, abs=1e-5)
    testing.assert_close(outputs[keys.FORCES], forces, 1e-5, "forces")
    if periodic:
        stress = torch.as_tensor(atoms.get_stress(voigt=False))
        testing.assert_close(outputs[keys.STRESS][0], stress, 1e-5, "stress")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("neighbours", [4, 20, 120])
def test_edges_are_those_of_the_package(structure: str, neighbours: int):
    atoms = STRUCTURES[structure]()
    orb = small_orb("orb", max_num_neighbors=neighbours)
    graph = orb.graph(atoms)
    theirs = orb_package("atomic_system").ase_atoms_to_atom_graphs(atoms, orb.model.system_config)
    assert torch.equal(graph.edge_index, torch.stack([theirs.senders, theirs.receivers]))
    testing.assert_close(graph.vectors(), theirs.edge_features["vectors"], 1e-5, "vectors")
    assert int(torch.bincount(graph.edge_index[0]).max()) <= neighbours


def test_half_periodic_structures_are_refused(orb: Orb):
    atoms = quartz()
    atoms.pbc = [True, True, False]
    with pytest.raises(InputError, match="three periodic directions or none"):
        orb.graph(atoms)


def test_elements_beyond_the_package_are_refused(orb: Orb):
    with pytest.raises(InputError, match="does not know Og"):
        orb(orb.graph(Atoms(["Og", "H"], [[0, 0, 0], [0, 0, 2]])))


# ---- the contract ----


def test_it_keeps_the_contract_but_for_rotations(orb: Orb):
    testing.check_contract(orb, equivariant=False)


def test_it_does_not_turn_with_the_structure(orb: Orb):
    """ORB has no built-in symmetry: a random one is off by 0.1 to 2 meV for eight atoms."""
    atoms = testing.random_structure(0)
    turned = atoms.copy()
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    turned.set_cell(atoms.cell.array @ turn.T)
    turned.positions = atoms.positions @ turn.T
    with torch.no_grad():
        energies = [plain_outputs(orb, orb.graph(one))[keys.ENERGY] for one in (atoms, turned)]
    assert 1e-5 < float((energies[0] - energies[1]).abs()) < 0.1


@pytest.mark.parametrize(("neighbours", "jumps"), [(1, True), (120, False)])
def test_only_its_bound_on_neighbours_makes_it_jump(neighbours: int, jumps: bool):
    """An atom that sees its nearest neighbour alone jumps when another one comes nearer.

    The released models have 20 (and then the 20th and the 21st trade places) or 120.
    """
    orb = small_orb("orb", max_num_neighbors=neighbours).double()

    def energy(offset: float) -> float:
        atoms = Atoms("OHH", [[0, 0, 0], [1 + offset, 0, 0], [0, 1.0, 0]])
        return float(orb(orb.graph(atoms))[keys.ENERGIES].sum().detach())

    jump = abs(energy(1e-7) - energy(-1e-7))
    assert (jump > 1e-5) == jumps


# ---- with error bars ----


def test_the_stacks_become_bayesian_and_the_report_says_why_others_do_not(orb: Orb):
    potential = blips.bayesianize(orb, **FOUNDATION)
    for report in potential.conversion.maps:
        name = report.name.removeprefix("model.model.")
        in_stacks = name.startswith("gnn_stacks") and report.layer == "Linear"
        assert bool(report.role) == (in_stacks and "_mlp." in name), report
        if report.role:
            assert report.role == (keys.EDGE if "_edge_mlp" in name else keys.NODE)
    reasons = {m.name: m.reason for m in potential.conversion.maps}
    assert "not used" in reasons["model.model._decoder.node_fn.mlp.NN-0"]
    assert "frozen" in reasons["model.heads.energy.reference.linear"]
    assert "outside the message-passing" in reasons["model.model._encoder._edge_fn.mlp.NN-0"]
    assert "rows are structures" in reasons["model.heads.energy.mlp.NN-0"]
    assert "attention gate" in reasons["model.model.gnn_stacks.0._send_attn"]
    assert "not known as a linear map" in reasons["model.model.atom_emb.embeddings"]


def test_other_maps_can_be_selected():
    potential = blips.bayesianize(
        small_orb("orb-direct"), maps=["*_encoder*", "*forces*", "*_attn"]
    )
    roles = potential.conversion.roles
    assert roles["model.model._encoder._node_fn.mlp.NN-0"] == keys.NODE
    assert roles["model.model._encoder._edge_fn.mlp.NN-2"] == keys.EDGE
    assert roles["model.model.gnn_stacks.1._receive_attn"] == keys.EDGE
    assert roles["model.heads.forces.mlp.NN-1"] == keys.NODE
    assert not any("_mlp." in name for name in roles)
    prediction = potential.predict(quartz(rattle=0.1), samples=4)
    assert (prediction.array("forces_std") > 0).all()


def test_map_is_the_plain_model_and_comes_back(orb: Orb):
    graph = orb.graph([quartz(rattle=0.1), quartz(rattle=0.2)])
    before = plain_outputs(orb, graph, stress=True)
    potential = blips.bayesianize(orb, **FOUNDATION)
    after = potential(graph, stress=True)
    base = plain_outputs(potential.to_base(), graph, stress=True)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
        assert torch.equal(base[name], value), name


def test_batched_samples_are_those_of_single_structures_and_single_samples(orb: Orb):
    potential = blips.bayesianize(orb, **FOUNDATION, estimator="flipout")
    structures = [quartz(rattle=0.1), molecule("NH3")]
    both = potential.predict(structures, samples=3, method="frozen", seed=1)
    alone = [potential.predict(one, samples=3, method="frozen", seed=1) for one in structures]
    for name in ("energy", "energy_std", "forces", "forces_std"):
        joined = np.concatenate([prediction.array(name) for prediction in alone])
        np.testing.assert_allclose(both.array(name), joined, rtol=1e-3, atol=2e-5)
    graph = orb.graph(quartz(rattle=0.1))
    together = potential.sample(graph, generators(0, 3), stress=True).outputs
    for k in range(3):
        one = potential.sample(graph, generators(0, 1, first=k), stress=True).outputs
        for name, value in one.items():
            block = together[name].detach()[k * len(value) : (k + 1) * len(value)]
            testing.assert_close(block, value.detach(), 2e-5, f"sample {k} {name}")


@pytest.mark.parametrize("method", ["mc", "frozen"])
def test_deviations_and_kl_are_finite_and_positive(orb: Orb, method: str):
    potential = blips.bayesianize(orb, **FOUNDATION)
    assert potential.estimator == ("flipout" if orb.conservative else "auto")
    prediction = potential.predict(
        [quartz(), quartz(rattle=0.1)], samples=4, method=method, stress=True
    )
    for name in ("energy_std", "forces_std", "stress_std"):
        std = prediction.array(name)
        assert np.isfinite(std).all()
        assert (std > 0).all()
    assert (prediction.energies is not None) == orb.conservative
    coefficients = potential.coefficients(orb.graph(quartz()))
    assert 0 < float(potential.kl(coefficients).detach()) < 1e3


def test_direct_outputs_are_given_as_asked():
    potential = blips.bayesianize(small_orb("orb-direct"), **FOUNDATION)
    ammonia = molecule("NH3")
    prediction = potential.predict(ammonia, samples=2, forces=False)
    assert prediction.forces is None
    assert prediction.stress is None
    assert np.isfinite(prediction.array("energy"))
    with pytest.raises(InputError, match="no volume"):
        potential.predict(ammonia, samples=2, stress=True)
    net = potential.predict(quartz(rattle=0.1), samples=2).array("forces").sum(axis=0)
    np.testing.assert_allclose(net, 0, atol=1e-5)


@pytest.mark.parametrize("stress", [0.0, 1.0])
def test_it_trains(orb: Orb, stress: float, tmp_path):
    potential = blips.bayesianize(orb, **FOUNDATION)
    before = {name: p.detach().clone() for name, p in potential.named_parameters()}
    structures = [_labelled(quartz(rattle=0.1, seed=seed)) for seed in range(4)]
    config = {
        "training": {
            "epochs": 2,
            "batch_size": 2,
            "lr": 1e-3,
            "noise": True,
            "schedule": {"kind": "constant"},
            "kl_weight": 1e-3,
            "weights": {"energy": 1.0, "forces": 1.0, "stress": stress},
            "tensorboard": False,
        },
        "data": {"reference_energies": "none"},
    }
    result = blips.fit(
        potential, structures[:3], valid=structures[3:], config=config, folder=tmp_path / "run",
        display=False,
    )  # fmt: skip
    assert len(result.progress.history) == 2
    assert all(np.isfinite(list(row.values())).all() for row in result.progress.history)
    losses = [row["valid_loss"] for row in result.progress.history]
    assert losses[1] < losses[0]
    moved = [n for n, p in potential.named_parameters() if not torch.equal(p, before[n])]
    assert any("gnn_stacks" in name for name in moved)
    assert any(name.startswith("encoder.") for name in moved)
    assert "backbone.model.heads.energy.reference.linear.weight" not in moved


def _labelled(atoms: Atoms) -> Atoms:
    """With energy, forces and stress of a Morse potential; energies near ORB's own."""
    atoms.calc = MorsePotential(epsilon=0.2, r0=1.6, rho0=3.0)
    energy, forces, stress = (
        atoms.get_potential_energy() - 50.0,
        atoms.get_forces(),
        atoms.get_stress(),
    )
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces, stress=stress)
    return atoms


# ---- full size ----


def test_the_paper_s_model_of_full_size():
    torch.manual_seed(0)
    orb = load("orb-v3-direct-20-omat", random=True)
    assert sum(p.numel() for p in orb.parameters()) == 25_644_479
    potential = blips.bayesianize(orb, **FOUNDATION)
    assert len(potential.conversion.roles) == 5 * 2 * 3
    atoms = quartz(rattle=0.1)
    prediction = potential.predict(atoms, samples=2)
    assert (prediction.array("forces_std") > 0).all()
    atoms.calc = orb_package("calculator").ORBCalculator(orb.model, device="cpu")
    best = potential.predict(atoms, method="map", stress=True)
    np.testing.assert_allclose(best.array("forces"), atoms.get_forces(), atol=1e-5)
    np.testing.assert_allclose(best.array("stress")[0], atoms.get_stress(voigt=False), atol=1e-5)


def test_graphs_are_plain_atom_graphs(orb: Orb):
    graph = orb.graph([quartz(), molecule("NH3")])
    assert isinstance(graph, AtomGraph)
    assert graph.num_structures == 2
