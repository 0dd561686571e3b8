"""The loop beside the same steps in plain torch: nothing that a run sets may be left undone."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shards.store.store import ShardStore
from tests.trainer.run_cases import tiny_run
from trainer.objective.batch import Batch
from trainer.objective.corruption import FULL, corrupt
from trainer.training.loop import Trainer

SETTINGS: dict[str, Any] = {
    "training__micro_batch_size": 3,
    "optimization__learning_rate": "3e-2",
    "optimization__warmup_steps": 2,
    "optimization__schedule": "cosine",
    "optimization__beta1": 0.6,
    "optimization__beta2": 0.7,
    "optimization__weight_decay": 0.5,
    "optimization__max_grad_norm": 0.05,
    "optimization__ema_decay": 0.28,
}
NUM_STEPS = 5
RATES = (0.015, 0.03, 0.03, 0.015, 0.0)
"""Half the peak, the peak, then a half cosine over steps 2, 3, 4 from the peak to zero."""
DECAYS = (2 / 11, 3 / 12, 0.28, 0.28, 0.28)
"""(1 + n) / (10 + n) up to the limit."""


def make_trainer(store: Path, out: Path, **changes: Any) -> Trainer:
    """A trainer whose weights are all away from zero, so that every one of them has a gradient."""
    trainer = Trainer(tiny_run(**changes), ShardStore.open(store), out)
    torch.manual_seed(0)
    for name, parameter in trainer.student.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        trainer.ema.shadows[name].copy_(parameter.detach())
    return trainer


def replay(student: torch.nn.Module, batches: list[Batch]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and their average after AdamW by its definition (Loshchilov and Hutter, 2019)."""
    weights = list(student.parameters())
    averages = [w.detach().clone() for w in weights]
    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    for step, batch in enumerate(batches):
        gradients = torch.autograd.grad(student.loss(batch).loss, weights)  # type: ignore[operator]
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        assert norm > 2 * 0.05, "clipping must have something to do"
        with torch.no_grad():
            for w, g, m, v, average in zip(
                weights, gradients, first, second, averages, strict=True
            ):
                clipped = g * (0.05 / norm)
                m.mul_(0.6).add_(0.4 * clipped)
                v.mul_(0.7).add_(0.3 * clipped.square())
                m_hat, v_hat = m / (1 - 0.6 ** (step + 1)), v / (1 - 0.7 ** (step + 1))
                w.mul_(1 - RATES[step] * 0.5)
                w.sub_(RATES[step] * m_hat / (v_hat.sqrt() + 1e-3))
                average.mul_(DECAYS[step]).add_((1 - DECAYS[step]) * w)
    return weights, averages


