"""Learning rate, clipping, AdamW, moving average by hand (the authors' own steps: test_parity)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from shards.errors import UsageError
from trainer.training.construction import (
    ExponentialMovingAverage,
    clip_gradients,
    ema_decay,
    learning_rate,
    make_optimizer,
)
from trainer.training.settings import OptimizationConfig


def test_rates() -> None:
    constant = OptimizationConfig(learning_rate=2.0, warmup_steps=4)
    assert [learning_rate(constant, step, 10) for step in range(6)] == [0.5, 1.0, 1.5, 2, 2, 2]
    cosine = OptimizationConfig(learning_rate=1.0, warmup_steps=2, schedule="cosine")
    rates = [learning_rate(cosine, step, 13) for step in range(13)]
    assert [rates[2], rates[7], rates[12]] == pytest.approx([1.0, 0.5, 0.0])
    assert all(later < earlier for earlier, later in pairwise(rates[2:]))
    long = OptimizationConfig(learning_rate=1.0, warmup_steps=100, schedule="cosine")
    assert learning_rate(long, 9, 10) == pytest.approx(0.1), "it never reaches the peak"


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
    ("name", "value"),
    [("learning_rate", 0.0), ("beta2", 1.0), ("warmup_steps", -1), ("ema_decay", 1.0)],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        OptimizationConfig(**{name: value})  # type: ignore[arg-type]


def test_the_moving_average() -> None:
    decays = [ema_decay(update, 0.9999) for update in (1, 90, 10**6)]
    assert decays == pytest.approx([2 / 11, 0.91, 0.9999])
    module = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(module.weight)
    average = ExponentialMovingAverage(module, 0.9999)
    nn.init.ones_(module.weight)
    average.update()
    assert average.shadows["weight"].flatten().tolist() == pytest.approx([9 / 11] * 2)
    weights, shadow = module.weight.detach().clone(), average.shadows["weight"].clone()
    with average.applied():
        assert torch.equal(module.weight, shadow)
    assert torch.equal(module.weight, weights) and torch.equal(average.shadows["weight"], shadow)
