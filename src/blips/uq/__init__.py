"""Uncertainty quantification on plain arrays: metrics, intervals, recalibration, evaluation.

Figures are in ``blips.uq.plots``, which needs matplotlib and is therefore not imported here.
"""

from blips.uq.bootstrap import Interval, bootstrap_interval, bootstrap_intervals, bootstrap_means
from blips.uq.calibration import (
    Calibrator,
    ConformalCalibrator,
    IsotonicCalibrator,
    ScaleCalibrator,
    calibrator_from_dict,
)
from blips.uq.evaluate import evaluate
from blips.uq.evaluation import Evaluation
from blips.uq.forces import AtomForces, StructureForces, atom_forces, structure_forces
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
from blips.uq.ranking import RejectionCurve, auroc, rejection_curve, spearman

__all__ = [
    "AtomForces",
    "Calibrator",
    "ConformalCalibrator",
    "Evaluation",
    "Interval",
    "IsotonicCalibrator",
    "RejectionCurve",
    "ScaleCalibrator",
    "StructureForces",
    "atom_forces",
    "auroc",
    "binned_errors",
    "bootstrap_interval",
    "bootstrap_intervals",
    "bootstrap_means",
    "calibrator_from_dict",
    "coverage",
    "crps_gaussian",
    "ece",
    "ence",
    "evaluate",
    "gaussian_nll",
    "mae",
    "mse",
    "rejection_curve",
    "reliability_curve",
    "spearman",
    "structure_forces",
    "zms",
]
