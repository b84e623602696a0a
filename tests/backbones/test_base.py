"""What all backbones stand on."""

import pytest
from torch import nn

from blips.backbones import build
from blips.backbones.base import first_parameter
from blips.errors import InputError


@pytest.mark.parametrize("name", ["painn", "schnet"])
def test_the_first_parameter_is_that_of_torch(name: str):
    model = build(name)
    assert first_parameter(model) is next(model.parameters())


def test_a_first_parameter_may_be_deep_and_beside_nothing():
    deep = nn.Sequential(
        nn.SiLU(), nn.Sequential(nn.Identity(), nn.LayerNorm(2, elementwise_affine=False))
    )
    with pytest.raises(InputError, match="no parameters"):
        first_parameter(deep)
    deep.append(nn.Linear(2, 2))
    deep[0].register_parameter("missing", None)
    deep.register_module("gone", None)
    assert first_parameter(deep) is deep[2].weight
