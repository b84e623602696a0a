"""Checks of models that predict where particles will be."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor

from blips.testing import assert_close, check_declarations, rotation_matrix
from studies.nbody.data import POSITIONS, ParticleGraph
from studies.nbody.particles import ParticleBackbone

PositionFunction = Callable[[ParticleGraph], Tensor]  # graph -> future positions [N, 3]
ParticleModel = ParticleBackbone | PositionFunction
Arrays = tuple[Tensor, Tensor, Tensor]  # positions [M, n, 3], velocities [M, n, 3], charges [M, n]


def random_particles(seed: int, simulations: int = 3, particles: int = 5) -> Arrays:
    """Draw positions and velocities [M, n, 3] and charges [M, n] in double precision."""
    generator = torch.Generator().manual_seed(seed)
    shape = (simulations, particles)
    positions = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    velocities = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    charges = torch.randint(2, shape, generator=generator).double() * 2 - 1
    return positions, velocities, charges


def check_contract(
    model: ParticleModel, arrays: Arrays | None = None, *, equivariant: bool = True
) -> None:
    """Run every check; those of rotation and translation only if the model is `equivariant`."""
    arrays = arrays or random_particles(0)
    check_permutation(model, arrays)
    check_batching(model, arrays)
    if equivariant:
        check_rotation(model, arrays)
        check_translation(model, arrays)
    if isinstance(model, ParticleBackbone):
        graph = ParticleGraph.from_arrays(*arrays)
        check_declarations(deepcopy(model).double(), graph)


def check_rotation(model: ParticleModel, arrays: Arrays, *, atol: float = 1e-8) -> None:
    """Check that predictions rotate and reflect with the particles."""
    positions, velocities, charges = arrays
    expected = _predict(model, arrays)
    for mirror in ([1.0, 1.0, 1.0], [1.0, 1.0, -1.0]):
        turn = torch.as_tensor(rotation_matrix()) @ torch.tensor(mirror).double().diag()
        turned = _predict(model, (positions @ turn.T, velocities @ turn.T, charges))
        assert_close(turned, expected @ turn.T, atol, "rotation of particles")


def check_translation(model: ParticleModel, arrays: Arrays, *, atol: float = 1e-8) -> None:
    """Check that predictions move with the particles."""
    positions, velocities, charges = arrays
    shift = torch.tensor([3.1, -7.7, 12.3], dtype=torch.float64)
    moved = _predict(model, (positions + shift, velocities, charges))
    assert_close(moved, _predict(model, arrays) + shift, atol, "translation of particles")


def check_permutation(model: ParticleModel, arrays: Arrays, *, atol: float = 1e-8) -> None:
    """Check that reordered particles have the same, reordered predictions."""
    order = torch.randperm(arrays[0].shape[1], generator=torch.Generator().manual_seed(0))
    positions, velocities, charges = (array[:, order] for array in arrays)
    permuted = _predict(model, (positions, velocities, charges))
    assert_close(permuted, _predict(model, arrays)[:, order], atol, "permutation of particles")


def check_batching(model: ParticleModel, arrays: Arrays, *, atol: float = 1e-8) -> None:
    """Check that a batch gives what its simulations give one by one."""
    positions, velocities, charges = (array.split(1) for array in arrays)
    alone = [_predict(model, one) for one in zip(positions, velocities, charges, strict=True)]
    assert_close(_predict(model, arrays), torch.cat(alone), atol, "batching of particles")


def _predict(model: ParticleModel, arrays: Arrays) -> Tensor:
    """Predict positions, [M, n, 3]."""
    graph = ParticleGraph.from_arrays(*arrays)
    if isinstance(model, ParticleBackbone):
        predicted = deepcopy(model).double()(graph)[POSITIONS]
    else:
        predicted = model(graph)
    return predicted.detach().view_as(arrays[0])
