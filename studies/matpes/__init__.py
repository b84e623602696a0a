"""Active learning of a released potential from a pool."""
