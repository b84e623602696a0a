import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

import blips
from blips import keys
from blips.backbones import PaiNN, SchNet
from blips.baselines import predict_plain
from blips.bayes import noise
from blips.bayes.noise import FrozenDraw
from blips.errors import BlipsError, ConversionError, InputError
from helpers import TINY
from studies.nbody import EGNN, GNN, ParticleGraph
from studies.nbody.data import POSITIONS

EXACT = {"rtol": 0.0, "atol": 1e-10}


def ethanol() -> Atoms:
    atoms = molecule("CH3CH2OH")
    atoms.rattle(0.05, seed=1)
    return atoms


def silicon() -> Atoms:
    atoms = bulk("Si", cubic=True)
    atoms.rattle(0.05, seed=1)
    return atoms


def make(backbone=PaiNN, dtype=torch.float64, **options) -> blips.BayesianPotential:
    torch.manual_seed(0)
    model = backbone(cutoff=4.0, features=16, blocks=2, num_basis=6).to(dtype)
    return blips.bayesianize(model, **options)


def particles(simulations: int = 3) -> ParticleGraph:
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, simulations, 5, 3, generator=generator, dtype=torch.float64)
    q = torch.randint(0, 2, (simulations, 5), generator=generator).double() * 2 - 1
    return ParticleGraph.from_arrays(x, v, q)


def rotation(seed: int = 0, improper: bool = False) -> torch.Tensor:
    matrix = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q = torch.linalg.qr(matrix)[0]
    q = q * torch.linalg.det(q).sign()
    return -q if improper else q


def rotated(atoms: Atoms, q: torch.Tensor) -> Atoms:
    turned = atoms.copy()
    turned.set_cell(atoms.cell.array @ q.numpy(), scale_atoms=False)
    turned.positions = atoms.positions @ q.numpy()
    return turned


def one_sample(potential, graph, estimator=None, **options):
    potential.estimator = estimator or potential.estimator
    return potential.sample(graph, noise.generators(5, 1), **options).outputs


def test_map_is_the_base_model_bitwise_and_conversion_can_be_undone():
    torch.manual_seed(0)
    plain = PaiNN(cutoff=4.0, features=16, blocks=2, num_basis=6)
    base = copy.deepcopy(plain)
    potential = blips.bayesianize(plain)
    graph = base.graph([ethanol(), silicon()])
    expected = base(graph)[keys.ENERGIES]
    assert torch.equal(potential(graph)[keys.ENERGIES], expected)
    one_sample(potential, graph)
    again = potential.to_base()
    assert type(again) is PaiNN
    assert [type(m) for m in again.modules()] == [type(m) for m in base.modules()]
    assert torch.equal(again(graph)[keys.ENERGIES], expected)
    base.load_state_dict(potential.backbone.state_dict())
    potential.backbone.load_state_dict(base.state_dict())


@pytest.mark.parametrize("structure", [ethanol, silicon])
@pytest.mark.parametrize("improper", [False, True])
def test_every_flipout_and_frozen_sample_of_painn_is_equivariant(structure, improper):
    potential, q = make(estimator="flipout"), rotation(improper=improper)
    atoms = structure()
    graph = potential.backbone.graph(atoms, torch.float64)
    turned = potential.backbone.graph(rotated(atoms, q), torch.float64)
    draws = [FrozenDraw(3)]
    for evaluate in (
        lambda g: one_sample(potential, g, stress=bool(atoms.pbc.all())),
        lambda g: potential.sample(g, draws, stress=bool(atoms.pbc.all())).outputs,
    ):
        here, there = evaluate(graph), evaluate(turned)
        torch.testing.assert_close(there[keys.ENERGY], here[keys.ENERGY], **EXACT)
        torch.testing.assert_close(there[keys.FORCES], here[keys.FORCES] @ q, **EXACT)
        if atoms.pbc.all():
            expected = q.T @ here[keys.STRESS] @ q
            torch.testing.assert_close(there[keys.STRESS], expected, **EXACT)
        deterministic = potential(graph)[keys.ENERGY]
        assert (here[keys.ENERGY] - deterministic).abs().min() > 1e-4