def test_steps_are_those_of_plain_torch(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", partial(torch.optim.AdamW, eps=1e-3))
    trainer = make_trainer(store, tmp_path / "run", training__num_steps=NUM_STEPS, **SETTINGS)
    twin, start = copy.deepcopy(trainer.student), copy.deepcopy(trainer.student)
    rows = trainer._rows()
    batches = []
    for _ in range(NUM_STEPS):
        batches.append(trainer.make_batch(next(rows), trainer.step))
        trainer.advance(batches[-1])
    weights, averages = replay(twin, batches)
    # Both walk by the same arithmetic in another order: rounding of 6e-8 a step, eps keeps Adam's
    # quotient smooth. The walk itself is 1e-2 and more.
    moved = 0.0
    for (name, ours), wanted, average, before in zip(
        trainer.student.named_parameters(), weights, averages, start.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: n + m)
        torch.testing.assert_close(trainer.ema.shadows[name], average, rtol=1e-4, atol=2e-5)
        moved = max(moved, float((wanted - before).detach().abs().max()))
    assert moved > 1e-2


def at_a_standstill(store: Path, out: Path, **changes: Any) -> list[float]:
    """Losses of three steps over one batch whose learning rate is all but zero."""
    still = {"optimization__learning_rate": "1e-30", "training__num_steps": 3}
    trainer = make_trainer(store, out, **still, **changes)
    batch, losses = trainer.make_batch(next(trainer._rows()), 0), []
    for _ in range(3):
        before = trainer.window.loss_sum
        trainer.advance(batch)
        losses.append(trainer.window.loss_sum - before)
    return losses


def test_dropout_draws_anew_at_every_step_and_the_same_in_every_run(
    store: Path, tmp_path: Path
) -> None:
    first, second, third = at_a_standstill(store, tmp_path / "a", model__dropout=0.5)
    assert len({first, second, third}) == 3
    torch.manual_seed(123)
    assert at_a_standstill(store, tmp_path / "b", model__dropout=0.5) == [first, second, third]
    other = at_a_standstill(store, tmp_path / "c", model__dropout=0.5, seed=1)
    assert other[0] != first


def test_without_dropout_only_the_weights_change_a_loss(store: Path, tmp_path: Path) -> None:
    losses = at_a_standstill(store, tmp_path / "run")
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", None)])
def test_products_have_the_precision_asked_for(
    store: Path, tmp_path: Path, precision: str, dtype: torch.dtype | None
) -> None:
    trainer = make_trainer(store, tmp_path / "run", training__precision=precision)
    seen = set()
    products = trainer.student.backbone.blocks[0].attn_qkv
    products.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    trainer.advance(trainer.make_batch(next(trainer._rows()), 0))
    assert seen == {dtype or torch.float32}
    assert trainer.validator is not None
    seen.clear()
    trainer.validator.score(trainer.module, trainer.student)
    assert seen == {dtype or torch.float32}


def test_validation_is_of_the_averaged_weights_without_dropout(store: Path, tmp_path: Path) -> None:
    trainer = make_trainer(store, tmp_path / "run", model__dropout=0.5)
    validator = trainer.validator
    assert validator is not None
    trainer.student.eval()
    averaged = validator.score(trainer.module, trainer.student)
    with torch.no_grad():
        for parameter in trainer.student.parameters():
            parameter.add_(0.3)
    raw = validator.score(trainer.module, trainer.student)
    trainer.student.train()
    trainer.metrics = type("Silent", (), {"write": lambda *_: None})()  # type: ignore[assignment]
    trainer._validate(validator)
    assert trainer.validation == averaged and averaged["nll_nats"] != raw["nll_nats"]
    assert trainer.student.training


def test_validation_draws_are_none_of_trainings(store: Path, tmp_path: Path) -> None:
    """Row 0 of the one split is not masked as row 0 of the other."""
    trainer = make_trainer(store, tmp_path / "run")
    assert trainer.validator is not None
    batch = next(trainer.validator._batches())
    as_in_training = dataclasses.replace(batch, seed=trainer.config.seed)
    masks = [
        corrupt(rows, trainer.student.settings.diffusion, 1, FULL).mask.tolist()
        for rows in (batch, as_in_training)
    ]
    assert masks[0] != masks[1]


def test_clips_are_searched_each_under_its_own(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.training import loop

    search = {"student": "bd3lm", "model__diffusion__search_schedule": "true"}
    trainer = make_trainer(store, tmp_path / "run", **search, model__block_size=4)
    seen: dict[Any, Any] = {}
    monkeypatch.setattr(loop, "best_clips", lambda losses: seen.update(losses) or (0.5, 1.0))
    assert trainer.validator is not None
    trainer.validator.search_clips(trainer.module, trainer.student)
    batch = next(trainer.validator._batches())
    for clips in ((1e-3, 1.0), (0.5, 1.0), (0.2, 0.7)):
        with torch.no_grad():
            expected = trainer.student.loss(batch, time_bounds=clips).block_nlls
        torch.testing.assert_close(seen[clips][0], expected, rtol=1e-5, atol=1e-6)
    first = [values[0] for values in seen.values()]
    assert not any(torch.equal(first[0], other) for other in first[1:])
