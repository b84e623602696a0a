import math

import pytest
import torch
from torch import nn

import blips
from blips.backbones import PaiNN
from blips.config import load_config
from blips.train.optim import MovingAverage, Schedule, make_optimizer


def learning_rates(steps: int, losses: list[float] | None = None, **training) -> list[float]:
    config = load_config({"training": training}).training
    model = nn.Linear(1, 1)
    optimizer = make_optimizer(model, config)
    schedule = Schedule(optimizer, config, total_steps=steps)
    rates = []
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.after_step()
        if losses is not None:
            schedule.after_epoch(losses[step])
    return rates


def test_warm_up_is_linear_and_cosine_ends_at_its_least():
    rates = learning_rates(100, lr=0.1, schedule={"kind": "cosine", "warmup": 0.1, "min_lr": 0.01})
    assert rates[:10] == pytest.approx([0.01 * (k + 1) for k in range(10)])
    for step in (10, 55, 99):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))
        assert rates[step] == pytest.approx(0.01 + 0.09 * cosine)


def test_plateau_waits_for_its_patience_and_follows_a_warm_up():
    schedule = {"kind": "plateau", "patience": 2, "factor": 0.5}
    rates = learning_rates(8, losses=[1.0] * 8, lr=0.1, schedule=schedule)
    assert rates == pytest.approx([0.1] * 4 + [0.05] * 3 + [0.025])
    schedule = {"kind": "plateau", "warmup": 0.5}
    rates = learning_rates(8, losses=[1.0 / (k + 1) for k in range(8)], lr=0.1, schedule=schedule)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.1])


def test_the_inference_network_has_a_learning_rate_of_its_own():
    potential = blips.bayesianize(PaiNN(cutoff=4.0, features=8, blocks=1, num_basis=4))
    config = load_config("training.lr=0.1", "training.encoder_lr=0.01").training
    groups = make_optimizer(potential, config).param_groups
    assert [group["lr"] for group in groups] == [0.1, 0.01]
    assert sum(len(group["params"]) for group in groups) == len(list(potential.parameters()))
    for parameter in potential.backbone.parameters():
        parameter.requires_grad_(False)
    groups = make_optimizer(potential, config).param_groups
    assert [group["lr"] for group in groups] == [0.01]


def test_the_moving_average_is_a_geometric_mean_of_the_past_and_swaps_back():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = MovingAverage(model, decay=0.9)
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        average.update()
    expected = 0.9 * (0.1 * 1.0) + 0.1 * 2.0
    with average.applied():
        assert float(model.weight.detach()) == pytest.approx(expected)
    assert torch.equal(model.weight.detach(), torch.tensor([[2.0]]))
    with pytest.raises(KeyboardInterrupt), average.applied():
        raise KeyboardInterrupt
    assert torch.equal(model.weight.detach(), torch.tensor([[2.0]]))


def test_a_plateau_remembers_its_best_loss_across_a_resumption():
    config = load_config({"training": {"lr": 0.1, "schedule": {"kind": "plateau", "patience": 0}}})
    optimizer = make_optimizer(nn.Linear(1, 1), config.training)
    before, after = (Schedule(optimizer, config.training, total_steps=4) for _ in range(2))
    before.after_epoch(1.0)
    after.restore(before.state())
    after.after_epoch(2.0)  # worse than the best before
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
