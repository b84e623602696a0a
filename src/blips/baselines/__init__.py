"""Other ways to error bars, with the same verbs: `fit`, `predict`, `Prediction`.

| class | error bars from | trainings | kind |
|---|---|---|---|
| `DeepEnsemble` | several models | M | epistemic |
| `MCDropout` | random silent channels | 1 | epistemic |
| `ShallowEnsemble` | several last layers | 1 | epistemic |
| `LastLayerRigidity` | last-layer features | 1, or a given model | epistemic |
| `EmbeddingMixture` | density of embeddings | 1, or a given model | epistemic |
| `MeanVariance` | a predicted variance | 1 | aleatoric |
| `Evidential` | predicted evidence | 1 | both |

Ensembles and dropout take any backbone, the others potentials with a `readout` (PaiNN, SchNet).
"""

from blips.baselines.base import Baseline, predict_plain
from blips.baselines.dropout import MCDropout
from blips.baselines.ensemble import DeepEnsemble
from blips.baselines.gmm import EmbeddingMixture
from blips.baselines.llpr import LastLayerRigidity
from blips.baselines.second_readout import Evidential, MeanVariance
from blips.baselines.shallow import ShallowEnsemble

__all__ = [
    "Baseline",
    "DeepEnsemble",
    "EmbeddingMixture",
    "Evidential",
    "LastLayerRigidity",
    "MCDropout",
    "MeanVariance",
    "ShallowEnsemble",
    "predict_plain",
]
