"""The mathematics of stochastic maps, testable without an atom."""

from blips.bayes.convert import ConversionReport, convert, probe_roles, revert
from blips.bayes.encoder import InferenceNetwork
from blips.bayes.kl import kl_divergence, prior_coefficient
from blips.bayes.linear import MapKind, StochasticMap, register_kind
from blips.bayes.noise import FrozenDraw, FrozenNoise, SampledNoise, generators, use

__all__ = [
    "ConversionReport",
    "FrozenDraw",
    "FrozenNoise",
    "InferenceNetwork",
    "MapKind",
    "SampledNoise",
    "StochasticMap",
    "convert",
    "generators",
    "kl_divergence",
    "prior_coefficient",
    "probe_roles",
    "register_kind",
    "revert",
    "use",
]
