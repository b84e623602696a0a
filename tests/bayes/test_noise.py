import threading

import pytest
import torch

from blips.bayes import noise
from blips.bayes.estimators import flipout_linear, local_linear
from blips.bayes.noise import FrozenDraw, Noise
from blips.errors import InputError


def sampled(rows: int = 3) -> Noise:
    return Noise({"map": torch.ones(rows)}, noise.generators(0, 1))


def test_means_are_the_default_and_contexts_nest():
    outer, inner = sampled(), sampled()
    assert noise.active() is None
    with noise.use(outer):
        with noise.use(inner):
            assert noise.active() is inner
            with noise.use(None):
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
    assert not torch.equal(first, FrozenDraw(seed=2, member=2).normal_like("a", weight))
    assert draw.normal_like("a", weight) is first
    double = draw.normal_like("a", weight.double())
    assert double.dtype == torch.float64
    assert torch.equal(first, double.float())


def test_what_a_draw_has_made_is_no_part_of_it():
    draw = FrozenDraw(seed=1, member=2)
    draw.normal_like("a", torch.zeros(3, 4))
    assert draw == FrozenDraw(seed=1, member=2)
    assert repr(draw) == "FrozenDraw(seed=1, member=2)"


def test_coefficients_are_given_for_the_rows_of_each_replica():
    each = Noise({"map": torch.arange(6.0)}, noise.generators(0, 3))
    assert each.coefficients_of("map", 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_bad_noise_is_refused_with_the_remedy():
    with pytest.raises(InputError, match="no coefficients for the Bayesian map 'other'"):
        sampled().coefficients_of("other", 3)
    with pytest.raises(InputError, match="applied to 4 rows but has coefficients for 3"):
        sampled().coefficients_of("map", 4)


def test_frozen_noise_stacks_its_members():
    draws = [FrozenDraw(0, member) for member in range(3)]
    h, weight, coef = torch.randn(2, 4), torch.randn(5, 4), torch.rand(2)
    together = Noise({}, draws).linear("a", h.repeat(3, 1), weight, None, coef.repeat(3))
    for draw, part in zip(draws, together.chunk(3), strict=True):
        torch.testing.assert_close(Noise({}, [draw]).linear("a", h, weight, None, coef), part)


def test_a_draw_is_that_of_the_first_member():
    weight = torch.zeros(3, 2)
    first, second = FrozenDraw(4, 0), FrozenDraw(4, 1)
    assert torch.equal(FrozenDraw(4).normal_like("w", weight), first.normal_like("w", weight))
    assert not torch.equal(second.normal_like("w", weight), first.normal_like("w", weight))


@pytest.mark.parametrize(
    ("estimator", "shape", "expected"),
    [
        ("auto", (3, 4), local_linear),
        ("local", (3, 4), local_linear),
        ("flipout", (3, 4), flipout_linear),
        ("auto", (3, 2, 4), flipout_linear),
        ("flipout", (3, 2, 4), flipout_linear),
    ],
)
def test_the_estimator_is_the_one_that_was_asked_for_or_that_rows_allow(estimator, shape, expected):
    torch.manual_seed(0)
    h, weight, coef = torch.randn(shape), torch.randn(5, 4), torch.rand(3)
    drawn = Noise({"map": coef}, noise.generators(0, 1), estimator)
    torch.testing.assert_close(
        drawn.linear("map", h, weight, None, coef),
        expected(h, weight, None, coef, noise.generators(0, 1)),
    )


def test_defaults_of_noise():
    assert Noise({}, noise.generators(0, 1)).estimator == "auto"
    assert FrozenDraw(seed=0) == FrozenDraw(seed=0, member=0)


def test_a_draw_serves_models_whose_maps_have_one_name_and_two_shapes():
    draw, h, coef = FrozenDraw(seed=0), torch.randn(3, 4), torch.ones(3)
    for out in (5, 6):
        weight = torch.randn(out, 4)
        noisy = Noise({}, [draw]).linear("a", h, weight, None, coef)
        assert noisy.shape == (3, out)
