"""Error bars near the training data and far from it, of nine methods."""
