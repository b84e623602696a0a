"""Judge and recalibrate standard deviations: metrics, intervals, calibrators, evaluation.

Plots are in ``blips.uq.plots``; what reads labelled structures is in ``blips.uq.assess``.
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
    ForceItems,
    RejectionCurve,
    auroc,
    binned_errors,
    coverage,
    crps_gaussian,
    ece,
    ence,
    force_items,
    gaussian_nll,
    mae,
    mse,
    rejection_curve,
    reliability_curve,
    spearman,
    zms,
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
