"""Ways to a prediction with error bars, one file each."""
