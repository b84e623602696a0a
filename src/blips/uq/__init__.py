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
from blips.uq.evaluate import Evaluation
from blips.uq.metrics import (
    ForceItems,
    RejectionCurve,
    auroc,
    binned_errors,
    coverage,
    ece,
    ence,
    force_items,
    rejection_curve,
    reliability_curve,
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
    "ece",
    "ence",
    "force_items",
    "rejection_curve",
    "reliability_curve",
    "spearman",
]
