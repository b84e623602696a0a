"""The backbone contract as importable checks: run them on your own model.

    from blips import testing
    testing.check_contract(my_backbone)

An `AtomisticBackbone` is checked as a copy in double precision. A check that fails raises
AssertionError and says by how much. Lengths in A, energies in eV.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress
from torch import Tensor

from blips import keys
from blips.backbones.base import AtomisticBackbone, Backbone
from blips.backbones.derivatives import energy_and_derivatives
from blips.backbones.generic import Adapter
from blips.bayes.convert import first_match, matches, probe_roles
from blips.bayes.linear import kind_of
from blips.data.graph import Graph

SYMMETRIES = ("rotation", "reflection", "translation", "permutation")


def random_structure(
    seed: int, periodic: bool = True, elements: Sequence[str] = ("N", "H", "Si")
) -> Atoms:
    """Make eight atoms on a shaken grid, more than 1.2 A apart; in a small skewed cell or free."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[[0.25, 0.75]] * 3), axis=-1).reshape(-1, 3)
    cell = 4.4 * np.eye(3) + rng.uniform(-0.2, 0.2, (3, 3))
    positions = grid @ cell + rng.uniform(-0.15, 0.15, grid.shape)
    symbols = rng.choice(elements, len(grid))
    return Atoms(symbols, positions, cell=cell if periodic else None, pbc=periodic)


def check_contract(
    model: AtomisticBackbone,
    structures: Sequence[Atoms] | None = None,
    *,
    equivariant: bool = True,
) -> None:
    """Run every check on a backbone, evaluated on graphs of its own making.

    The structures are by default two periodic ones and a molecule. Direct forces are not compared
    with the energy's derivatives; a model that is not `equivariant` is not turned and mirrored.
    """
    if structures is None:
        structures = [random_structure(0), random_structure(1), random_structure(2, periodic=False)]
    for atoms in structures:
        for name in SYMMETRIES if equivariant else ("translation", "permutation"):
            check_symmetry(model, atoms, name)
        if model.conservative:
            check_forces(model, atoms)
        if model.conservative and atoms.pbc.all():
            check_stress(model, atoms)
        check_precision(model, atoms)
    check_batching(model, structures)
    elements = tuple(dict.fromkeys(symbol for atoms in structures for symbol in atoms.symbols))
    check_smoothness(model, elements)
    if model.conservative:
        check_second_derivatives(model, elements)
    check_declarations(model, model.graph(structures))


def check_symmetry(model: AtomisticBackbone, atoms: Atoms, name: str) -> None:
    """Check that results follow a structure that is turned, mirrored, moved or reordered.

    The name is one of `SYMMETRIES`; moved atoms are put back into the cell.
    """
    turn, shift, order = np.eye(3), np.zeros(3), np.arange(len(atoms))
    if name in ("rotation", "reflection"):
        turn = rotation_matrix() @ np.diag([1.0, 1.0, -1.0 if name == "reflection" else 1.0])
    elif name == "translation":
        shift += [3.1, -7.7, 12.3]
    else:
        order = np.random.default_rng(0).permutation(order)
    changed = atoms[order]
    changed.set_cell(atoms.cell.array @ turn.T)
    changed.positions = changed.positions @ turn.T + shift
    changed.wrap()
    expected, matrix = _evaluate(model, atoms), torch.as_tensor(turn)
    expected[keys.FORCES] = expected[keys.FORCES][order] @ matrix.T
    if keys.ENERGIES in expected:
        expected[keys.ENERGIES] = expected[keys.ENERGIES][order]
    if keys.STRESS in expected:
        expected[keys.STRESS] = matrix @ expected[keys.STRESS] @ matrix.T
    assert_all_close(_evaluate(model, changed), expected, 1e-8, name)


def check_batching(model: AtomisticBackbone, structures: Sequence[Atoms]) -> None:
    """Check that a batch gives what its structures give one by one."""
    alone = [_evaluate(model, [atoms]) for atoms in structures]
    together = _evaluate(model, structures)
    expected = {name: torch.cat([one[name] for one in alone]) for name in together}
    assert_all_close(together, expected, 1e-8, "batching")


