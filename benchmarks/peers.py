"""What do stochastic layers cost, ours and those of other packages, on the same rows?

A network of 128 - 128 - 128 - 1 with SiLU, forward and backward in one thread. The others have one
posterior for all rows, and parameters for its width; ours has one width for each row, given.
bayesian-torch and blitz are measured where they are installed.
"""

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Call, measure
from blips.bayes import noise as noise_context
from blips.bayes.convert import convert
from blips.bayes.noise import Noise, generators

WIDTHS = (128, 128, 128, 1)


class First(nn.Module):
    """A layer whose result comes with its KL: the result alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        """Apply the map, [rows, in] -> [rows, out]."""
        found = self.layer(h)
        return found[0] if isinstance(found, tuple) else found


def network(layer: Callable[[int, int], nn.Module]) -> nn.Sequential:
    """Build the network out of such layers."""
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise(WIDTHS):
        layers += [First(layer(size_in, size_out)), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def peers(rows: int = 2000, repeats: int = 15) -> dict[str, Any]:
    """Measure ratios to the plain network, forward + backward."""
    torch.manual_seed(0)
    h = torch.randn(rows, WIDTHS[0])
    networks: dict[str, nn.Module] = {"plain": network(nn.Linear)}
    for name, (module, layer) in OTHERS.items():
        try:
            cls = getattr(importlib.import_module(module), layer)
        except ImportError:
            continue
        networks[name] = network(cls)
    calls: dict[str, Call] = {
        name: lambda net=net: net(h).sum().backward() for name, net in networks.items()
    }
    calls |= {f"blips {estimator}": _ours(h, estimator) for estimator in ("local", "flipout")}
    measured = measure(calls, repeats)
    return {
        name: {
            "ratio": round(measured.ratio(name, "plain"), 3),
            "ratio_of_shortest": round(measured.shortest(name, "plain"), 3),
        }
        for name in calls
    }


OTHERS = {
    "bayesian-torch reparameterization": ("bayesian_torch.layers", "LinearReparameterization"),
    "bayesian-torch flipout": ("bayesian_torch.layers", "LinearFlipout"),
    "blitz": ("blitz.modules", "BayesianLinear"),
}


def _ours(h: Tensor, estimator: str) -> Call:
    net = network(nn.Linear)
    report = convert(net, {"*": "row"})
    coefficients = {name: torch.full((len(h),), 0.1) for name in report.roles}

    def call() -> None:
        noise = Noise(coefficients, generators(0, 1), estimator)
        with noise_context.use(noise):
            net(h).sum().backward()

    return call


def peers_table(found: dict[str, Any]) -> str:
    """Format the results as Markdown."""
    lines = ["| layer | ratio (median) | ratio (shortest) |", "|---|---|---|"]
    lines += [
        f"| {k} | {v['ratio']:.2f} | {v['ratio_of_shortest']:.2f} |" for k, v in found.items()
    ]
    return "\n".join(lines) + "\n"
