"""The moving average: decay, by name, swapped in and out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shards.base.errors import GdistillError
from trainer.training.ema import ExponentialMovingAverage, ema_decay


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


def test_load_goes_by_name() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    average = ExponentialMovingAverage(module, 0.99)
    saved = {"b.weight": torch.full((2, 2), 2.0), "a.weight": torch.full((2, 2), 1.0)}
    average.load(saved, 7)
    assert average.num_updates == 7
    assert float(average.shadows["a.weight"][0, 0]) == 1.0
    with pytest.raises(GdistillError, match=r"c\.weight"):
        average.load({**saved, "c.weight": torch.zeros(1)}, 7)