def test_local_noise_on_vector_maps_would_break_equivariance():
    """What the refusal protects from: noise per component, drawn as if components were rows."""
    from blips.bayes.estimators import flipout_linear, local_linear

    torch.manual_seed(0)
    h, q = torch.randn(5, 3, 4).double(), rotation()
    weight, coef = torch.randn(6, 4).double(), torch.rand(5).double()
    h_turned = torch.einsum("nac,ab->nbc", h, q)

    def local(h):
        rows = h.reshape(15, 4)
        z = local_linear(rows, weight, None, coef.repeat_interleave(3), noise.generators(0, 1))
        return z.reshape(5, 3, 6)

    def flipout(h):
        return flipout_linear(h, weight, None, coef, noise.generators(0, 1))

    def violation(sample):
        return (sample(h_turned) - torch.einsum("nac,ab->nbc", sample(h), q)).abs().max()

    assert violation(flipout) < 1e-12
    assert violation(local) > 0.1
    with pytest.raises(InputError, match="irrep axis"):
        one_sample(make(), make().backbone.graph(ethanol(), torch.float64), estimator="local")


def test_every_egnn_sample_is_equivariant():
    torch.manual_seed(0)
    potential = blips.bayesianize(EGNN(hidden=16, layers=2).double())
    q, shift = rotation(1), torch.tensor([0.3, -1.0, 2.0]).double()
    graph = particles()
    turned = ParticleGraph.from_arrays(
        (graph.positions @ q + shift).reshape(3, 5, 3),
        (graph.velocities @ q).reshape(3, 5, 3),
        graph.charges.reshape(3, 5),
    )
    draws = [FrozenDraw(1)]
    for estimator in ("local", "flipout", "frozen"):
        if estimator == "frozen":
            here, there = (potential.sample(g, draws).outputs for g in (graph, turned))
        else:
            here, there = (one_sample(potential, g, estimator=estimator) for g in (graph, turned))
        expected = here[POSITIONS] @ q + shift
        torch.testing.assert_close(there[POSITIONS], expected, **EXACT)


@pytest.mark.parametrize("backbone", [PaiNN, SchNet])
def test_a_frozen_member_is_conservative_and_smooth(backbone):
    potential = make(backbone)
    member = potential.draw(2, seed=4)[1]
    atoms = ethanol()
    make_graph = potential.backbone.graph
    forces = member(make_graph(atoms, torch.float64))[keys.FORCES].numpy()

    def energy(atom: int, axis: int, step: float) -> float:
        moved = atoms.copy()
        moved.positions[atom, axis] += step
        return member(make_graph(moved, torch.float64), forces=False)[keys.ENERGY].item()

    step = 1e-4
    for atom, axis in [(0, 0), (2, 1), (8, 2)]:
        slope = (energy(atom, axis, step) - energy(atom, axis, -step)) / (2 * step)
        assert -slope == pytest.approx(forces[atom, axis], abs=1e-6)
        steps = np.linspace(-0.002, 0.002, 9)
        energies = np.array([energy(atom, axis, s) for s in steps])
        fourth_difference = np.diff(energies, 4)
        assert np.abs(fourth_difference).max() < 1e-4 * np.ptp(energies)


