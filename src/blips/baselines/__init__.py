"""A deep ensemble with the verbs of a Bayesian potential: `fit`, `predict`, `Prediction`.

Other baselines are a `Baseline`, too: `studies/baselines` of the repository has those of the
paper's tables (LLPR, shallow ensembles, mixtures, dropout, mean-variance, evidential).
"""

from blips.baselines.base import Baseline, predict_plain
from blips.baselines.ensemble import DeepEnsemble

__all__ = ["Baseline", "DeepEnsemble", "predict_plain"]
