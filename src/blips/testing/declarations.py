"""Checks of what a backbone says about itself: roles, row features, hyperparameters."""

import json
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from blips import keys
from blips.backbones.base import Backbone
from blips.backbones.generic import Adapter
from blips.bayes.linear import kind_of
from blips.data.graph import Graph
from blips.testing.compare import assert_all_close, rotation_matrix


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
        if not any(fnmatchcase(name, pattern) for name in maps):
            raise AssertionError(f"roles: no linear map is called {pattern!r}")
    seen: dict[str, int] = {}

    def count_rows(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[name] = inputs[0].shape[0]

    hooks = [m.register_forward_pre_hook(partial(count_rows, name)) for name, m in maps.items()]
    try:
        backbone(graph)
    finally:
        for hook in hooks:
            hook.remove()
    rows = backbone.row_counts(graph)
    for name in maps:
        role = next((r for p, r in backbone.roles.items() if fnmatchcase(name, p)), None)
        if role is not None and seen.get(name) != rows.get(role):
            raise AssertionError(
                f"roles: {name!r} is declared to act on {role!r} rows, of which this graph has "
                f"{rows.get(role)}, but was applied to {seen.get(name)}"
            )


def check_row_features(backbone: Backbone, graph: Graph) -> None:
    """Check that row features have the declared sizes and, but for vectors, are invariant."""
    features = backbone.row_features(graph)
    sizes, rows = backbone.feature_sizes, backbone.row_counts(graph)
    for name in (keys.NODE, keys.EDGE):
        if name in sizes and features[name].shape != (rows[name], sizes[name]):
            raise AssertionError(
                f"row features {name!r} have shape {tuple(features[name].shape)}, "
                f"declared are {(rows[name], sizes[name])}"
            )
    if keys.NODE_TYPE in sizes:
        labels = features[keys.NODE_TYPE]
        if labels.shape != (rows[keys.NODE],) or not bool((labels < sizes[keys.NODE_TYPE]).all()):
            raise AssertionError(f"node types must be [N] labels below {sizes[keys.NODE_TYPE]}")
    if features[keys.EDGE_WEIGHT].shape != (rows[keys.EDGE],):
        raise AssertionError("edge weights must be one number for each edge")
    turned = backbone.row_features(graph.turned(_turn(graph.positions)))
    if keys.EDGE_VECTOR in features:
        vectors = features[keys.EDGE_VECTOR]
        features[keys.EDGE_VECTOR] = vectors @ _turn(vectors).T
    assert_all_close(turned, features, 1e-4, "row features of a turned graph")


def check_hyperparameters(backbone: Backbone) -> None:
    """Check that the hyperparameters survive JSON and rebuild a model of equal parameters."""
    stored = json.loads(json.dumps(backbone.hyperparameters))
    rebuilt = type(backbone)(**stored)
    if rebuilt.hyperparameters != backbone.hyperparameters:
        raise AssertionError("hyperparameters change when the model is built from them")
    rebuilt.load_state_dict(backbone.state_dict())


def _turn(like: Tensor) -> Tensor:
    """Return the rotation matrix in the dtype and on the device of `like`."""
    return torch.as_tensor(rotation_matrix()).to(like)
