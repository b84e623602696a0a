import resource

import pytest
import torch

from blips.inference.memory import keep_freed_memory


def faults_per_round(rounds: int = 20) -> float:
    """Page faults of allocating, filling and freeing 16 MB in tensors of 2 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        tensors = [torch.zeros(2**19) for _ in range(8)]
        del tensors
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / rounds


def test_freed_memory_is_used_again():
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")
    faults_per_round(2)
    assert faults_per_round() < 400  # 16 MB are 4096 pages


def test_asking_twice_is_harmless():
    assert keep_freed_memory() is keep_freed_memory()
