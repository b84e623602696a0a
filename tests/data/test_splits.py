import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from blips.data.splits import PARTS, Split, group_split, random_split
from blips.errors import InputError

FRACTIONS = st.tuples(st.floats(0.3, 1), st.floats(0, 1), st.floats(0, 1)).map(
    lambda sizes: tuple(size / sum(sizes) for size in sizes)
)


@given(count=st.integers(5, 200), fractions=FRACTIONS, seed=st.integers(0, 1000))
def test_fractions_use_every_structure_once(count, fractions, seed):
    split = random_split(count, fractions, seed)
    parts = [getattr(split, part) for part in PARTS]
    assert sorted(index for part in parts for index in part) == list(range(count))
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * count) <= 1
    assert split == random_split(count, fractions, seed)


def test_missing_parts_are_empty():
    split = random_split(100, (0.64, 0.1), seed=1)
    assert (len(split.train), len(split.valid), len(split.test)) == (64, 10, 0)
    assert split != random_split(100, (0.64, 0.1), seed=2)
    assert random_split(3, (1.0,), seed=0).train == (0, 1, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0.8, 0.3), "at most 1"),
        ((-0.1, 0.2), ">= 0"),
        ((), "one to three"),
        ((0.001, 0.5), "nothing to train on"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(InputError, match=message):
        random_split(100, sizes, seed=0)


@given(
    groups=st.lists(st.sampled_from("abcdefghij"), min_size=10, max_size=80),
    fractions=st.sampled_from([(0.8, 0.2), (0.6, 0.2, 0.2), (0.5, 0.0, 0.5), (1.0,)]),
    seed=st.integers(0, 100),
)
def test_groups_are_never_divided(groups, fractions, seed):
    assume(len(set(groups)) >= len(fractions))
    split = group_split(groups, fractions, seed)
    parts = [getattr(split, part) for part in PARTS]
    assert sorted(index for part in parts for index in part) == list(range(len(groups)))
    owners = {
        group: {n for n, p in enumerate(parts) for i in p if groups[i] == group}
        for group in set(groups)
    }
    assert all(len(owner) == 1 for owner in owners.values())
    for part, fraction in zip(parts, fractions, strict=False):
        assert bool(part) == (fraction > 0)
    assert split == group_split(groups, fractions, seed)


@given(seed=st.integers(0, 100))
def test_equal_groups_fill_their_shares_exactly(seed):
    groups = [index % 10 for index in range(50)]
    split = group_split(groups, (0.8, 0.1, 0.1), seed)
    assert [len(getattr(split, part)) for part in PARTS] == [40, 5, 5]


def test_the_seed_chooses_the_groups():
    groups = [index % 10 for index in range(50)]
    assert len({group_split(groups, (0.8, 0.2), seed).test for seed in range(20)}) == 1
    assert len({group_split(groups, (0.8, 0.2), seed).valid for seed in range(20)}) > 5


def test_too_few_groups_and_short_fractions_are_refused():
    with pytest.raises(InputError, match="2 groups cannot fill 3 parts"):
        group_split("aabb" * 5, (0.8, 0.1, 0.1), seed=0)
    with pytest.raises(InputError, match="add up to 1"):
        group_split("abcd" * 5, (0.5, 0.1), seed=0)


def test_split_returns_from_its_file(tmp_path):
    split = random_split(20, (0.5, 0.25, 0.25), seed=3)
    split.save(tmp_path / "split.json")
    assert Split.load(tmp_path / "split.json") == split


def test_overlap_and_range_are_checked():
    with pytest.raises(InputError, match="index 2 is in train and again in test"):
        Split(5, (0, 2), (), (2,))
    with pytest.raises(InputError, match="index 1 is in valid and again in valid"):
        Split(5, (0,), (1, 1))
    with pytest.raises(InputError, match="valid has index 5, outside 0 to 4"):
        Split(5, (0,), (5,))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (json.dumps({"count": 3, "train": [0]}), "cannot be read"),
        (
            json.dumps({"count": 3, "train": [0.5], "valid": [], "test": []}),
            "expected a whole number",
        ),
        (json.dumps({"count": 3, "train": [3], "valid": [], "test": []}), "outside 0 to 2"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    path = tmp_path / "split.json"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"split\.json.*{message}"):
        Split.load(path)
