"""Surgery: which maps of a model become Bayesian, the report of it, and the way back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from blips.bayes.linear import StochasticMap, kind_of, make_plain, make_stochastic
from blips.errors import ConversionError

Patterns = str | Sequence[str]  # glob patterns of names
Value = TypeVar("Value")


@dataclass(frozen=True)
class MapReport:
    """What became of one module with parameters: its role where Bayesian, else the reason."""

    name: str
    layer: str
    parameters: int
    role: str | None
    reason: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """Every module with parameters of its own, Bayesian or not and why."""

    maps: tuple[MapReport, ...]

    @property
    def roles(self) -> dict[str, str]:
        """Row type of each Bayesian map, by name."""
        return {m.name: m.role for m in self.maps if m.role is not None}

    def __str__(self) -> str:
        """Format a table, one line for each module."""
        rows = [("map", "layer", "parameters", "posterior")]
        for m in self.maps:
            posterior = f"{m.role} rows" if m.role else f"none: {m.reason}"
            rows.append((m.name, m.layer, f"{m.parameters}", posterior))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {layer:<{widths[1]}}  {count:>{widths[2]}}  {posterior}"
            for name, layer, count, posterior in rows
        ]
        bayesian = sum(m.parameters for m in self.maps if m.role)
        total = sum(m.parameters for m in self.maps)
        lines.append(
            f"{len(self.roles)} of {len(self.maps)} modules Bayesian, "
            f"with {bayesian} of {total} parameters"
        )
        return "\n".join(lines)


def convert(
    model: nn.Module,
    roles: Mapping[str, str],
    *,
    maps: Patterns = "*",
    exclude: Mapping[str, str] | None = None,
) -> ConversionReport:
    """Give chosen linear maps of any module a posterior, in place, and report all its modules.

    `roles` are row types ("edge", "node", ...) by glob patterns of maps' names; the first match
    counts, and maps without a match stay deterministic. So do those that `maps` does not choose,
    and those of `exclude`, which says by pattern why.
    """
    if any(isinstance(module, StochasticMap) for module in model.modules()):
        raise ConversionError("the model is Bayesian already; start from the plain model")
    reports: list[MapReport] = []
    for name, module in _named_modules(model):
        count = sum(p.numel() for p in module.parameters(recurse=False))
        if count == 0:
            continue
        layer, role = type(module).__name__, first_match(name, roles)
        reason = first_match(name, exclude or {}) or ""
        if not reason and kind_of(module) is None:
            reason = f"{layer} is not known as a linear map"
        elif not reason and role is None:
            reason = "the backbone declares no row type for it"
        elif not reason and not matches(name, maps):
            reason = "not selected by maps"
        reports.append(MapReport(name, layer, count, None if reason else role, reason))
    report = ConversionReport(tuple(reports))
    if not report.roles:
        raise ConversionError(f"no map was selected, nothing would be Bayesian:\n{report}")
    for name in report.roles:
        make_stochastic(model.get_submodule(name), name)
    return report


def revert(model: nn.Module) -> nn.Module:
    """Remove every posterior, in place; the weights are the posterior means."""
    for module in list(model.modules()):
        if isinstance(module, StochasticMap):
            make_plain(module)
    return model


def probe_roles(
    model: nn.Module, run: Callable[[], Any], row_counts: Mapping[str, int]
) -> tuple[dict[str, str], dict[str, str]]:
    """Find the row type of each linear map by running the plain model on a small graph.

    `row_counts` are the rows of each type on that graph, e.g. {"edge": 26, "node": 7, "structure":
    2}; all different, so that the leading dimension of an input names its row type. Returned are
    roles by map name, and for the others the reason why they have none.
    """
    role_of_count = {count: role for role, count in row_counts.items()}
    if len(role_of_count) < len(row_counts):
        raise ConversionError(
            f"the probe graph has equal row counts {dict(row_counts)}, so row types cannot be "
            "told apart; use a structure on which they differ"
        )
    seen: dict[str, set[int]] = {}  # row counts of each map's inputs

    def note(name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim > 0:
            seen[name].add(args[0].shape[0])

    with ExitStack() as stack:
        for name, module in _named_modules(model):
            if kind_of(module) is not None:
                seen[name] = set()
                hook = module.register_forward_pre_hook(partial(note, name))
                stack.callback(hook.remove)
        run()
    roles: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name, counts in seen.items():
        if not counts:
            reasons[name] = "not called on the probe graph"
        elif len(counts) == 1 and (role := role_of_count.get(min(counts))):
            roles[name] = role
        else:
            found = ", ".join(map(str, sorted(counts)))
            reasons[name] = f"row counts {found} on the probe graph are no row type's"
    return roles, reasons


def _named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(cast(Iterable[tuple[str, nn.Module]], model.named_modules()))


def matches(name: str, patterns: Patterns) -> bool:
    """Return whether a name matches any of the patterns."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def first_match(name: str, by_pattern: Mapping[str, Value]) -> Value | None:
    """Return the value of the first pattern that a name matches."""
    return next((value for key, value in by_pattern.items() if fnmatchcase(name, key)), None)
