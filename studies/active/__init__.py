"""Active learning of ammonia: guided against random labels."""
