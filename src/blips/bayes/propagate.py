r"""Mean and variance through a network in one forward pass, element by element.

A tensor that knows the variance of its elements beside their values, which are those of the
posterior means. Every operation that it meets passes the variance on at first order, with elements
taken as independent of each other:

    z = f(h)                       var z = f'(h)^2 var h
    z = sum_k h_k                  var z = sum_k var h_k
    z = W h, w ~ N(W, coef W^2)    var z = W^2 (var h + coef (h^2 + var h))

No backward pass is needed and every output gets a variance of its own, which is what models that
predict forces directly lack otherwise. Correlations are lost: of a value that is used twice (skip
connections, an atom's features on all of its edges), of channels that came out of one product. The
result is an estimate that needs a scale from samples. An operation that is not known here raises
`UnsupportedOperation` with its name; teach it with `register`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from blips.bayes.moments import Analytic
from blips.errors import BlipsError

Handler = Callable[..., Any]


class UnsupportedOperation(BlipsError):
    """An operation through which blips cannot propagate a variance."""


class Uncertain(Tensor):
    """Values with variances, `variance`, of the same shape."""

    variance: Tensor

    @staticmethod
    def make(mean: Tensor, var: Tensor) -> "Uncertain":
        """Values and variances as one tensor, without autograd's graph."""
        made = cast(Uncertain, mean.detach().as_subclass(Uncertain))  # pyright: ignore
        made.variance = var.detach()
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Values by the operation itself, variances by the rule for it."""
        kwargs = kwargs or {}
        name = _name_of(func)
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore
            if name in _rules and name.endswith("_") and not name.startswith("__"):
                return _in_place(name, func, *args, **kwargs)
            if name in _rules:
                return _rules[name](func, *args, **kwargs)
            if name in _LOOKING_ONLY:
                return func(*args, **kwargs)
        raise UnsupportedOperation(
            f"no rule to propagate a variance through torch's {name!r}; teach it with "
            'blips.bayes.propagate.register, or use method="mc"'
        )


@dataclass(frozen=True)
class Propagation(Analytic):
    """Posterior means, with the variance that the posterior of every map adds."""

    @property
    def replicas(self) -> int:
        """One."""
        return 1

    def linear(
        self,
        map_name: str,
        block_name: str,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        coef: Tensor,
    ) -> Tensor:
        """The map at its means, and the variance of its outputs."""
        mean, var = parts(h)
        coef = coef.view(-1, *(1,) * (mean.ndim - 1))
        spread = coef * (mean.square() + var) + var
        return Uncertain.make(F.linear(mean, weight, bias), F.linear(spread, weight.square()))


def parts(x: Any) -> tuple[Any, Any]:
    """Values and variances; those of a plain tensor or number are zero."""
    if isinstance(x, Uncertain):
        return x.as_subclass(Tensor), x.variance  # pyright: ignore
    return x, torch.zeros_like(x) if isinstance(x, Tensor) else 0.0


def register(name: str, rule: Handler) -> None:
    """Teach the rule `rule(function, *arguments) -> Uncertain` of torch's operation `name`."""
    _rules[name] = rule


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # an attribute, such as shape
        owner = getattr(func, "__self__", None)
        return f"get:{getattr(owner, '__name__', '')}"
    return name


def _in_place(name: str, func: Any, x: Any, *args: Any, **kwargs: Any) -> Uncertain:
    """The rule, with its result in the memory of x; a plain x only where it is the sum so far."""
    if not isinstance(x, Uncertain):
        if name != "scatter_add_":  # whose result is what callers go on with
            raise UnsupportedOperation(_INTO_PLAIN)
        return _rules[name](func, x, *args, **kwargs)
    mean, var = parts(x)
    result = _rules[name](func, Uncertain.make(mean.clone(), var.clone()), *args, **kwargs)
    new, x.variance = parts(result)
    mean.copy_(new)
    return x


_INTO_PLAIN = (
    'a value with a variance was written into a plain tensor, which cannot keep it; use method="mc"'
)


