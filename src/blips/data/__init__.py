"""Structures in and out: files, graphs, splits and the shipped NH3 set."""

from blips.data.dataset import Batch, StructureData, TrainingData
from blips.data.graph import AtomGraph, Graph
from blips.data.labels import Labels
from blips.data.structures import read_structures

__all__ = [
    "AtomGraph",
    "Batch",
    "Graph",
    "Labels",
    "StructureData",
    "TrainingData",
    "read_structures",
]
