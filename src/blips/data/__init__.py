"""Structures in and out: files, graphs, splits and the shipped NH3 set."""

from blips.data.batch import Batch, TrainingData
from blips.data.dataset import StreamedData, StructureData
from blips.data.elements import fit_reference_energies
from blips.data.graph import AtomGraph, Graph
from blips.data.labels import Labels, extract
from blips.data.splits import Split, group_split, random_split
from blips.data.structures import (
    check_structures,
    iter_structures,
    read_structures,
)

__all__ = [
    "AtomGraph",
    "Batch",
    "Graph",
    "Labels",
    "Split",
    "StreamedData",
    "StructureData",
    "TrainingData",
    "check_structures",
    "extract",
    "fit_reference_energies",
    "group_split",
    "iter_structures",
    "random_split",
    "read_structures",
]
