"""Structures in and out: files, graphs, splits and the sources of the shipped experiments."""

from blips.data.batch import Batch, Subset, TrainingData
from blips.data.dataset import ParticleData, StreamedData, StructureData
from blips.data.elements import energy_scale, fit_reference_energies
from blips.data.graph import AtomGraph, Graph, ParticleGraph
from blips.data.labels import Labels, extract
from blips.data.materials_cloud import read_materials_cloud
from blips.data.matpes import iter_matpes, read_matpes
from blips.data.splits import Split, group_split, random_split
from blips.data.structures import (
    check_structures,
    iter_structures,
    read_structures,
    write_structures,
)

__all__ = [
    "AtomGraph",
    "Batch",
    "Graph",
    "Labels",
    "ParticleData",
    "ParticleGraph",
    "Split",
    "StreamedData",
    "StructureData",
    "Subset",
    "TrainingData",
    "check_structures",
    "energy_scale",
    "extract",
    "fit_reference_energies",
    "group_split",
    "iter_matpes",
    "iter_structures",
    "random_split",
    "read_materials_cloud",
    "read_matpes",
    "read_structures",
    "write_structures",
]
