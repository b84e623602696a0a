"""Notice weights that changed after a posterior was conditioned on data with them.

Every predict compares counters that torch keeps anyway: a tensor's place in memory and how often
it was written to. Only where they differ are the numbers themselves compared, by a checksum at
single precision, so that copies, devices and precisions of the same weights pass.
"""

import zlib

import torch
from torch import Tensor, nn

from blips.errors import InputError

Counters = list[tuple[int, int]]


class SeenWeights:
    """The weights of a model at the time when it was conditioned.

    Args:
        model: whose parameters the posterior depends on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counters = _counters(model)
        self._checksums = {name: _checksum(value) for name, value in model.named_parameters()}

    def check(self, model: nn.Module) -> None:
        """Raise an error that names the weights which are no longer those that were seen."""
        now = _counters(model)
        if now == self._counters:
            return
        found = {name: _checksum(value) for name, value in model.named_parameters()}
        both = self._checksums.keys() | found.keys()
        changed = sorted(k for k in both if self._checksums.get(k) != found.get(k))
        if changed:
            some = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
            raise InputError(
                f"weights changed since the potential was conditioned ({len(changed)} of "
                f"{len(both)}: {some}), so its error bars are of another model; condition it "
                "again, after potential.posterior = None"
            )
        self._counters = now


def _counters(model: nn.Module) -> Counters:
    """Counters of all parameters; a walk of our own, as torch's would show in a prediction."""
    found: Counters = []
    rest: list[nn.Module | None] = [model]
    while rest:
        part = rest.pop()
        if part is None:
            continue
        for own in part._parameters.values():
            if own is not None:
                found.append((own.data_ptr(), own._version))
        rest.extend(part._modules.values())
    return found


def _checksum(value: Tensor) -> int:
    flat = value.detach().to("cpu", torch.float32).contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)
