import json
from contextlib import suppress
from typing import get_args

import pytest
from ase.data import chemical_symbols
from hypothesis import given
from hypothesis import strategies as st

from blips.config import EnergyUnit, LengthUnit, dump_config, load_config
from blips.errors import ConfigError
from blips.units import ENERGY_UNITS, LENGTH_UNITS


def test_files_mappings_and_overrides_merge_left_to_right(tmp_path):
    (tmp_path / "a.yaml").write_text("training: {epochs: 5, lr: 0.1}\nseed: 1\n")
    (tmp_path / "b.json").write_text(json.dumps({"training": {"lr": 0.2}}))
    config = load_config(
        tmp_path / "a.yaml", str(tmp_path / "b.json"), "training.epochs=7", {"seed": 2}
    )
    assert (config.training.epochs, config.training.lr, config.seed) == (7, 0.2, 2)


def test_the_resolved_configuration_reads_back_the_same(tmp_path):
    config = load_config("training.schedule.kind=cosine", "model.bayes.bounds=[1e-4, 2.0]")
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("training.epoch=5", r"unknown key 'training.epoch'; did you mean 'epochs'\?"),
        ("traning.epochs=5", r"unknown key 'traning'; did you mean 'training'\?"),
        ("training.epochs=many", "training.epochs: Input should be a valid integer"),
        ("training.loss=mea", "training.loss"),
        ("model.bayes.prior_dropout=2", "less than 1"),
        ("training.kl_weight=.inf", "training.kl_weight: Input should be a finite number"),
        ("absent.yaml", "no configuration file absent.yaml"),
        ("seed=[1", "cannot read the value"),
    ],
)
def test_mistakes_are_named(source, message):
    with pytest.raises(ConfigError, match=message):
        load_config(source)


def test_unreadable_files_are_named(tmp_path):
    path = tmp_path / "c.yaml"
    for content in (
        b"a: [1",
        b"\xff\xfe\x00",
        b"- 1\n- 2\n",
        b"!!python/object/apply:os.getcwd []",
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"c\.yaml"):
            load_config(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["training", "lr", "model", "data", "x"]), children)
    ),
    max_leaves=6,
)


@given(value=st.dictionaries(st.sampled_from(["training", "model", "seed", "y"]), json_values))
def test_any_mapping_is_accepted_or_refused_with_our_error(value):
    with suppress(ConfigError):
        load_config(value)


def test_an_override_may_be_longer_than_the_name_of_a_file():
    energies = ", ".join(f"{symbol}: -1234.5678" for symbol in chemical_symbols[1:60])
    config = load_config(f"data.reference_energies={{{energies}}}")
    assert len(config.data.reference_energies) == 59


def test_units_are_those_that_blips_knows():
    assert get_args(EnergyUnit) == tuple(ENERGY_UNITS)
    assert get_args(LengthUnit) == tuple(LENGTH_UNITS)
    for text in ("training.loss_unit=foo", "data.labels.energy_unit=foo"):
        with pytest.raises(ConfigError, match="kcal/mol"):
            load_config(text)
