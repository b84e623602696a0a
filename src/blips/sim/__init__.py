"""Simulation: the ASE calculator, molecular dynamics with guards, error bars on averages."""
