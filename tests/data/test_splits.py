import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from blips.data.splits import Split, group_split, random_split
from blips.errors import InputError


@given(count=st.integers(5, 200), fraction=st.floats(0, 0.7), seed=st.integers(0, 1000))
def test_a_split_uses_every_structure_once(count, fraction, seed):
    split = random_split(count, fraction, seed)
    assert sorted(split.train + split.valid) == list(range(count))
    assert abs(len(split.valid) - fraction * count) <= 1
    assert split == random_split(count, fraction, seed)


def test_the_seed_chooses_the_structures():
    split = random_split(100, 0.1, seed=1)
    assert (len(split.train), len(split.valid)) == (90, 10)
    assert split != random_split(100, 0.1, seed=2)
    assert random_split(3, 0.0, seed=0) == Split(3, (0, 1, 2), ())


def test_splits_stay_what_they_were():
    """Runs that began with an earlier version continue."""
    assert random_split(6, 0.3, seed=0).valid == (0, 1)
    assert group_split("aabbbcddee", 0.3, seed=0).valid == (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("fraction", "message"), [(1.2, "0 to 1"), (-0.1, "0 to 1"), (0.999, "nothing to train on")]
)
def test_impossible_fractions_are_refused(fraction, message):
    with pytest.raises(InputError, match=message):
        random_split(100, fraction, seed=0)


@given(
    groups=st.lists(st.sampled_from("abcdefghij"), min_size=10, max_size=80),
    fraction=st.sampled_from([0.2, 0.4, 0.5, 0.0]),
    seed=st.integers(0, 100),
)
def test_groups_are_never_divided(groups, fraction, seed):
    assume(len(set(groups)) >= 2)
    split = group_split(groups, fraction, seed)
    assert sorted(split.train + split.valid) == list(range(len(groups)))
    train, valid = ({groups[i] for i in part} for part in (split.train, split.valid))
    assert not train & valid
    assert train
    assert bool(valid) == (fraction > 0)
    assert split == group_split(groups, fraction, seed)


@given(seed=st.integers(0, 100))
def test_equal_groups_fill_their_shares_exactly(seed):
    split = group_split([index % 10 for index in range(50)], 0.2, seed)
    assert (len(split.train), len(split.valid)) == (40, 10)


def test_the_seed_chooses_the_groups():
    groups = [index % 10 for index in range(50)]
    assert len({group_split(groups, 0.2, seed).valid for seed in range(20)}) > 5


def test_too_few_groups_are_refused():
    with pytest.raises(InputError, match="1 groups cannot fill 2 parts"):
        group_split("aaaa" * 5, 0.2, seed=0)


def test_split_returns_from_its_file(tmp_path):
    split = random_split(20, 0.25, seed=3)
    split.save(tmp_path / "split.json")
    assert Split.load(tmp_path / "split.json") == split


@pytest.mark.parametrize("parts", [((0, 2), (1, 2)), ((0,), (1, 1)), ((0, 1), (3,)), ((0,), (1,))])
def test_overlap_and_range_are_checked(parts):
    with pytest.raises(InputError, match="not the numbers 0 to 2, each once"):
        Split(3, *parts)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (json.dumps({"count": 3, "train": [0]}), "cannot be read"),
        (json.dumps({"count": 3, "train": [0.5], "valid": []}), "each once"),
        (json.dumps({"count": 3, "train": [3], "valid": []}), "each once"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    path = tmp_path / "split.json"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"split\.json.*{message}"):
        Split.load(path)
