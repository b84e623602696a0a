"""Checks of models that give atomic energies, or energy and forces directly."""

from collections.abc import Sequence
from copy import deepcopy
from typing import TypeGuard

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from blips import keys
from blips.backbones.base import AtomisticBackbone
from blips.backbones.derivatives import EnergyFunction, energy_and_derivatives
from blips.data.graph import AtomGraph
from blips.testing.compare import assert_all_close, assert_close, gradient, rotation_matrix
from blips.testing.declarations import check_declarations

Model = AtomisticBackbone | EnergyFunction


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
    model: Model,
    structures: Sequence[Atoms] | None = None,
    *,
    cutoff: float | None = None,
    single: EnergyFunction | None = None,
    equivariant: bool = True,
) -> None:
    """Run every check on a model of atoms.

    A backbone is evaluated on graphs of its own making. Direct forces are not compared with the
    energy's derivatives.

    Args:
        model: a backbone, or a function from graphs to atomic energies.
        structures: to test on; by default two periodic ones and a molecule.
        cutoff: radius of the neighbour list (A); a backbone knows its own.
        single: the function in single precision, to check the agreement of precisions.
        equivariant: False for a model that does not turn with its input: leaves out rotation
            and reflection.
    """
    conservative = not _is_direct(model)
    if structures is None:
        structures = [random_structure(0), random_structure(1), random_structure(2, periodic=False)]
    for atoms in structures:
        if equivariant:
            check_rotation(model, atoms, cutoff=cutoff)
            check_reflection(model, atoms, cutoff=cutoff)
        check_translation(model, atoms, cutoff=cutoff)
        check_permutation(model, atoms, cutoff=cutoff)
        if conservative:
            check_forces(model, atoms, cutoff=cutoff)
        if conservative and atoms.pbc.all():
            check_stress(model, atoms, cutoff=cutoff)
        if isinstance(model, AtomisticBackbone) or single is not None:
            check_precision(model, atoms, cutoff=cutoff, single=single)
    check_batching(model, structures, cutoff=cutoff)
    elements = tuple(dict.fromkeys(symbol for atoms in structures for symbol in atoms.symbols))
    check_smoothness(model, elements, cutoff=cutoff)
    if conservative:
        check_second_derivatives(model, elements, cutoff=cutoff)
    if isinstance(model, AtomisticBackbone):
        check_declarations(model, model.graph(structures))


def check_rotation(
    model: Model, atoms: Atoms, *, cutoff: float | None = None, atol: float = 1e-8
) -> None:
    """Check that energies stay, and forces and stress turn with the structure."""
    _check_orthogonal(model, atoms, rotation_matrix(), cutoff, atol, "rotation")


def check_reflection(
    model: Model, atoms: Atoms, *, cutoff: float | None = None, atol: float = 1e-8
) -> None:
    """Check that energies of the mirror image are equal, its forces and stress mirrored."""
    mirror = rotation_matrix() @ np.diag([1.0, 1.0, -1.0])
    _check_orthogonal(model, atoms, mirror, cutoff, atol, "reflection")


def check_translation(
    model: Model, atoms: Atoms, *, cutoff: float | None = None, atol: float = 1e-8
) -> None:
    """Check that shifts of all atoms, or of some by lattice vectors, change nothing."""
    moved = atoms.copy()
    moved.positions += [3.1, -7.7, 12.3]
    moved.wrap()
    expected = _evaluate(model, atoms, cutoff)
    assert_all_close(_evaluate(model, moved, cutoff), expected, atol, "translation")


def check_permutation(
    model: Model, atoms: Atoms, *, cutoff: float | None = None, atol: float = 1e-8
) -> None:
    """Check that reordered atoms have the same energies and reordered forces."""
    order = np.random.default_rng(0).permutation(len(atoms))
    expected = _evaluate(model, atoms, cutoff)
    for name in {keys.ENERGIES, keys.FORCES} & expected.keys():
        expected[name] = expected[name][order]
    assert_all_close(_evaluate(model, atoms[order], cutoff), expected, atol, "permutation")


def check_batching(
    model: Model, structures: Sequence[Atoms], *, cutoff: float | None = None, atol: float = 1e-8
) -> None:
    """Check that a batch gives what its structures give one by one."""
    alone = [_evaluate(model, [atoms], cutoff) for atoms in structures]
    together = _evaluate(model, structures, cutoff)
    expected = {name: torch.cat([one[name] for one in alone]) for name in together}
    assert_all_close(together, expected, atol, "batching")


def check_smoothness(
    model: Model,
    elements: Sequence[str] = ("N", "H"),
    *,
    cutoff: float | None = None,
    step: float = 1e-6,
    atol: float = 1e-4,
) -> None:
    """Check that energies and forces do not jump when an atom crosses the cutoff of another.

    The atom is placed `step` (A) inside and outside; a smooth model changes by about its
    curvature times `step`, which is to be far below `atol`.
    """
    _, radius = _energies_and_cutoff(model, cutoff)
    symbols = [elements[k % len(elements)] for k in range(3)]
    inside, outside = (
        _evaluate(
            model, Atoms(symbols, [[0, 0, 0], [-0.9, 0.5, 0], [radius + offset, 0, 0]]), cutoff
        )
        for offset in (-step, step)
    )
    assert_all_close(inside, outside, atol, "smoothness at the cutoff")


