"""Numbers that several places have in common."""

SAMPLES = 16  # posterior samples, wherever a number of them can be given
