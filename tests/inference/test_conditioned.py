"""A potential that is conditioned on structures: its predictions, its members, its errors."""

import copy
import itertools
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from torch import Tensor

import blips
from blips import keys
from blips.backbones import Adapter, PaiNN
from blips.bayes.condition import Evidence
from blips.errors import CheckpointError, InputError, TooLargeError
from blips.inference import rows as row_sums
from blips.inference.linearise import LinearModel
from blips.inference.posterior import ConditionedPosterior, Scale
from blips.inference.rows import components
from blips.inference.sampling import Member
from blips.inference.scale import RELATIVE_RATIOS, fit_floor
from blips.testing import rotation_matrix
from helpers import morse_ammonia, quartz, rattled_molecules
from inference.models import (
    boxed_ammonia,
    central,
    labelled,
    normal,
    periodic,
    small,
    with_frozen_noise,
    with_wide_coefficients,
)
from studies.nbody import EGNN

# The packages behind CHGNet and ORB.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
TRAIN = rattled_molecules(5, 0.05)
VALID = labelled(rattled_molecules(4, 0.1, first=20))
FAR = rattled_molecules(3, 0.3, first=40)
FLOOR = {keys.FORCES: 0.05, keys.ENERGY: 0.01}
FACTOR, TAU = 1.5, 0.3
EXACT = {"rtol": 1e-10, "atol": 1e-12}
OWN = pytest.mark.parametrize("name", ["painn", "schnet"])


def rescaled(potential: blips.BayesianPotential, relative_ratio: float = 1e-3) -> None:
    """Give its posterior numbers that no labels decided, and that rounding does not reach."""
    posterior = potential.conditioned()
    assert posterior.evidence is not None
    ratio = relative_ratio * posterior.evidence.mean_square
    potential.posterior = replace(posterior, scale=Scale(ratio, TAU, FLOOR, FACTOR))


def conditioned(name: str = "painn", structures=TRAIN, **options) -> blips.BayesianPotential:
    potential = small(name)
    potential.condition(structures, valid=VALID, **options)
    rescaled(potential)
    return potential


def test_the_scale_is_in_units_of_the_rows_and_the_floor_is_what_the_factor_leaves():
    potential = small("painn")
    potential.condition(TRAIN, valid=VALID)
    posterior = potential.conditioned()
    assert posterior.evidence is not None
    assert posterior.gaussian is not None
    scale, factor = posterior.scale, posterior.scale.energy_factor
    ratios = RELATIVE_RATIOS * posterior.evidence.mean_square
    assert np.abs(ratios / scale.ratio - 1.0).min() < 1e-9
    linearised = potential.linear_model()(potential.backbone.graph(VALID), depth="energies")
    var = posterior.gaussian.var(linearised.energy_rows()).numpy()
    truth = [atoms.get_potential_energy() for atoms in VALID]
    error = linearised.outputs[keys.ENERGY].numpy() - np.array(truth)
    sizes = np.array([float(len(atoms)) for atoms in VALID])
    floors = [fit_floor(power * var, error, sizes) for power in (factor**2, factor**3, 1.0)]
    assert scale.floor[keys.ENERGY] == pytest.approx(floors[0], rel=1e-6)
    assert floors[0] not in floors[1:], "these labels cannot tell"


@pytest.fixture(scope="module", params=["painn", "schnet"])
def potential(request) -> blips.BayesianPotential:
    """Not to be changed."""
    return conditioned(request.param)


@pytest.fixture(scope="module")
def painn() -> blips.BayesianPotential:
    """Not to be changed."""
    return conditioned("painn")


def predict(potential, atoms, **options) -> blips.Prediction:
    return potential.predict(atoms, method="conditioned", **options)


def all_rows(potential: blips.BayesianPotential, atoms: Atoms) -> Tensor:
    """Rows of the energy and of all force components, [1 + 3N, d]."""
    graph = potential.backbone.graph(atoms)
    linearised = LinearModel(potential.backbone, potential.conditioned().maps)(graph, depth="rows")
    directions = [one.u for one in components(graph, 3 * len(atoms))]
    forces = linearised.rows_along(keys.FORCES, directions)
    return torch.cat([linearised.energy_rows(), *forces]).double()


def regression_covariance(posterior, rows: Tensor) -> np.ndarray:
    """tau^2 (I + G / r)^-1 by numpy, from rows of all structures."""
    b, scale = rows.numpy(), posterior.scale
    return scale.scale**2 * np.linalg.inv(np.eye(b.shape[1]) + b.T @ b / scale.ratio)


def gram_of(potential) -> Tensor:
    return potential.conditioned().evidence.gram()


# ---- Bayesian linear regression of the rows ----


def test_energies_have_the_deviations_of_linear_regression(potential):
    seen = torch.cat([all_rows(potential, atoms) for atoms in TRAIN])
    cov = regression_covariance(potential.posterior, seen)
    b = torch.stack([all_rows(potential, atoms)[0] for atoms in FAR]).numpy()
    expected = FACTOR * np.sqrt(np.einsum("ni,ij,nj->n", b, cov, b))
    np.testing.assert_allclose(predict(potential, FAR, samples=2).energy_std, expected, rtol=1e-8)


@pytest.mark.statistical
def test_forces_have_the_deviations_of_linear_regression(painn):
    """Within 5 standard errors of 300 draws."""
    seen = torch.cat([all_rows(painn, atoms) for atoms in TRAIN])
    cov = regression_covariance(painn.posterior, seen)
    b = all_rows(painn, FAR[0])[1:].numpy()
    expected = np.sqrt(np.einsum("ni,ij,nj->n", b, cov, b))
    found = predict(painn, FAR[0], samples=300).array("forces_std")
    np.testing.assert_allclose(found.ravel(), expected, rtol=5 / np.sqrt(600))