def test_forces_of_a_sample_are_derivatives_with_the_noise_held_fixed():
    potential = make(estimator="auto")
    atoms = ethanol()
    graph = potential.backbone.graph(atoms, torch.float64)
    forces = one_sample(potential, graph)[keys.FORCES]
    step = 1e-5
    energies = []
    for sign in (1, -1):
        moved = atoms.copy()
        moved.positions[3, 1] += sign * step
        moved_graph = potential.backbone.graph(moved, torch.float64)
        energies.append(one_sample(potential, moved_graph, forces=False)[keys.ENERGY].detach())
    slope = (energies[0] - energies[1]) / (2 * step)
    torch.testing.assert_close(-slope[0], forces[3, 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["auto", "flipout"])
def test_gradients_of_a_force_loss_reach_every_weight_and_the_inference_network(estimator):
    potential = make(estimator=estimator)
    graph = potential.backbone.graph([ethanol()], torch.float64)
    sample = potential.sample(graph, noise.generators(0, 1), create_graph=True)
    loss = sample.outputs[keys.FORCES].abs().mean() + potential.kl(sample.coefficients)
    loss.backward()
    without = [
        name
        for name, parameter in potential.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().sum() > 0
    ]
    assert set(without) <= {"backbone.readout.2.bias"}  # a constant energy has no force
    assert all(torch.isfinite(p.grad).all() for p in potential.parameters() if p.grad is not None)


def test_an_isolated_atom_has_finite_samples_and_gradients():
    potential = make()
    graph = potential.backbone.graph([Atoms("C", positions=[[0, 0, 0]])], torch.float64)
    sample = potential.sample(graph, noise.generators(0, 1), create_graph=True)
    assert torch.equal(sample.outputs[keys.FORCES], torch.zeros(1, 3).double())
    loss = sample.outputs[keys.ENERGY].sum() + potential.kl(sample.coefficients)
    loss.backward()
    assert torch.isfinite(loss)
    gradients = [p.grad for p in potential.parameters() if p.grad is not None]
    assert all(torch.isfinite(g).all() for g in gradients)


def test_two_threads_predict_with_one_model_undisturbed():
    potential = make(dtype=torch.float32)
    atoms = [ethanol(), silicon()]
    alone = [potential.predict(a, samples=4, seed=i) for i, a in enumerate(atoms)]
    together: dict[int, list] = {0: [], 1: []}

    def work(i: int) -> None:
        for _ in range(3):
            together[i].append(potential.predict(atoms[i], samples=4, seed=i))

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (0, 1):
        for prediction in together[i]:
            np.testing.assert_array_equal(prediction.energy, alone[i].energy)
            np.testing.assert_array_equal(prediction.forces_std, alone[i].forces_std)


def test_potentials_pickle_and_copy_with_their_posterior():
    potential = make()
    for twin in (copy.deepcopy(potential), pickle.loads(pickle.dumps(potential))):
        ours, theirs = (p.predict(ethanol(), samples=3) for p in (potential, twin))
        np.testing.assert_array_equal(ours.energy_std, theirs.energy_std)


def test_a_notebook_shows_a_table_of_the_potential():
    potential = make()
    weights = sum(p.numel() for p in potential.backbone.parameters())
    page = potential._repr_html_()
    assert f"<td>PaiNN, {weights:,} weights</td>" in page
    assert "not conditioned" in page
    potential.calibration = {"forces": blips.uq.ScaleCalibrator(2.0)}
    assert "<td>forces</td>" in potential._repr_html_()


def test_the_report_names_every_map_and_its_fate():
    report = make(exclude="readout.*").report()
    assert "blocks.0.message.filter" in report
    assert "edge rows" in report
    assert "none: excluded" in report
    assert "none: Embedding is not known as a linear map" in report


def test_probing_finds_what_the_backbone_declares():
    declared = make().conversion.roles
    torch.manual_seed(0)
    model = PaiNN(cutoff=4.0, features=16, blocks=2, num_basis=6)
    model.roles = {}
    probed = blips.bayesianize(model)
    assert probed.conversion.roles == declared


def test_bad_requests_are_refused():
    with pytest.raises(InputError, match="unknown estimator 'bayes'"):
        make(estimator="bayes")
    with pytest.raises(ConversionError, match="no map was selected"):
        make(maps="nothing.*")
    with pytest.raises(InputError, match="takes graphs"):
        blips.bayesianize(GNN(hidden=8, layers=1)).predict(ethanol())
    with pytest.raises(InputError, match="unknown method 'bootstrap'"):
        make().predict(ethanol(), method="bootstrap")
    with pytest.raises(InputError, match="at least 2 samples"):
        make().predict(ethanol(), samples=1)
    with pytest.raises(InputError, match="count is 0; expected 1 or more"):
        make().draw(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_dropout": 2.0}, "prior_dropout is 2.0"),
        ({"initial": 10.0}, "outside its bounds"),
        ({"encoder": {"hiden": 3}}, "no setting 'hiden'; did you mean 'hidden'"),
        ({"encoder": {"variant": "mine"}}, "unknown variant 'mine'"),
    ],
)
def test_a_conversion_that_fails_leaves_the_backbone_plain(options, message):
    backbone = PaiNN(**TINY)
    with pytest.raises(BlipsError, match=message):
        blips.bayesianize(backbone, **options)
    assert blips.bayesianize(backbone).conversion.roles


@pytest.mark.slow
def test_the_means_compile_into_one_graph_for_all_sizes():
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(**TINY))
    plain, compiled = potential.to_base(), potential.to_base()
    compiled.compile(backend="eager", fullgraph=True, dynamic=True)
    for name in ("NH3", "CH4"):
        expected, found = (predict_plain(m, molecule(name)) for m in (plain, compiled))
        np.testing.assert_allclose(found.array("forces"), expected.array("forces"), atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
