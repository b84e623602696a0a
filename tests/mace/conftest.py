"""Tests of MACE, which needs an environment of its own: `make test-mace`."""

from importlib.metadata import distributions

if "mace-torch" not in {distribution.name for distribution in distributions()}:
    collect_ignore_glob = ["*"]