def test_rows_are_those_of_all_energies_and_force_components(potential):
    rows = torch.cat([all_rows(potential, atoms) for atoms in TRAIN])
    torch.testing.assert_close(gram_of(potential), rows.T @ rows, **EXACT)
    assert potential.posterior.evidence.count == sum(1 + 3 * len(atoms) for atoms in TRAIN)


def test_random_sums_stand_for_many_components(painn):
    """3 rows and one for the energy, of the right size on average (20 seeds, 5 deviations)."""
    total = []
    for seed in range(20):
        seen = row_sums.collect(painn.linear_model(), TRAIN, rows=3, seed=seed)
        assert seen.evidence.count == 4 * len(TRAIN)
        total.append(float(seen.evidence.gram().trace()))
    error = np.std(total) / np.sqrt(20)
    assert np.mean(total) == pytest.approx(float(gram_of(painn).trace()), abs=5 * error)
    assert error > 0


def test_deviations_grow_away_from_the_data():
    potential = small("painn")
    near, far = (rattled_molecules(6, scale, first=60) for scale in (0.03, 0.3))
    potential.condition(rattled_molecules(9, 0.03), valid=VALID, maps="all", dimension=300, rows=6)
    rescaled(potential, relative_ratio=1e-6)
    here, there = (predict(potential, structures, samples=8) for structures in (near, far))
    assert there.energy_std.mean() > 3 * here.energy_std.mean()
    assert there.forces_std.mean() > 3 * here.forces_std.mean()


# ---- at once, in batches, in calls ----


@pytest.mark.parametrize("rows", [48, 5], ids=["components", "sums"])
@pytest.mark.parametrize("way", ["generator", "two calls", "batches"])
def test_the_way_structures_come_does_not_matter(way: str, rows: int, monkeypatch):
    at_once = conditioned(rows=rows)
    if way == "batches":
        monkeypatch.setattr(row_sums, "BATCH_ATOMS", 8)
    given = {"generator": iter(TRAIN), "two calls": TRAIN[:2], "batches": TRAIN}[way]
    other = conditioned(structures=given, rows=rows)
    if way == "two calls":
        other.condition(iter(TRAIN[2:]), rows=rows)
        rescaled(other)
    torch.testing.assert_close(gram_of(other), gram_of(at_once), **EXACT)
    one, two = (predict(p, FAR, samples=4) for p in (at_once, other))
    np.testing.assert_allclose(two.energy_std, one.energy_std, rtol=1e-10)
    np.testing.assert_allclose(two.forces_std, one.forces_std, rtol=1e-8)
    assert other.posterior.structures == at_once.posterior.structures == len(TRAIN)
    assert other.posterior.domain.numbers == at_once.posterior.domain.numbers == {1, 6, 7, 8}


def test_structures_are_read_as_they_are_needed(monkeypatch):
    monkeypatch.setattr(row_sums, "BATCH_ATOMS", 8)
    added, at_the_time = [], []
    plain = Evidence.add
    monkeypatch.setattr(Evidence, "add", lambda *given: (added.append(1), plain(*given))[1])

    def stream():
        for atoms in TRAIN:
            at_the_time.append(len(added))
            yield atoms

    small("painn").condition(stream(), valid=VALID)
    first, second, third, fourth, fifth = at_the_time  # 4, 6, 3, 4, 6 atoms
    assert first == second == 0
    assert 0 < third < fourth == fifth < len(added)


def test_without_validation_structures_the_scale_stays():
    potential = conditioned(structures=TRAIN[:2])
    before = potential.posterior.scale
    assert potential.condition(TRAIN[2:]).scale == before
    assert potential.condition(TRAIN[2:], valid=VALID).scale != before


def test_a_call_that_fails_leaves_the_posterior_as_it_was():
    potential = conditioned()
    before, gram = potential.posterior, gram_of(potential).clone()
    with pytest.raises(InputError):
        potential.condition(FAR, valid=[])
    assert potential.posterior is before
    assert torch.equal(gram_of(potential), gram)


def test_a_second_call_leaves_the_first_posterior_as_it_was():
    potential = conditioned()
    before = potential.posterior
    gram = before.evidence.gram().clone()
    potential.condition(FAR)
    assert torch.equal(before.evidence.gram(), gram)
    assert before.structures == len(TRAIN)


@pytest.mark.parametrize("rows", [48, 3])
@pytest.mark.parametrize("maps", ["readout", "all"])
def test_a_further_structure_never_raises_a_variance(maps: str, rows: int):
    potential = small("painn")
    options = {"maps": maps, "dimension": 64, "rows": rows}
    potential.condition(TRAIN[:1], valid=VALID[:1], **options)
    rescaled(potential)
    wanted = torch.cat([all_rows(potential, atoms) for atoms in (FAR[0], FAR[2], TRAIN[2])])
    before = potential.posterior.gaussian.var(wanted)
    for atoms in (*TRAIN[1:3], FAR[0]):
        after = potential.condition([atoms], **options).gaussian.var(wanted)
        assert (after <= before + 1e-12 * before.max()).all()
        assert after.sum() < before.sum()
        before = after


# ---- symmetries ----


