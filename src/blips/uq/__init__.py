"""Judge and recalibrate standard deviations: metrics, intervals, calibrators, evaluation.

Figures are in ``blips.uq.plots``, which needs matplotlib and is therefore not imported here; what
reads labelled structures is in ``blips.uq.assess``.
"""

from blips.uq.bootstrap import Bootstrap, Interval
from blips.uq.calibrate import (
    Calibrator,
    ConformalCalibrator,
    IsotonicCalibrator,
    ScaleCalibrator,
    calibrator_from_dict,
)
from blips.uq.evaluate import Evaluation, evaluate
from blips.uq.metrics import (
    binned_errors,
    coverage,
    crps_gaussian,
    ece,
    ence,
    gaussian_nll,
    mae,
    mse,
    reliability_curve,
    zms,
)
from blips.uq.ranking import (
    ForceItems,
    RejectionCurve,
    auroc,
    force_items,
    rejection_curve,
    spearman,
)

__all__ = [
    "Bootstrap",
    "Calibrator",
    "ConformalCalibrator",
    "Evaluation",
    "ForceItems",
    "Interval",
    "IsotonicCalibrator",
    "RejectionCurve",
    "ScaleCalibrator",
    "auroc",
    "binned_errors",
    "calibrator_from_dict",
    "coverage",
    "crps_gaussian",
    "ece",
    "ence",
    "evaluate",
    "force_items",
    "gaussian_nll",
    "mae",
    "mse",
    "rejection_curve",
    "reliability_curve",
    "spearman",
    "zms",
]
