"""Baselines of the paper's tables and of ours, with the verbs of `blips.baselines`.

| class | error bars from | trainings | kind |
|---|---|---|---|
| `LastLayerRigidity` (LLPR) | last-layer features | 1, or a given model | epistemic |
| `EmbeddingMixture` (GMM) | density of embeddings | 1, or a given model | epistemic |
| `ShallowEnsemble` | several last layers | 1 | epistemic |
| `MCDropout` | random silent channels | 1 | epistemic |
| `MeanVariance` | a predicted variance | 1 | aleatoric |
| `Evidential` | predicted evidence | 1 | both |

Dropout takes any backbone, the others potentials with a `readout` (PaiNN, SchNet). `Calculator` and
`blips.save` take them as they are; import this module before `blips.load` reads such a file.
"""

from studies.baselines.dropout import MCDropout
from studies.baselines.gmm import EmbeddingMixture
from studies.baselines.llpr import LastLayerRigidity
from studies.baselines.second_readout import Evidential, MeanVariance
from studies.baselines.shallow import ShallowEnsemble

__all__ = [
    "EmbeddingMixture",
    "Evidential",
    "LastLayerRigidity",
    "MCDropout",
    "MeanVariance",
    "ShallowEnsemble",
]