def moved(atoms: Atoms, how: str) -> tuple[Atoms, np.ndarray, np.ndarray]:
    """The structure, the rotation of row vectors, and the place of each new atom in the old."""
    other, turn, order = atoms.copy(), np.eye(3), np.arange(len(atoms))
    if how == "rotation":
        turn = rotation_matrix(1).T
        other.set_cell(atoms.cell.array @ turn)
        other.positions = atoms.positions @ turn
    elif how == "reflection":
        turn = np.diag([1.0, 1.0, -1.0])
        other.set_cell(atoms.cell.array @ turn)
        other.positions = atoms.positions @ turn
    elif how == "translation":
        other.positions += [0.3, -1.2, 5.0]
    else:
        order = np.random.default_rng(0).permutation(len(atoms))
        other = atoms[order]
    return other, turn, order


MOVES = pytest.mark.parametrize("how", ["rotation", "reflection", "translation", "permutation"])


@MOVES
@pytest.mark.parametrize("structure", [FAR[1], quartz(0.1)], ids=["molecule", "crystal"])
def test_deviations_move_with_the_structure(potential, structure: Atoms, how: str):
    other, turn, order = moved(structure, how)
    options = {"samples": 5, "covariance": True}
    if how == "reflection" and structure.pbc.any():
        options["stress"] = True
    with pytest.warns(UserWarning, match="no Si") if structure.pbc.any() else nullcontext():
        here, there = (predict(potential, atoms, **options) for atoms in (structure, other))
    np.testing.assert_allclose(there.energy_std, here.energy_std, **EXACT)
    np.testing.assert_allclose(there.energies_std, here.energies_std[order], **EXACT)
    cov = turn.T @ here.forces_cov[order] @ turn
    np.testing.assert_allclose(there.forces_cov, cov, rtol=1e-10, atol=1e-10 * cov.max())
    np.testing.assert_allclose(there.forces, here.forces[order] @ turn, rtol=0.0, atol=1e-10)


@MOVES
def test_members_move_with_the_structure(potential, how: str):
    structure = quartz(0.1)
    other, turn, order = moved(structure, how)
    for member in potential.draw(2):
        here, there = (
            member(potential.backbone.graph(atoms), stress=True) for atoms in (structure, other)
        )
        here, there = ({k: v.numpy() for k, v in one.items()} for one in (here, there))
        np.testing.assert_allclose(there["energy"], here["energy"], **EXACT)
        np.testing.assert_allclose(there["forces"], here["forces"][order] @ turn, **EXACT)
        np.testing.assert_allclose(there["stress"], turn.T @ here["stress"] @ turn, **EXACT)


# ---- members ----


def energy_of(member, potential, atoms: Atoms) -> float:
    return float(member(potential.backbone.graph(atoms), forces=False)[keys.ENERGY])


def test_forces_of_members_are_slopes_of_their_energies(potential):
    for member in potential.draw(2):
        found = member(potential.backbone.graph(FAR[0]))[keys.FORCES]
        expected = np.zeros((len(FAR[0]), 3))
        for i, c in np.ndindex(*expected.shape):
            ends = []
            for step in (1e-4, -1e-4):
                atoms = FAR[0].copy()
                atoms.positions[i, c] += step
                ends.append(energy_of(member, potential, atoms))
            expected[i, c] = -(ends[0] - ends[1]) / 2e-4
        plain = potential(potential.backbone.graph(FAR[0]))[keys.FORCES]
        assert (found - plain).abs().max() > 1e-5
        np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-6 * np.abs(expected).max())


def test_the_stress_of_members_is_the_slope_of_their_energies(potential):
    structure = boxed_ammonia()
    for member in potential.draw(2):
        found = member(potential.backbone.graph(structure), stress=True)[keys.STRESS][0]
        expected = np.zeros((3, 3))
        for a, b in itertools.product(range(3), repeat=2):
            ends = []
            for step in (1e-4, -1e-4):
                strain = np.zeros((3, 3))
                strain[a, b] += step / 2
                strain[b, a] += step / 2
                atoms = structure.copy()
                atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
                ends.append(energy_of(member, potential, atoms))
            expected[a, b] = (ends[0] - ends[1]) / 2e-4 / structure.get_volume()
        np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-6 * np.abs(expected).max())


def with_coefficients(maps: str) -> blips.BayesianPotential:
    potential = with_wide_coefficients(small("painn"))
    potential.condition(FAR[:1], valid=VALID, coefficients="network", maps=maps, dimension=64)
    rescaled(potential)
    coefficients = potential.coefficients(potential.backbone.graph(FAR[0]))
    values = [coefficients[name] for name in potential.posterior.maps.roles]
    assert min(float(value.std() / value.mean()) for value in values) > 0.01
    return potential


def slopes_by_weights(potential, v: Tensor) -> dict[str, Tensor]:
    """Of theta + sqrt(coef) |theta| (P v) with the inference network's coefficients."""
    graph, maps = potential.backbone.graph(FAR[0]), potential.posterior.maps
    ends = [with_frozen_noise(potential, maps, graph, v, t, network=True) for t in (1e-5, -1e-5)]
    return central(*ends, 1e-5)


MAPS = pytest.mark.parametrize("maps", ["readout", "all"])


@MAPS
def test_forces_of_members_with_coefficients_are_slopes_of_their_energies(maps: str):
    test_forces_of_members_are_slopes_of_their_energies(with_coefficients(maps))


@MAPS
@pytest.mark.parametrize("quantity", [keys.ENERGY, keys.FORCES])
def test_members_with_coefficients_are_slopes_by_weights(maps: str, quantity: str):
    potential = with_coefficients(maps)
    (member,) = potential.draw(1)
    graph = potential.backbone.graph(FAR[0])
    found = (member(graph)[quantity] - potential(graph)[quantity]).numpy()
    expected = slopes_by_weights(potential, member.noise)[quantity].numpy()
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-6 * np.abs(expected).max())


