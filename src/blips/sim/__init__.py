"""Simulation: the ASE calculator, molecular dynamics with guards, other engines."""
