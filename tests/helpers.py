"""Tiny labelled structures, models and trainings."""

import numpy as np
from ase import Atoms
from ase.build import molecule
from ase.calculators.morse import MorsePotential
from ase.calculators.singlepoint import SinglePointCalculator

TINY = {"cutoff": 4.0, "features": 8, "blocks": 2, "num_basis": 4}  # PaiNN, SchNet
QUICK = {"epochs": 5, "batch_size": 4, "lr": 0.01, "tensorboard": False, "threads": 1}


def morse_ammonia(count: int, seed: int, scale: float = 0.05) -> list[Atoms]:
    """Rattled NH3 with the energies and forces of a Morse potential: quick, exact labels."""
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(count):
        atoms = molecule("NH3")
        atoms.positions += rng.normal(scale=scale, size=(4, 3))
        atoms.calc = MorsePotential(epsilon=1.0, r0=1.2, rho0=3.0)
        energy, forces = atoms.get_potential_energy(), atoms.get_forces()
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
        frames.append(atoms)
    return frames