@MAPS
def test_rows_with_coefficients_are_slopes_by_weights(maps: str):
    """v^T G v is the sum of the squares of all slopes along v."""
    potential = with_coefficients(maps)
    v = normal(potential.posterior.maps.sketch.size)
    slopes = slopes_by_weights(potential, v)
    expected = slopes[keys.ENERGY].square().sum() + slopes[keys.FORCES].square().sum()
    assert float(v @ gram_of(potential) @ v) == pytest.approx(float(expected), rel=1e-6)


def test_members_are_linear_in_their_noise(painn):
    graph = painn.backbone.graph(periodic())
    v = normal(2, painn.posterior.maps.sketch.size)
    plain = painn(graph, stress=True)
    members = [
        Member(painn, noise)(graph, stress=True) for noise in (v[0], v[1], 300.0 * v[0] - v[1])
    ]
    for name, value in plain.items():
        one, other, both = (member[name] - value for member in members)
        torch.testing.assert_close(both, 300.0 * one - other, rtol=1e-9, atol=1e-9)


def test_members_without_noise_are_the_plain_model(painn):
    graph = painn.backbone.graph(FAR)
    nothing = torch.zeros(painn.posterior.maps.sketch.size).double()
    found = Member(painn, nothing)(graph)
    for name, value in painn(graph).items():
        assert torch.equal(found[name], value)


def test_a_member_is_a_function_of_seed_and_number(painn):
    graph = painn.backbone.graph(FAR)
    energies = [member(graph)[keys.ENERGY] for member in painn.draw(3)]
    assert torch.equal(painn.member(1)(graph)[keys.ENERGY], energies[1])
    assert torch.equal(painn.draw(2)[1](graph)[keys.ENERGY], energies[1])
    again = conditioned()
    torch.testing.assert_close(again.member(2)(graph)[keys.ENERGY], energies[2], **EXACT)
    others = [painn.member(1, seed=1)(graph)[keys.ENERGY], energies[0], energies[2]]
    assert all((other - energies[1]).abs().min() > 1e-6 for other in others)


def test_members_predict(painn):
    (member,) = painn.draw(1)
    prediction = member.predict(FAR)
    outputs = member(painn.backbone.graph(FAR))
    np.testing.assert_array_equal(prediction.energy, outputs[keys.ENERGY])
    np.testing.assert_array_equal(prediction.forces, outputs[keys.FORCES])
    assert prediction.forces_std is None


def test_deviations_are_those_of_the_members(painn):
    """From the plain model, with K in the denominator; energies by the exact form."""
    graph = painn.backbone.graph(FAR)
    members = [member(graph) for member in painn.draw(4, seed=5)]
    prediction = predict(painn, FAR, samples=4, seed=5, covariance=True)
    off = torch.stack([one[keys.FORCES] for one in members]) - painn(graph)[keys.FORCES]
    np.testing.assert_allclose(prediction.forces_std, off.square().mean(0).sqrt(), rtol=1e-8)
    cov = torch.einsum("kna,knb->nab", off, off) / 4
    np.testing.assert_allclose(prediction.forces_cov, cov, rtol=1e-7, atol=1e-12)
    of_atoms = torch.stack([one[keys.ENERGIES] for one in members]) - painn(graph)[keys.ENERGIES]
    expected = FACTOR * of_atoms.square().mean(0).sqrt()
    np.testing.assert_allclose(prediction.energies_std, expected, rtol=1e-8)


def test_the_paper_s_members_can_still_be_drawn(painn):
    graph = painn.backbone.graph(FAR)
    plain = small("painn")
    expected = plain.member(0)(graph)[keys.ENERGY]
    assert torch.equal(painn.member(0, method="frozen")(graph)[keys.ENERGY], expected)


def test_members_cannot_be_trained(painn):
    with pytest.raises(InputError, match="cannot be trained"):
        painn.member(0)(painn.backbone.graph(FAR), create_graph=True)


# ---- the means are the plain model's ----

BITWISE = ["painn", "schnet", "chgnet", "sevennet", "orb", "orb-direct"]


@pytest.mark.parametrize("maps", ["readout", "all"])
@pytest.mark.parametrize("name", BITWISE)
def test_means_are_bitwise_those_of_map(name: str, maps: str):
    if (name, maps) == ("chgnet", "all"):
        maps = "model.*twoBody*"  # others of its maps are changed in place
    potential = small(name, torch.float32)
    weights = copy.deepcopy(potential.state_dict())
    structures = [quartz(0.1, seed=3), boxed_ammonia(1)]
    for _ in range(3):  # ORB compiles itself in its first runs, and differs before
        before = potential.predict(structures, method="map")
    potential.condition(periodic(), valid=labelled(periodic()), maps=maps, dimension=64, rows=4)
    after = potential.predict(structures, method="map")
    found = predict(potential, structures, samples=2)
    for quantity in ("energy", "energies", "forces"):
        if before.energies is not None or quantity != "energies":
            np.testing.assert_array_equal(getattr(after, quantity), getattr(before, quantity))
            np.testing.assert_array_equal(getattr(found, quantity), getattr(before, quantity))
    assert all(torch.equal(v, weights[k]) for k, v in potential.state_dict().items())


@pytest.mark.parametrize("maps", ["readout", "all"])
def test_means_of_a_wide_painn_are_bitwise_those_of_map(maps: str):
    torch.manual_seed(0)
    potential = blips.bayesianize(PaiNN(cutoff=4.0, features=64, blocks=2))
    potential.condition(TRAIN, valid=VALID, maps=maps, dimension=64, rows=4)
    structures = [quartz(0.1), *TRAIN]
    plain = potential.predict(structures, method="map")
    with pytest.warns(UserWarning, match="no Si"):
        found = predict(potential, structures, samples=2)
    for quantity in ("energy", "energies", "forces"):
        np.testing.assert_array_equal(getattr(found, quantity), getattr(plain, quantity))


