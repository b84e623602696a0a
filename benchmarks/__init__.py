"""Speed and memory, as ratios within one run; each file says which question it answers."""
