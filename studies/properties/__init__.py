"""Are the error bars of properties right? Elastic moduli, formation energies, heat capacities."""