@pytest.mark.parametrize("name", BITWISE)
def test_the_stress_is_bitwise_that_of_map(name: str):
    potential = small(name, torch.float32)
    potential.condition(periodic(), valid=labelled(periodic()), rows=4)
    structures = [quartz(0.1, seed=seed) for seed in range(3, 7)]
    plain = potential.predict(structures, method="map", stress=True)
    found = predict(potential, structures, samples=2, stress=True)
    np.testing.assert_array_equal(found.stress, plain.stress)


def silicon(seed: int) -> Atoms:
    atoms = bulk("Si")
    atoms.rattle(0.1, seed=seed)
    return atoms


@pytest.mark.parametrize("name", ["chgnet", "sevennet-0"])
def test_means_of_released_models_are_bitwise_those_of_map(name: str):
    small(name.removesuffix("-0"))  # skips where the package is not there
    potential = blips.bayesianize(blips.backbones.load(name))
    potential.condition([silicon(0)], valid=labelled([silicon(1)]), dimension=32, rows=2)
    structure = silicon(2)
    plain = potential.predict(structure, method="map")
    found = predict(potential, structure, samples=2)
    for quantity in ("energy", "energies", "forces"):
        np.testing.assert_array_equal(getattr(found, quantity), getattr(plain, quantity))
    assert (found.forces_std > 0).all()


# ---- deviations, never nothing ----


def extremes() -> list[Atoms]:
    """A crystal without forces, an atom, a close pair, a far pair, a rattled molecule."""
    return [
        bulk("C", "diamond", a=3.6),
        Atoms("H"),
        Atoms("O2", [[0, 0, 0], [0, 0, 0.4]]),
        Atoms("N2", [[0, 0, 0], [0, 0, 9.0]]),
        FAR[0],
    ]


@pytest.mark.parametrize("scale", ["fitted", "given"])
@OWN
def test_total_deviations_are_positive_everywhere(name: str, scale: str):
    potential = small(name)
    potential.condition(TRAIN, valid=VALID)
    if scale == "given":
        rescaled(potential, relative_ratio=1e-10)
    for prediction in (
        predict(potential, extremes(), samples=2),
        predict(potential, TRAIN, samples=2),  # seen already
    ):
        for quantity in ("energy", "forces"):
            total = getattr(prediction, f"{quantity}_total_std")
            assert np.isfinite(total).all()
            assert (total > 0).all()


def test_forces_have_a_floor_where_only_energies_are_labelled():
    potential = small("painn")
    potential.condition(TRAIN, valid=labelled(FAR, forces=False))
    assert (predict(potential, extremes(), samples=2).forces_total_std > 0).all()


def test_forces_that_vanish_have_the_floor(potential):
    crystal = predict(potential, bulk("C", "diamond", a=3.6), samples=8)
    np.testing.assert_allclose(crystal.forces, 0.0, atol=1e-10)
    np.testing.assert_allclose(crystal.forces_std, 0.0, atol=1e-10)
    np.testing.assert_allclose(crystal.forces_total_std, FLOOR[keys.FORCES], rtol=1e-12)


def test_floors_are_the_aleatoric_part(potential):
    prediction = predict(potential, FAR, samples=4)
    np.testing.assert_array_equal(prediction.forces_aleatoric_std, FLOOR[keys.FORCES])
    atoms = np.array([len(one) for one in FAR])
    np.testing.assert_allclose(prediction.energy_aleatoric_std, FLOOR[keys.ENERGY] * atoms)
    for quantity in ("energy", "forces"):
        parts = [getattr(prediction, f"{quantity}{part}_std") for part in ("", "_aleatoric")]
        total = np.sqrt(parts[0] ** 2 + parts[1] ** 2)
        np.testing.assert_allclose(getattr(prediction, f"{quantity}_total_std"), total)


def test_floors_and_factor_leave_the_epistemic_part_of_forces(painn):
    plain = copy.deepcopy(painn)
    scale = replace(painn.posterior.scale, floor={}, energy_factor=1.0)
    plain.posterior = replace(painn.posterior, scale=scale)
    here, there = (predict(p, FAR, samples=3) for p in (painn, plain))
    np.testing.assert_allclose(here.forces_std, there.forces_std, rtol=1e-12)
    np.testing.assert_allclose(here.energy_std, FACTOR * there.energy_std, rtol=1e-12)
    np.testing.assert_allclose(here.energies_std, FACTOR * there.energies_std, rtol=1e-12)
    assert there.forces_aleatoric_std is None


def test_energies_alone_have_the_same_deviations(painn):
    both, alone = (predict(painn, FAR, samples=4, forces=forces) for forces in (True, False))
    np.testing.assert_allclose(alone.energy_std, both.energy_std, rtol=1e-12)
    assert alone.forces is None
    assert (alone.energies_std > 0).all()


def test_one_pass_has_the_deviations_of_energies(painn):
    one = painn.predict(FAR, method="onepass")
    full = predict(painn, FAR, samples=64)
    # 64 draws for the energy, where `full` is exact: five standard errors of 1 / sqrt(128)
    np.testing.assert_allclose(one.energy_std, full.energy_std, rtol=5 / np.sqrt(128))
    np.testing.assert_allclose(one.energies_std, full.energies_std, rtol=1e-9)
    np.testing.assert_array_equal(one.forces, full.forces)
    assert one.forces_std is None


