"""Training: losses, one loop, checkpoints without pickle, run folders that resume."""
