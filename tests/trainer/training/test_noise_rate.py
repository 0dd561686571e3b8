"""What brings noise in may learn faster than the student that it is brought into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.trainer.run_cases import tiny_run
from trainer.training.construction import build_student
from trainer.training.loop import Trainer
from trainer.training.optimization import make_optimizer, set_learning_rate
from trainer.training.settings import OptimizationConfig

RATES = {"optimization__learning_rate": 1e-3, "optimization__noise_learning_rate_ratio": 5.0}


def test_every_step_by_hand() -> None:
    """Adam's step for gradients of 1 is the rate: 0.1 and 0.05, and four times that for noise."""
    weight, noise = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    config = OptimizationConfig(learning_rate=0.1, noise_learning_rate_ratio=4.0)
    optimizer = make_optimizer([weight, noise], config, [noise])
    for rate in (0.1, 0.05):
        set_learning_rate(optimizer, rate)
        weight.grad, noise.grad = torch.ones(1), torch.ones(1)
        optimizer.step()
    assert weight.tolist() == pytest.approx([-0.15], rel=1e-4)
    assert noise.tolist() == pytest.approx([-0.6], rel=1e-4)


def test_one_rate_for_all_is_one_group() -> None:
    """So that the moments of runs that began before there were two still have their places."""
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = make_optimizer(weights, OptimizationConfig(), weights[:1])
    assert [len(group["params"]) for group in optimizer.param_groups] == [3]


def test_conditioner_and_readings_are_what_learns_faster(store: Path, tmp_path: Path) -> None:
    """First steps of Adam are the rate itself: 1e-3, and five times that for the noise."""
    config = tiny_run(model__noise__layers="[1]", optimization__warmup_steps=0, **RATES)
    trainer = Trainer(config, ShardStore.open(store), tmp_path / "run")
    head = trainer.student.backbone.output_layer.linear.weight
    nn.init.normal_(head)  # a new one is zero, and nothing below it has a gradient
    before = {name: p.detach().clone() for name, p in trainer.student.named_parameters()}
    trainer.advance(trainer.make_batch(next(trainer._rows()), 0))
    moved = {
        name: float((p.detach() - before[name]).abs().max())
        for name, p in trainer.student.named_parameters()
    }
    noise = {name for name in moved if "conditioner" in name or "noise_readings" in name}
    assert {name.rpartition(".")[2] for name in noise} == {"weight", "gamma", "log_beta"}
    assert [moved[name] for name in noise] == pytest.approx([5e-3] * 4, rel=0.01)
    assert max(moved[name] for name in moved if name not in noise) <= 1.01e-3


def test_a_rate_of_no_weight_is_refused(store: Path) -> None:
    config = tiny_run(model__conditioning="none", **RATES)
    with pytest.raises(UsageError, match="noise_learning_rate_ratio"):
        build_student(config, ShardStore.open(store), None)
