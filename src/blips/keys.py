"""Names of the quantities that travel through blips, beside their shapes and units.

Letters: N atoms, E directed edges, S structures, K posterior samples.
"""

ENERGY = "energy"  # [S] eV
ENERGIES = "energies"  # [N] eV, energy of each atom
FORCES = "forces"  # [N, 3] eV/A
STRESS = "stress"  # [S, 3, 3] eV/A^3

ENERGY_UNCERTAINTY = "energy_uncertainty"  # [S] eV, standard deviation
ENERGIES_UNCERTAINTY = "energies_uncertainty"  # [N] eV
FORCES_UNCERTAINTY = "forces_uncertainty"  # [N, 3] eV/A
STRESS_UNCERTAINTY = "stress_uncertainty"  # [S, 3, 3] eV/A^3
IN_DOMAIN = "in_domain"  # [N] bool, False where the model cannot know anything

# What a backbone tells the inference network about its rows (all invariant).
NODE = "node"  # [N, D] continuous node features, and the name of that row type
EDGE = "edge"  # [E, D] continuous edge features, and the name of that row type
NODE_TYPE = "node_type"  # [N] integer labels, e.g. atomic numbers
EDGE_VECTOR = "edge_vector"  # [E, 3] A; equivariant, for networks of your own
EDGE_INDEX = "edge_index"  # [2, E] receiving atom, sending atom
EDGE_WEIGHT = "edge_weight"  # [E] envelope that vanishes smoothly at the cutoff
