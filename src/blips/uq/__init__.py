"""Judge and recalibrate standard deviations: metrics, intervals, calibrators, evaluation, plots.

`assess` compares predictions with labels and recalibrates them; `metrics` takes arrays.
"""

from blips.uq.calibrate import ConformalCalibrator, ScaleCalibrator
from blips.uq.evaluate import Evaluation

__all__ = ["ConformalCalibrator", "Evaluation", "ScaleCalibrator"]
