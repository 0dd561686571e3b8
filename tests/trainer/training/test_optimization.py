"""Learning rate, clipping, AdamW, moving average by hand (the authors' own steps: test_parity)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from shards.errors import UsageError
from trainer.training.optimization import (
    ExponentialMovingAverage,
    clip_gradients,
    ema_decay,
    learning_rate,
    make_optimizer,
)
from trainer.training.settings import OptimizationConfig


def test_warm_up_rises_linearly_then_stays() -> None:
    config = OptimizationConfig(learning_rate=2.0, warmup_steps=4)
    rates = [learning_rate(config, step, 10) for step in range(6)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_cosine_ends_at_its_final_share() -> None:
    config = OptimizationConfig(
        learning_rate=1.0, warmup_steps=2, schedule="cosine", final_learning_rate_ratio=0.1
    )
    rates = [learning_rate(config, step, 13) for step in range(13)]
    assert rates[2] == pytest.approx(1.0) and rates[12] == pytest.approx(0.1)
    assert rates[7] == pytest.approx(0.55)
    assert all(later < earlier for earlier, later in pairwise(rates[2:]))


def test_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    config = OptimizationConfig(learning_rate=1.0, warmup_steps=100, schedule="cosine")
    assert learning_rate(config, 9, 10) == pytest.approx(0.1)


def test_clipping_keeps_direction_and_reports_the_norm_before() -> None:
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    weights[0].grad, weights[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert float(clip_gradients(weights, 1.0)) == pytest.approx(5.0)
    assert weights[0].grad.tolist() == pytest.approx([0.6, 0.0], abs=1e-5)
    assert float(clip_gradients(weights, 10.0)) == pytest.approx(1.0, abs=1e-5)
    assert weights[1].grad.tolist() == pytest.approx([0.8], abs=1e-5)


def test_first_adamw_step_has_the_size_of_the_learning_rate() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -1.0]))
    optimizer = make_optimizer([weight], OptimizationConfig(learning_rate=0.1))
    weight.grad = torch.tensor([5.0, -1e-3])
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9, -0.9], abs=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.0},
        {"noise_learning_rate_ratio": 0.0},
        {"beta2": 1.0},
        {"warmup_steps": -1},
        {"ema_decay": 1.0},
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(change))):
        OptimizationConfig(**change)  # type: ignore[arg-type]


def test_decay_warms_up_to_its_limit() -> None:
    assert ema_decay(1, 0.9999) == pytest.approx(2 / 11)
    assert ema_decay(90, 0.9999) == pytest.approx(0.91)
    assert ema_decay(10**6, 0.9999) == 0.9999


def test_first_update_by_hand() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    average = ExponentialMovingAverage(module, 0.9999)
    nn.init.ones_(module.weight)
    average.update()
    assert float(average.shadows["weight"]) == pytest.approx(9 / 11)


def test_average_of_constant_weights_is_the_weights() -> None:
    module = nn.Linear(3, 2)
    average = ExponentialMovingAverage(module, 0.99)
    for _ in range(5):
        average.update()
    for name, weight in module.named_parameters():
        torch.testing.assert_close(average.shadows[name], weight.detach())


def test_applied_swaps_there_and_back_bit_for_bit() -> None:
    module = nn.Linear(3, 2)
    average = ExponentialMovingAverage(module, 0.99)
    with torch.no_grad():
        module.weight.add_(torch.randn(2, 3))
    average.update()
    weights = module.weight.detach().clone()
    shadow = average.shadows["weight"].clone()
    with average.applied():
        assert torch.equal(module.weight, shadow)
    assert torch.equal(module.weight, weights)
    assert torch.equal(average.shadows["weight"], shadow)