def check_smoothness(model: AtomisticBackbone, elements: Sequence[str] = ("N", "H")) -> None:
    """Check that energies and forces do not jump when an atom crosses the cutoff of another.

    The atom is placed 1e-6 A inside and outside; a smooth model changes by about its curvature
    times that, which is to be far below 1e-4.
    """
    symbols = [elements[k % len(elements)] for k in range(3)]
    inside, outside = (
        _evaluate(model, Atoms(symbols, [[0, 0, 0], [-0.9, 0.5, 0], [model.cutoff + offset, 0, 0]]))
        for offset in (-1e-6, 1e-6)
    )
    assert_all_close(inside, outside, 1e-4, "smoothness at the cutoff")


def check_forces(
    model: AtomisticBackbone, atoms: Atoms, *, step: float = 1e-4, atol: float = 1e-5
) -> None:
    """Check forces against central differences of the energy, with new neighbour lists (A)."""
    expected = calculate_numerical_forces(_with_energy(model, atoms), step)
    forces = _evaluate(model, atoms)[keys.FORCES]
    assert_close(forces, torch.as_tensor(expected), atol, "forces against finite differences")


def check_stress(model: AtomisticBackbone, atoms: Atoms) -> None:
    """Check that stress is (1/V) dE/d(strain) by central differences of strained cells."""
    expected = calculate_numerical_stress(
        _with_energy(model, atoms), 1e-5, voigt=False, force_consistent=False
    )
    stress = _evaluate(model, atoms)[keys.STRESS][0]
    assert_close(stress, torch.as_tensor(expected), 1e-5, "stress against finite strain")


def check_precision(model: AtomisticBackbone, atoms: Atoms) -> None:
    """Check that single and double precision agree."""
    single = _evaluate(model, atoms, torch.float32)
    assert_all_close(single, _evaluate(model, atoms), 1e-3, "precision")


def check_second_derivatives(
    model: AtomisticBackbone, elements: Sequence[str] = ("N", "H")
) -> None:
    """Check that forces have finite derivatives, also where symmetry cancels them."""
    backbone = deepcopy(model).double()
    one, other = elements[0], elements[-1]
    edge = 0.45 * model.cutoff
    structures = {
        "a lone atom": Atoms([one]),
        "a linear molecule": Atoms([other, one, other], [[-1, 0, 0], [0, 0, 0], [1, 0, 0]]),
        "a CsCl crystal": Atoms(
            [one, other], [[0, 0, 0], [edge / 2] * 3], cell=[edge] * 3, pbc=True
        ),
    }
    for name, atoms in structures.items():
        graph = backbone.graph(atoms)
        positions = graph.positions.requires_grad_()
        energy = backbone(graph)[keys.ENERGIES].sum()
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        (curvature,) = torch.autograd.grad(slope[0, 0] + slope[-1, 2], positions)
        if not bool(torch.cat([slope, curvature]).isfinite().all()):
            raise AssertionError(f"forces of {name} or their derivatives are not finite")


def _with_energy(model: AtomisticBackbone, atoms: Atoms) -> Atoms:
    """Return a copy whose calculator has the model's energies, and nothing else."""
    backbone, copy = deepcopy(model).double(), atoms.copy()

    def energy(moved: Atoms) -> float:
        return backbone(backbone.graph(moved))[keys.ENERGIES].sum().item()

    copy.calc = SimpleNamespace(get_potential_energy=energy)
    return copy


