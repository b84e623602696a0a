"""Tiny labelled structures, models and trainings."""

import warnings

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import molecule
from ase.calculators.morse import MorsePotential
from ase.calculators.singlepoint import SinglePointCalculator
from ase.spacegroup import crystal

from blips.backbones import build
from blips.backbones.orb import Orb

TINY = {"cutoff": 4.0, "features": 8, "blocks": 2, "num_basis": 4}  # PaiNN, SchNet
SMALL_ORB = {
    "latent_dim": 16,
    "base_mlp_hidden_dim": 32,
    "head_mlp_hidden_dim": 16,
    "num_message_passing_steps": 2,
}
QUICK = {
    "epochs": 5,
    "batch_size": 4,
    "lr": 0.01,
    "noise": True,
    "condition": False,
    "schedule": {"kind": "constant"},
    "tensorboard": False,
    "threads": 1,
}


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


def quartz(rattle: float = 0.0, seed: int = 0) -> Atoms:
    """Alpha quartz, 9 atoms; displaced by normal numbers of this scale (A)."""
    atoms = crystal(
        ["Si", "O"],
        [(0.4697, 0, 1 / 3), (0.4133, 0.2672, 0.2144)],
        spacegroup=152,
        cellpar=[4.9137, 4.9137, 5.4047, 90, 90, 120],
    )
    plain = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=True)
    plain.positions += np.random.default_rng(seed).normal(scale=rattle, size=(len(plain), 3))
    return plain


def small_orb(family: str, **hyperparameters) -> Orb:
    """A random one of the families "orb" and "orb-direct"."""
    torch.manual_seed(0)
    backbone = build(family, **{**SMALL_ORB, **hyperparameters})
    assert isinstance(backbone, Orb)
    return backbone


def orb_package(module: str):
    """A module of orb-models, whose import warns of what its own dependencies lack."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"orb_models.forcefield.{module}")


def rattled_molecules(count: int, scale: float, first: int = 0) -> list[Atoms]:
    """Number first, first + 1, ... of displaced NH3, CH3OH, H2O in turn."""
    found = []
    for k in range(first, first + count):
        atoms = molecule(("NH3", "CH3OH", "H2O")[k % 3])
        atoms.rattle(scale, seed=k)
        found.append(atoms)
    return found


def double_coefficients(potential, monkeypatch) -> None:
    """Let the inference network of all such potentials give twice what it gives."""
    plain = type(potential).coefficients
    monkeypatch.setattr(
        type(potential),
        "coefficients",
        lambda self, graph: {name: 2 * value for name, value in plain(self, graph).items()},
    )


def shaken(network):
    """The network with random weights of a size that matters."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return network