def _through(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """What only moves elements around does the same to their variances."""
    mean, var = parts(x)
    if not isinstance(x, Uncertain):
        return func(mean, *(parts(a)[0] for a in args), **kwargs)
    return Uncertain.make(func(mean, *args, **kwargs), func(var, *args, **kwargs))


def _add(func: Any, x: Any, y: Any, **kwargs: Any) -> Uncertain:
    (a, var_a), (b, var_b) = parts(x), parts(y)
    mean = func(a, b, **kwargs)
    return Uncertain.make(mean, (var_a + var_b).expand_as(mean))


def _mul(func: Any, x: Any, y: Any) -> Uncertain:
    (a, var_a), (b, var_b) = parts(x), parts(y)
    var = b**2 * var_a + a**2 * var_b + var_a * var_b
    mean = func(a, b)
    return Uncertain.make(mean, var.expand_as(mean))


def _div(func: Any, x: Any, y: Any) -> Uncertain:
    (a, var_a), (b, var_b) = parts(x), parts(y)
    mean = a / b
    return Uncertain.make(mean, (var_a / b**2 + mean**2 * var_b / b**2).expand_as(mean))


def _neg(func: Any, x: Uncertain) -> Uncertain:
    mean, var = parts(x)
    return Uncertain.make(-mean, var)


def _smooth(func: Any, x: Uncertain, *args: Any, **kwargs: Any) -> Uncertain:
    """A function of each element by itself: its slope by autograd."""
    mean, var = parts(x)
    kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
    with torch.enable_grad():
        leaf = mean.detach().requires_grad_()
        out = func(leaf, *args, **kwargs)
        slope = cast(Tensor, torch.autograd.grad(out.sum(), leaf)[0])
    return Uncertain.make(out, slope.square() * var)


def _linear(func: Any, x: Any, weight: Tensor, bias: Tensor | None = None) -> Uncertain:
    mean, var = parts(x)
    return Uncertain.make(func(mean, weight, bias), F.linear(var, weight.square()))


def _cat(func: Any, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Uncertain:
    means, variances = zip(*(parts(x) for x in tensors), strict=True)
    return Uncertain.make(func(means, *args, **kwargs), func(variances, *args, **kwargs))


def _scatter(func: Any, out: Any, dim: int, index: Tensor, src: Any, **kwargs: Any) -> Uncertain:
    (mean, var), (added, var_added) = parts(out), parts(src)
    return Uncertain.make(
        func(mean, dim, index, added, **kwargs), func(var, dim, index, var_added, **kwargs)
    )


def _sum(func: Any, x: Uncertain, *args: Any, **kwargs: Any) -> Uncertain:
    mean, var = parts(x)
    return Uncertain.make(func(mean, *args, **kwargs), func(var, *args, **kwargs))


def _mean(func: Any, x: Uncertain, *args: Any, **kwargs: Any) -> Uncertain:
    mean, var = parts(x)
    out = func(mean, *args, **kwargs)
    terms = mean.numel() / out.numel()
    return Uncertain.make(out, func(var, *args, **kwargs) / terms)


def _cross(func: Any, x: Tensor, y: Any, **kwargs: Any) -> Uncertain:
    """Of a plain x and an uncertain y, the last axis being that of space."""
    (a, var_a), (b, var_b) = parts(x), parts(y)
    one, two = (a.square().roll(-k, -1) for k in (1, 2))
    var = one * var_b.roll(-2, -1) + two * var_b.roll(-1, -1)
    one, two = (b.square().roll(-k, -1) for k in (1, 2))
    var = var + two * var_a.roll(-1, -1) + one * var_a.roll(-2, -1)
    return Uncertain.make(func(a, b, **kwargs), var)


def _solve(func: Any, matrix: Tensor, y: Uncertain, **kwargs: Any) -> Uncertain:
    mean, var = parts(y)
    inverse = cast(Tensor, torch.linalg.inv(matrix))  # pyright: ignore
    return Uncertain.make(func(matrix, mean, **kwargs), inverse.square() @ var)


def _set(func: Any, x: Any, index: Any, value: Any) -> None:
    if not isinstance(x, Uncertain):
        raise UnsupportedOperation(_INTO_PLAIN)
    (mean, var), (new, var_new) = parts(x), parts(value)
    mean[index], var[index] = new, var_new


def _rms_norm(
    func: Any, x: Uncertain, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Uncertain:
    mean, var = parts(x)
    size, eps = mean.shape[-1], torch.finfo(mean.dtype).eps if eps is None else eps
    rate = (mean.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit = mean * rate
    second = (unit.square() * var).sum(-1, keepdim=True)
    inner = var * (1 - 2 * unit.square() / size) + unit.square() * second / size**2
    scale = rate if weight is None else rate * weight
    return Uncertain.make(func(mean, shape, weight, eps), scale.square() * inner.clamp_min(0.0))


def _layer_norm(
    func: Any,
    x: Uncertain,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
) -> Uncertain:
    mean, var = parts(x)
    size = mean.shape[-1]
    centred = mean - mean.mean(-1, keepdim=True)
    rate = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit = centred * rate
    zeroth, first, second = (
        (unit**k * var).sum(-1, keepdim=True) for k in range(3)
    )  # sum_j (1 + u_i u_j)^2 var_j
    cross = zeroth + 2 * unit * first + unit.square() * second
    inner = var * (1 - 2 * (1 + unit.square()) / size) + cross / size**2
    scale = rate if weight is None else rate * weight
    out = func(mean, shape, weight, bias, eps)
    return Uncertain.make(out, scale.square() * inner.clamp_min(0.0))


# Operations that ask for shapes and the like, or make plain tensors.
_LOOKING_ONLY = {
    *(f"get:{name}" for name in ("shape", "dtype", "device", "ndim", "is_leaf", "requires_grad")),
    *("dim", "size", "__len__", "numel", "is_floating_point", "element_size", "stride"),
    *("new_zeros", "new_ones", "zeros_like", "ones_like", "empty_like", "get:layout"),
}
_rules: dict[str, Handler] = {"linear": _linear, "cat": _cat, "stack": _cat, "neg": _neg}
for _names, _rule in (
    ("add sub add_ sub_ __radd__ rsub __rsub__", _add),
    ("mul mul_ __rmul__ multiply", _mul),
    ("div div_ true_divide true_divide_", _div),
    ("silu sigmoid tanh relu gelu softplus exp sqrt sin cos square", _smooth),
    ("scatter_add scatter_add_ index_add index_add_", _scatter),
    ("rms_norm", _rms_norm),
    ("cross linalg_cross", _cross),
    ("linalg_solve", _solve),
    ("__setitem__", _set),
    ("layer_norm", _layer_norm),
    ("sum", _sum),
    ("mean", _mean),
    (
        "__getitem__ index_select unsqueeze squeeze expand_as expand view reshape flatten double "
        "float to type contiguous clone detach gather transpose permute repeat_interleave split "
        "chunk",
        _through,
    ),
):
    for _name in _names.split():
        _rules[_name] = _rule