def check_forces(
    model: Model,
    atoms: Atoms,
    *,
    cutoff: float | None = None,
    step: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Check forces against central differences of the energy, with new neighbour lists (A)."""
    displaced = []
    for index in np.ndindex(len(atoms), 3):
        for offset in (step, -step):
            moved = atoms.copy()
            moved.positions[index] += offset
            displaced.append(moved)
    slopes = _slopes(model, displaced, cutoff, step).reshape(len(atoms), 3)
    forces = _evaluate(model, atoms, cutoff)[keys.FORCES]
    assert_close(forces, -slopes, atol, "forces against finite differences")


def check_stress(
    model: Model,
    atoms: Atoms,
    *,
    cutoff: float | None = None,
    step: float = 1e-5,
    atol: float = 1e-5,
) -> None:
    """Check that stress is (1/V) dE/d(strain) by central differences of strained cells."""
    strained = []
    for a, b in np.ndindex(3, 3):
        for offset in (step, -step):
            strain = np.zeros((3, 3))
            strain[a, b] += 0.5 * offset
            strain[b, a] += 0.5 * offset
            moved = atoms.copy()
            moved.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
            strained.append(moved)
    slopes = _slopes(model, strained, cutoff, step).reshape(1, 3, 3)
    stress = _evaluate(model, atoms, cutoff)[keys.STRESS]
    assert_close(stress, slopes / atoms.get_volume(), atol, "stress against finite strain")


def check_precision(
    model: Model,
    atoms: Atoms,
    *,
    cutoff: float | None = None,
    single: EnergyFunction | None = None,
    atol: float = 1e-3,
) -> None:
    """Check that single and double precision agree; `single`: a function's float32 version."""
    if single is None and not isinstance(model, AtomisticBackbone):
        raise TypeError("check_precision of a function needs `single`, its float32 version")
    rounded = _evaluate(single or model, atoms, cutoff, torch.float32)
    exact = _evaluate(model, atoms, cutoff)
    expected = {name: exact[name] for name in rounded}
    assert_all_close({k: v.double() for k, v in rounded.items()}, expected, atol, "precision")


def check_second_derivatives(
    model: Model, elements: Sequence[str] = ("N", "H"), *, cutoff: float | None = None
) -> None:
    """Check that forces have finite derivatives, also where symmetry cancels them."""
    energies_of, radius = _energies_and_cutoff(model, cutoff)
    one, other = elements[0], elements[-1]
    edge = 0.45 * radius
    structures = {
        "a lone atom": Atoms([one]),
        "a linear molecule": Atoms([other, one, other], [[-1, 0, 0], [0, 0, 0], [1, 0, 0]]),
        "a CsCl crystal": Atoms(
            [one, other], [[0, 0, 0], [edge / 2] * 3], cell=[edge] * 3, pbc=True
        ),
    }
    for name, atoms in structures.items():
        graph = _graph(model, atoms, cutoff)
        positions = graph.positions.requires_grad_()
        forces = -gradient(energies_of(graph).sum(), positions)
        curvature = gradient(forces[0, 0] + forces[-1, 2], positions)
        if not bool(torch.cat([forces, curvature]).isfinite().all()):
            raise AssertionError(f"forces of {name} or their derivatives are not finite")


def _check_orthogonal(
    model: Model, atoms: Atoms, matrix: np.ndarray, cutoff: float | None, atol: float, what: str
) -> None:
    """Compare the structure turned by an orthogonal matrix with the turned results."""
    turned = atoms.copy()
    turned.set_cell(atoms.cell.array @ matrix.T)
    turned.positions = atoms.positions @ matrix.T
    expected = _evaluate(model, atoms, cutoff)
    turn = torch.as_tensor(matrix)
    expected[keys.FORCES] = expected[keys.FORCES] @ turn.T
    if keys.STRESS in expected:
        expected[keys.STRESS] = turn @ expected[keys.STRESS] @ turn.T
    assert_all_close(_evaluate(model, turned, cutoff), expected, atol, what)


def _slopes(model: Model, pairs: Sequence[Atoms], cutoff: float | None, step: float) -> Tensor:
    """Compute (E(+step) - E(-step)) / (2 step) of structures in order plus, minus, ...."""
    energies_of, _ = _energies_and_cutoff(model, cutoff)
    graph = _graph(model, pairs, cutoff)
    plus, minus = graph.sum_over_structures(energies_of(graph).detach()).view(-1, 2).T
    return (plus - minus) / (2 * step)


def _evaluate(
    model: Model,
    atoms: Atoms | Sequence[Atoms],
    cutoff: float | None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Compute energy, energies, forces, and stress where every structure is periodic in 3D."""
    graph = _graph(model, atoms, cutoff, dtype)
    stress = bool(graph.pbc.all())
    if _is_direct(model):
        outputs = deepcopy(model).to(dtype)(graph)
        return {k: v.detach() for k, v in outputs.items() if stress or k != keys.STRESS}
    energies_of, _ = _energies_and_cutoff(model, cutoff, dtype)
    return energy_and_derivatives(energies_of, graph, stress=stress)


def _graph(
    model: Model,
    atoms: Atoms | Sequence[Atoms],
    cutoff: float | None,
    dtype: torch.dtype = torch.float64,
) -> AtomGraph:
    """Return the model's own graph, or all pairs within the cutoff."""
    if isinstance(model, AtomisticBackbone) and cutoff is None:
        return model.graph(atoms, dtype)
    return AtomGraph.from_atoms(atoms, _energies_and_cutoff(model, cutoff)[1], dtype)


def _is_direct(model: Model) -> TypeGuard[AtomisticBackbone]:
    return isinstance(model, AtomisticBackbone) and not model.conservative


def _energies_and_cutoff(
    model: Model, cutoff: float | None, dtype: torch.dtype = torch.float64
) -> tuple[EnergyFunction, float]:
    if isinstance(model, AtomisticBackbone):
        backbone = deepcopy(model).to(dtype)
        return lambda graph: backbone(graph)[keys.ENERGIES], cutoff or model.cutoff
    if cutoff is None:
        raise TypeError("a function does not tell its cutoff; give cutoff=... in A")
    return model, cutoff
