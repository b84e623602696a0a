"""Ammonia: the out-of-distribution study of the paper, and what its error bars depend on."""