def test_batches_do_not_matter(painn):
    many, one = (predict(painn, FAR, samples=3, batch_size=size) for size in (8, 1))
    for quantity in ("energy_std", "energies_std", "forces_std", "forces_aleatoric_std"):
        np.testing.assert_allclose(getattr(many, quantity), getattr(one, quantity), rtol=1e-9)


def test_predictions_work_where_gradients_are_off(painn):
    expected = predict(painn, FAR, samples=2).forces_std
    with torch.no_grad():
        found = predict(painn, FAR, samples=2).forces_std
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("maps", ["readout", "all"])
def test_weights_need_not_be_trainable(maps: str):
    plain, frozen = small("painn"), small("painn").requires_grad_(False)
    for potential in (plain, frozen):
        potential.condition(TRAIN, valid=VALID, maps=maps, dimension=64)
    torch.testing.assert_close(gram_of(frozen), gram_of(plain), **EXACT)


@pytest.mark.parametrize("maps", ["readout", "all"])
def test_single_precision_gives_the_same_to_its_digits(maps: str):
    """It has compiled messages, which cannot be differentiated twice."""
    double, single = small("painn"), small("painn", torch.float32)
    double.condition(TRAIN, valid=VALID, maps=maps, dimension=64)
    rescaled(double)
    single.posterior = double.posterior
    one, other = (predict(p, FAR, samples=4) for p in (double, single))
    np.testing.assert_allclose(other.energy_std, one.energy_std, rtol=1e-3)
    np.testing.assert_allclose(other.forces_std, one.forces_std, rtol=1e-3)
    single.posterior = None
    single.condition(TRAIN, valid=VALID, maps=maps, dimension=64)
    gram = gram_of(double)
    torch.testing.assert_close(gram_of(single), gram, rtol=0.0, atol=1e-5 * float(gram.max()))


# ---- elements that were not seen ----


def test_an_unknown_element_has_the_deviation_of_the_prior(potential):
    unknown = molecule("SiH4")
    with pytest.warns(UserWarning, match="have no Si"):
        prediction = predict(potential, [FAR[0], unknown, FAR[1]], samples=4)
    rows = all_rows(potential, unknown)
    expected = FACTOR * TAU * float(rows[0].norm())
    assert prediction.energy_std[1] == pytest.approx(expected, rel=1e-12)
    known = predict(potential, [FAR[0], FAR[1]], samples=4)
    np.testing.assert_allclose(prediction.energy_std[[0, 2]], known.energy_std, rtol=1e-9)
    np.testing.assert_allclose(prediction[0].forces_std, known[0].forces_std, rtol=1e-9)
    v = potential.posterior.prior_draws(4)
    of_prior = (v @ rows[1:].T).square().mean(0).sqrt().view(-1, 3)
    np.testing.assert_allclose(prediction[1].forces_std, of_prior, rtol=1e-8, atol=1e-15)


def test_an_unknown_element_without_forces(painn):
    with pytest.warns(UserWarning, match="have no Si"):
        alone = predict(painn, molecule("SiH4"), samples=4, forces=False)
    with pytest.warns(UserWarning, match="have no Si"):
        both = predict(painn, molecule("SiH4"), samples=4)
    np.testing.assert_allclose(alone.energy_std, both.energy_std, rtol=1e-12)


@pytest.mark.parametrize("kept", ["evidence", "draws"])
def test_an_unknown_element_in_one_pass(painn, kept: str):
    potential = copy.deepcopy(painn)
    if kept == "draws":
        potential.posterior = painn.posterior.only_draws(64)
    with pytest.warns(UserWarning, match="have no Si"):
        one = potential.predict(molecule("SiH4"), method="onepass")
    with pytest.warns(UserWarning, match="have no Si"):
        full = predict(potential, molecule("SiH4"), samples=64)
    np.testing.assert_allclose(one.energy_std, full.energy_std, rtol=5 / np.sqrt(128))
    np.testing.assert_allclose(one.energies_std, full.energies_std, rtol=1e-9)


def test_an_element_is_known_once_it_was_seen():
    potential = conditioned()
    with pytest.warns(UserWarning, match="have no Si"):
        before = predict(potential, molecule("SiH4"), samples=2)
    potential.condition([molecule("SiH4")])
    assert predict(potential, molecule("SiH4"), samples=2).energy_std < before.energy_std


# ---- the scale ----


def labelled_by_draws(potential, structures: list[Atoms], seed: int) -> list[Atoms]:
    """Each has the labels of a member of its own, and the noise of the floors."""
    rng = np.random.default_rng(seed)
    for k, atoms in enumerate(structures):
        outputs = potential.member(0, seed=1000 * seed + k)(potential.backbone.graph(atoms))
        plain = potential(potential.backbone.graph(atoms))[keys.ENERGY]
        energy = float(plain + FACTOR * (outputs[keys.ENERGY] - plain))
        energy += FLOOR[keys.ENERGY] * len(atoms) * rng.normal()
        noise = FLOOR[keys.FORCES] * rng.normal(size=(len(atoms), 3))
        forces = outputs[keys.FORCES].numpy() + noise
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    return structures


