r"""Train the network against covariances of samples.

The sampled covariance S of K posterior samples of a normal force follows a Wishart distribution
around the true one, whose negative logarithm of the likelihood is, but for constants and a factor,

    loss = mean over atoms of  tr(Cov^-1 S) + log det Cov
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from blips.predict import Array
from blips.spread.network import SMALLEST, Refinement, Scene


@dataclass(frozen=True)
class Schedule:
    """Of the training: AdamW, learning rate up and down in one cycle."""

    steps: int = 1500
    batch_size: int = 8  # structures
    learning_rate: float = 3e-3
    weight_decay: float = 1e-3
    clip: float = 1.0


def fit_refinement(
    scenes: Sequence[Scene],
    sampled: Sequence[Array],
    schedule: Schedule = Schedule(),  # noqa: B008, immutable
    seed: int = 0,
) -> Refinement:
    """The network that makes sampled covariances, [N, 3, 3] of each scene, most likely."""
    small = [scene.to(torch.float32) for scene in scenes]
    aims = [torch.as_tensor(cov, dtype=torch.float32) for cov in sampled]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = untrained(small)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay
    )
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, schedule.learning_rate, total_steps=schedule.steps
    )
    rng = np.random.default_rng(seed)
    for _ in range(schedule.steps):
        chosen = rng.choice(len(small), size=min(schedule.batch_size, len(small)), replace=False)
        batch = Scene.join([small[k] for k in chosen])
        loss = wishart_loss(network(batch), torch.cat([aims[k] for k in chosen]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), schedule.clip)
        optimizer.step()
        cycle.step()
    return network.double().eval()


def untrained(scenes: Sequence[Scene]) -> Refinement:
    """A network for such scenes, its inputs scaled to mean 0 and deviation 1 over them."""
    inputs = torch.cat([scene.inputs for scene in scenes])
    elements = torch.cat([scene.numbers for scene in scenes]).unique().tolist()
    free = scenes[0].features is not None
    network = Refinement(elements, inputs.shape[1], hidden=64 if free else 32, free=free)
    network.centre.copy_(inputs.mean(dim=0))
    network.width.copy_(inputs.std(dim=0).clamp_min(1e-3))
    return network


def wishart_loss(cov: Tensor, sampled: Tensor) -> Tensor:
    """Mean over atoms that move; `cov` and `sampled` [N, 3, 3] in units of the latter's trace."""
    trace = sampled.diagonal(dim1=1, dim2=2).sum(dim=1)
    moving = trace > SMALLEST
    scale = 1.0 / trace[moving, None, None]
    unit = 1e-6 * torch.eye(3, dtype=cov.dtype)
    cov, sampled = cov[moving] * scale + unit, sampled[moving] * scale
    traces = torch.linalg.solve(cov, sampled).diagonal(dim1=1, dim2=2).sum(dim=1)
    return (traces + torch.logdet(cov)).mean()