def _evaluate(
    model: AtomisticBackbone,
    atoms: Atoms | Sequence[Atoms],
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Compute energy, energies, forces, and stress where every structure is periodic in 3D."""
    backbone = deepcopy(model).to(dtype)
    graph = backbone.graph(atoms)
    stress = bool(graph.pbc.all())
    if not model.conservative:
        outputs = backbone(graph)
        return {k: v.detach() for k, v in outputs.items() if stress or k != keys.STRESS}
    return energy_and_derivatives(lambda some: backbone(some)[keys.ENERGIES], graph, stress=stress)


# ------------------------------------------------- what a backbone says about itself
def check_declarations(backbone: Backbone, graph: Graph) -> None:
    """Check that roles, row features and hyperparameters describe the backbone on this graph."""
    check_roles(backbone, graph)
    check_row_features(backbone, graph)
    if not isinstance(backbone, Adapter):  # such a one is made of a module, not of numbers
        check_hyperparameters(backbone)


def check_roles(backbone: Backbone, graph: Graph) -> None:
    """Check that every role names existing maps, each with one row per edge or node."""
    maps = {name: m for name, m in backbone.named_modules() if kind_of(m) is not None}
    for pattern in backbone.roles:
        if not any(matches(name, pattern) for name in maps):
            raise AssertionError(f"roles: no linear map is called {pattern!r}")
    found, reasons = probe_roles(backbone, lambda: backbone(graph), backbone.row_counts(graph))
    for name in maps:
        role = first_match(name, backbone.roles)
        if role is not None and found.get(name) != role:
            seen = f"acts on {found[name]!r} rows" if name in found else reasons[name]
            raise AssertionError(f"roles: {name!r} is declared to act on {role!r} rows, but {seen}")


def check_row_features(backbone: Backbone, graph: Graph) -> None:
    """Check that row features have the declared sizes and, but for vectors, are invariant."""
    features, sizes = backbone.row_features(graph), backbone.feature_sizes
    rows = backbone.row_counts(graph)
    shapes: dict[str, tuple[int, ...]] = {keys.EDGE_WEIGHT: (rows[keys.EDGE],)}
    shapes |= {name: (rows[name], sizes[name]) for name in (keys.NODE, keys.EDGE) if name in sizes}
    if keys.NODE_TYPE in sizes:
        shapes[keys.NODE_TYPE] = (rows[keys.NODE],)
    for name, shape in shapes.items():
        if (found := tuple(features[name].shape)) != shape:
            raise AssertionError(f"row features {name!r} have shape {found}, declared are {shape}")
    if keys.NODE_TYPE in sizes and bool((features[keys.NODE_TYPE] >= sizes[keys.NODE_TYPE]).any()):
        raise AssertionError(f"node types must be labels below {sizes[keys.NODE_TYPE]}")
    turn = torch.as_tensor(rotation_matrix())
    turned = backbone.row_features(graph.turned(turn.to(graph.positions)))
    if (vectors := features.get(keys.EDGE_VECTOR)) is not None:
        features[keys.EDGE_VECTOR] = vectors @ turn.to(vectors).T
    assert_all_close(turned, features, 1e-4, "row features of a turned graph")


def check_hyperparameters(backbone: Backbone) -> None:
    """Check that the hyperparameters survive JSON and rebuild a model of equal parameters."""
    stored = json.loads(json.dumps(backbone.hyperparameters))
    rebuilt = type(backbone)(**stored)
    if rebuilt.hyperparameters != backbone.hyperparameters:
        raise AssertionError("hyperparameters change when the model is built from them")
    rebuilt.load_state_dict(backbone.state_dict())


# -------------------------------------------------------------------------------- comparison
def assert_close(actual: Tensor, expected: Tensor, atol: float, what: str) -> None:
    """Raise AssertionError unless |actual - expected| <= atol * max(1, |expected|) everywhere."""
    scale = max([1.0, *expected.detach().abs().flatten().tolist()])
    options: dict[str, Any] = {"rtol": 0.0, "atol": atol * scale, "check_dtype": False}
    torch.testing.assert_close(actual, expected, **options, msg=lambda text: f"{what}: {text}")


def assert_all_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float, what: str
) -> None:
    """Apply `assert_close` to every expected quantity, by name."""
    for name, value in expected.items():
        assert_close(actual[name], value, atol, f"{what} ({name})")


def rotation_matrix(seed: int = 0) -> np.ndarray:
    """Draw a random proper rotation Q, [3, 3]; row vectors turn as r @ Q.T."""
    orthogonal, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return orthogonal * np.sign(np.linalg.det(orthogonal))