@pytest.mark.statistical
def test_labels_of_the_posterior_itself_have_the_errors_that_are_predicted():
    """40 structures to fit and 40 to test: root mean square of error / sigma within 25 %."""
    potential = conditioned()
    scale = replace(potential.posterior.scale, scale=30.0)
    potential.posterior = replace(potential.posterior, scale=scale)
    valid = labelled_by_draws(potential, rattled_molecules(40, 0.15, first=100), 1)
    test = labelled_by_draws(potential, rattled_molecules(40, 0.15, first=200), 2)
    potential.posterior = None
    fitted = potential.condition(TRAIN, valid=valid).scale
    prediction = predict(potential, test, samples=64)
    forces = np.concatenate([atoms.get_forces() for atoms in test])
    z = (forces - prediction.forces) / prediction.forces_total_std
    assert np.sqrt(np.mean(z**2)) == pytest.approx(1.0, rel=0.25)
    energy = np.array([atoms.get_potential_energy() for atoms in test])
    z = (energy - prediction.energy) / prediction.energy_total_std
    assert np.sqrt(np.mean(z**2)) == pytest.approx(1.0, rel=0.35)
    assert fitted.floor[keys.FORCES] == pytest.approx(FLOOR[keys.FORCES], rel=0.4)


def test_forces_that_vanish_by_symmetry_do_not_decide_the_scale():
    plain, crystals = small("painn"), []
    for k in range(4):
        crystal = bulk("Si", a=5.3 + 0.05 * k)
        energy = float(plain.predict(crystal, method="map").energy[0])
        crystal.calc = SinglePointCalculator(crystal, energy=energy, forces=np.zeros((2, 3)))
        crystals.append(crystal)
    train, valid = [*morse_ammonia(6, 0), bulk("Si")], morse_ammonia(4, 1)
    expected = small("painn").condition(train, valid=valid).scale
    found = small("painn").condition(train, valid=[*valid, *crystals]).scale
    assert found.floor[keys.FORCES] == pytest.approx(expected.floor[keys.FORCES], rel=0.05)
    assert found.scale == pytest.approx(expected.scale, rel=0.5)


def test_labels_can_have_other_names_and_units():
    other = []
    for atoms in VALID:
        one = atoms.copy()
        one.info["e"] = 1000 * atoms.get_potential_energy()
        one.arrays["f"] = 1000 * atoms.get_forces()
        other.append(one)
    labels = blips.data.labels.Labels(energy_key="e", forces_key="f", energy_unit="meV")
    found = small("painn").condition(TRAIN, valid=other, labels=labels).scale
    expected = small("painn").condition(TRAIN, valid=VALID).scale
    assert found.scale == pytest.approx(expected.scale, rel=1e-6)
    assert found.floor == pytest.approx(expected.floor, rel=1e-6)


def test_energies_alone_are_enough_for_a_scale():
    energies = labelled(rattled_molecules(4, 0.1, first=20), forces=False)
    scale = small("painn").condition(TRAIN, valid=energies).scale
    assert set(scale.floor) == {keys.ENERGY, keys.FORCES}
    assert scale.scale > 0


# ---- draws alone ----


def test_draws_alone_are_enough_for_predictions(painn):
    small_copy = copy.deepcopy(painn)
    small_copy.posterior = painn.posterior.only_draws(8)
    one, other = (predict(p, FAR, samples=8) for p in (painn, small_copy))
    np.testing.assert_allclose(other.forces_std, one.forces_std, rtol=1e-5)
    members = predict(painn, FAR, samples=8)
    of_draws = small_copy.posterior.draws(8) @ torch.stack([all_rows(painn, a)[0] for a in FAR]).T
    expected = FACTOR * of_draws.square().mean(0).sqrt()
    np.testing.assert_allclose(other.energy_std, expected, rtol=1e-6)
    np.testing.assert_array_equal(other.energy, members.energy)


def test_draws_alone_are_restored_from_what_a_file_keeps(painn):
    posterior = painn.posterior.only_draws(8)
    again = ConditionedPosterior.from_dict(posterior.to_dict(), posterior.tensors())
    assert torch.equal(again.draws(8), posterior.draws(8))
    assert again.to_dict() == posterior.to_dict()


def test_draws_alone_are_no_more_than_they_are(painn):
    small_copy = copy.deepcopy(painn)
    small_copy.posterior = painn.posterior.only_draws(4)
    with pytest.raises(InputError, match="at most 4 samples"):
        predict(small_copy, FAR, samples=5)
    with pytest.raises(InputError, match="nothing can be added"):
        small_copy.condition(FAR)


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_draws_of_another_size_are_refused(painn, shape):
    posterior = painn.posterior.only_draws(4)
    with pytest.raises(CheckpointError, match="do not fit"):
        ConditionedPosterior.from_dict(posterior.to_dict(), {"draws": torch.zeros(shape)})


