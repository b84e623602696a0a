"""Judge and recalibrate standard deviations: metrics, intervals, calibrators, evaluation, plots.

`assess` compares predictions with labels and recalibrates them; `metrics` takes arrays.
"""
