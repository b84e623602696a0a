import pickle
import threading

import pytest
import torch
import torch.nn.functional as F

from blips.bayes import noise
from blips.bayes.estimators import flipout_linear
from blips.bayes.noise import FrozenNoise, SampledNoise
from blips.bayes.weights import SHARING, FrozenDraw, NoiseStore, WeightNoise
from blips.errors import InputError


def sampled(rows: int = 3) -> SampledNoise:
    return SampledNoise({"map": torch.ones(rows)}, noise.generators(0, 1))


def test_means_are_the_default_and_contexts_nest():
    outer, inner = sampled(), sampled()
    assert noise.active() is None
    with noise.use(outer):
        with noise.use(inner):
            assert noise.active() is inner
            with noise.mean():
                assert noise.active() is None
        assert noise.active() is outer
    assert noise.active() is None


def test_an_exception_leaves_no_noise_behind():
    with pytest.raises(RuntimeError, match="inside"), noise.use(sampled()):
        raise RuntimeError("inside")
    assert noise.active() is None


def test_threads_do_not_see_each_others_noise():
    mine, seen = sampled(), []
    entered, checked = threading.Event(), threading.Event()

    def other() -> None:
        entered.wait(5)
        seen.append(noise.active())
        with noise.use(sampled()):
            checked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with noise.use(mine):
        entered.set()
        assert checked.wait(5)
        assert noise.active() is mine
    thread.join()
    assert seen == [None]


def test_generators_are_functions_of_seed_and_number():
    whole = [torch.randn(4, generator=g) for g in noise.generators(7, 5)]
    tail = [torch.randn(4, generator=g) for g in noise.generators(7, 2, first=3)]
    torch.testing.assert_close(torch.stack(whole[3:]), torch.stack(tail), rtol=0, atol=0)
    assert not torch.equal(whole[0], whole[1])
    other_seed = torch.randn(4, generator=noise.generators(8, 1)[0])
    assert not torch.equal(whole[0], other_seed)


def test_frozen_draws_depend_on_seed_member_and_name_only():
    weight = torch.zeros(3, 4)
    draw = FrozenDraw(seed=1, member=2)
    first = draw.normal_like("a", weight)
    draw.normal_like("b", weight)
    again = FrozenDraw(seed=1, member=2).normal_like("a", weight)
    assert torch.equal(first, again)
    assert not torch.equal(first, draw.normal_like("b", weight))
    assert not torch.equal(first, FrozenDraw(seed=1, member=3).normal_like("a", weight))
    assert torch.equal(first, draw.normal_like("a", weight.double()).float())


def test_coefficients_are_shared_by_replicas_or_given_for_each():
    shared = SampledNoise({"map": torch.tensor([1.0, 2.0])}, noise.generators(0, 3))
    assert shared.coefficients_of("map", 6).tolist() == [1.0, 2.0] * 3
    each = SampledNoise({"map": torch.arange(6.0)}, noise.generators(0, 3))
    assert each.coefficients_of("map", 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_bad_noise_is_refused_with_the_remedy():
    with pytest.raises(InputError, match=r"unknown estimator 'flipuot'; use one of auto, local"):
        SampledNoise({}, noise.generators(0, 1), "flipuot")
    with pytest.raises(InputError, match=r"needs a torch\.Generator"):
        SampledNoise({}, [])
    with pytest.raises(InputError, match="no coefficients for the Bayesian map 'other'"):
        sampled().coefficients_of("other", 3)
    with pytest.raises(InputError, match="applied to 4 rows but has coefficients for 3"):
        sampled().coefficients_of("map", 4)
    with pytest.raises(InputError, match=r"expected one number for each row"):
        SampledNoise({"map": torch.ones(3, 2)}, noise.generators(0, 1)).coefficients_of("map", 3)


def test_frozen_noise_stacks_its_members():
    draws = [FrozenDraw(0, member) for member in range(3)]
    stacked = FrozenNoise({}, draws).normal_like("a", torch.zeros(2, 2))
    assert stacked.shape == (3, 2, 2)
    assert torch.equal(stacked[1], draws[1].normal_like("a", torch.zeros(2, 2)))


def test_weight_noise_is_kept_until_the_weights_change_and_never_depends_on_that():
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    kept, fresh = WeightNoise(1, range(2, 5), {}), WeightNoise(1, range(2, 5))
    first = kept.deviation("a", weight)
    assert first.shape == (1, 3, 4)  # three samples of one group
    assert kept.deviation("a", weight) is first
    assert torch.equal(fresh.deviation("a", weight), first)
    assert fresh.deviation("a", weight) is not first
    assert torch.equal(WeightNoise(1, range(4, 5)).deviation("a", weight), first)
    weight.mul_(2.0)
    torch.testing.assert_close(kept.deviation("a", weight), 2.0 * first)


def test_the_store_keeps_the_newest_within_its_bound_and_does_not_travel():
    store = NoiseStore(weight_bytes=10, most_bytes=30)  # three groups of samples
    two, third = range(2 * SHARING), range(2 * SHARING, 3 * SHARING)  # groups
    oldest, newer = store.get(0, two).kept, store.get(0, third[:2]).kept
    assert store.get(0, two[3 : SHARING + 1]).kept is oldest  # the same groups
    assert store.get(0, third[2:4]).kept is newer
    newest = store.get(1, range(5)).kept  # the oldest has to go
    assert store.get(0, third).kept is newer
    assert store.get(1, range(5)).kept is newest
    assert store.get(0, two).kept is not oldest
    assert store.get(2, range(3 * SHARING + 1)).kept is None
    drawn = store.draw(0, 0)
    assert store.draw(0, 0) is drawn
    for member in range(1, 4):
        store.draw(0, member)
    assert store.draw(0, 0) is not drawn
    copy = pickle.loads(pickle.dumps(store))
    assert copy._kept == copy._draws == {}


def test_samples_of_a_group_share_weight_noise_however_they_are_chunked():
    weight = torch.randn(3, 4)
    whole = WeightNoise(7, range(2 * SHARING)).deviation("map", weight)
    assert whole.shape == (2, 3, 4)
    part = WeightNoise(7, range(SHARING - 1, SHARING + 2)).deviation("map", weight)
    assert torch.equal(part, whole[[0, 1, 1]])


@pytest.mark.statistical
def test_samples_that_share_weight_noise_are_uncorrelated_and_have_the_posterior_s_variance():
    draws, rows = 20_000, 2
    h, weight = torch.randn(rows, 5), torch.randn(3, 5)
    coef = torch.tensor([0.5, 2.0]).repeat(2)
    deviation = weight * torch.randn(draws, 3, 5)
    generators = [torch.Generator().manual_seed(k) for k in range(2)]
    noise = torch.stack(
        [
            flipout_linear(h.repeat(2, 1), weight, None, coef, generators, one[None])
            for one in deviation
        ]
    ).view(draws, 2, rows, 3) - F.linear(h, weight)
    expected = coef[:rows, None] * F.linear(h.square(), weight.square())  # [rows, 3]
    torch.testing.assert_close(noise.var(0), expected.expand(2, rows, 3), rtol=0.06, atol=0)
    scaled = (noise / expected.sqrt()).flatten(2)  # [draws, 2, rows * 3]
    between = scaled[:, 0].T @ scaled[:, 1] / draws
    assert between.abs().max() < 5 / draws**0.5