def test_draws_alone_have_other_seeds(painn):
    """Orthonormal mixtures: other draws, with the covariance of those that were kept."""
    posterior = painn.posterior.only_draws(4)
    kept, mixed = posterior.draws(4), posterior.draws(4, seed=1)
    assert torch.equal(kept, posterior.kept_draws.double())
    assert not torch.allclose(mixed, kept)
    torch.testing.assert_close(mixed.T @ mixed, kept.T @ kept, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(posterior.draws(2, seed=1), mixed[:2], **EXACT)


# ---- errors ----


def unlabelled() -> list[Atoms]:
    return [atoms.copy() for atoms in VALID]


@pytest.mark.parametrize(
    ("structures", "options", "message"),
    [
        (TRAIN, {"valid": []}, "list of validation structures is empty"),
        (TRAIN, {"valid": unlabelled()}, "neither energies nor forces"),
        (TRAIN, {}, r"needs valid=\.\.\."),
        ([], {"valid": VALID}, "no structures to condition on"),
        (iter([]), {"valid": VALID}, "no structures to condition on"),
        (TRAIN, {"valid": VALID, "maps": "nothing*"}, r"no map matches nothing\*"),
        (TRAIN, {"valid": VALID, "dimension": 0}, "positive dimension"),
        (TRAIN, {"valid": VALID, "coefficients": "unknown"}, "coefficients"),
    ],
)
def test_what_cannot_be_conditioned_says_why(structures, options: dict, message: str):
    potential = small("painn")
    with pytest.raises(InputError, match=message):
        potential.condition(structures, **options)
    assert potential.posterior is None


@pytest.mark.parametrize(
    "changes",
    [{"maps": "all"}, {"maps": "readout.0"}, {"seed": 1}, {"dimension": 7}],
    ids=str,
)
def test_a_second_call_with_other_coordinates_is_refused(painn, changes: dict):
    with pytest.raises(InputError, match=r"conditioned already.*posterior = None"):
        painn.condition(FAR, **changes)


def test_a_second_call_with_other_coefficients_is_refused(painn):
    with pytest.raises(InputError, match="conditioned already"):
        painn.condition(FAR, coefficients="network")


def test_a_dimension_beyond_memory_names_one_that_fits(monkeypatch):
    monkeypatch.setattr(row_sums, "available_bytes", lambda: 4e4)
    with pytest.raises(TooLargeError, match="use dimension=35 or less"):
        small("painn").condition(TRAIN, valid=VALID)  # 36 weights
    potential = small("painn")
    potential.condition(TRAIN, valid=VALID, dimension=35)
    assert potential.posterior.maps.sketch.size == 35


def test_particle_models_are_no_potentials():
    torch.manual_seed(0)
    with pytest.raises(InputError, match="EGNN is no potential"):
        blips.bayesianize(EGNN(hidden=8, layers=1)).condition(TRAIN, valid=VALID)


@pytest.mark.parametrize("samples", [-1, 1])
def test_one_draw_has_no_deviation(painn, samples: int):
    with pytest.raises(InputError, match=f"samples={samples}.*at least 2 draws"):
        predict(painn, FAR, samples=samples)


def test_without_posterior_there_is_no_conditioned_prediction():
    potential = small("painn")
    for call in (lambda: predict(potential, FAR), lambda: potential.draw(1, method="conditioned")):
        with pytest.raises(InputError, match="not conditioned on data"):
            call()


def test_a_direct_model_without_stress_says_so():
    def outputs(model, graph):
        forces = model(graph.vectors()) / graph.num_edges
        forces = torch.zeros_like(graph.positions).index_add(0, graph.edge_index[0], forces)
        energy = graph.sum_over_structures(forces.square().sum(1))
        return {keys.ENERGY: energy, keys.FORCES: forces}

    torch.manual_seed(0)
    direct = blips.bayesianize(Adapter(torch.nn.Linear(3, 3).double(), outputs, 3.0))
    direct.condition(TRAIN, valid=VALID, maps="all")
    assert (predict(direct, FAR, samples=2).forces_std > 0).all()
    with pytest.raises(InputError, match="no stress"):
        predict(direct, quartz(), samples=2, stress=True)


def test_overlapping_atoms_say_so():
    overlapping = Atoms("H2", [[0, 0, 0], [0, 0, 1e-200]])
    with pytest.raises(InputError):
        small("painn").condition([overlapping], valid=VALID)


def test_a_relative_misfit_is_part_of_the_aleatoric_std(painn):
    graph = painn.backbone.graph(TRAIN[0])
    posterior = painn.posterior
    before = painn.predict(graph)
    painn.posterior = replace(posterior, scale=replace(posterior.scale, relative=0.3))
    try:
        found = painn.predict(graph)
    finally:
        painn.posterior = posterior
    np.testing.assert_array_equal(found.forces_std, before.forces_std)
    floor = posterior.scale.floor["forces"]
    expected = np.sqrt(floor**2 + (0.3 * found.forces) ** 2)
    np.testing.assert_allclose(found.forces_aleatoric_std, expected, rtol=1e-12)
    kept = replace(posterior, scale=replace(posterior.scale, relative=0.3))
    again = ConditionedPosterior.from_dict(kept.to_dict(), kept.tensors())
    assert again.scale == kept.scale


def test_atoms_outside_of_the_domain_have_the_typical_force_as_misfit(painn):
    structures = [TRAIN[0], TRAIN[0].copy()]
    structures[1].positions[-1] += 10.0  # its last atom has no neighbour
    posterior = painn.posterior
    scale = replace(posterior.scale, relative=0.3, typical=0.5)
    painn.posterior = replace(posterior, scale=scale)
    try:
        inside, outside = painn.predict(structures)
    finally:
        painn.posterior = posterior
    assert inside.in_domain.all()
    assert outside.in_domain.tolist() == [True] * (len(TRAIN[0]) - 1) + [False]
    for found, typical in ((inside, 0.0), (outside, 0.5 * ~outside.in_domain[:, None])):
        expected = scale.floor["forces"] ** 2 + (0.3 * found.forces) ** 2 + typical**2
        np.testing.assert_allclose(found.forces_aleatoric_std**2, expected, rtol=1e-12)
    kept = replace(posterior, scale=scale)
    assert ConditionedPosterior.from_dict(kept.to_dict(), kept.tensors()).scale == scale


def test_weight_noise_is_made_once_for_all_numbers_of_draws(painn):
    posterior = replace(painn.posterior)
    many = posterior.weight_noise(16, 0, torch.float64)
    few = posterior.weight_noise(4, 0, torch.float64)
    expected = posterior.maps.sketch.gather_all(posterior.draws(4, 0))
    for name, value in few.items():
        assert value.data_ptr() == many[name].data_ptr()
        torch.testing.assert_close(value, expected[name], **EXACT)
    other = posterior.weight_noise(4, 1, torch.float64)
    assert not any(torch.equal(other[name], value) for name, value in few.items())
