"""Every setting of a training does something, and no run goes on under another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shards.errors import UsageError
from shards.settings import to_mapping
from tests.changed_settings import changed
from tests.trainer.backbone_cases import backbone_run, store_of, write_backbone
from tests.trainer.run_cases import metrics_without_timing, run_files, tiny_run, write_store
from trainer.training.loop import train
from trainer.training.resume import operational_fields, require_same_run
from trainer.training.settings import RunConfig

SHORT = {
    "training__num_steps": 7,
    "training__validate_every_steps": 7,
    "optimization__ema_decay": 0.5,
}
"""More steps than an epoch has, so that a second draw of a row's noise is one of them."""
VALUES = {
    "model.attention": "sdpa", "model.backbone.head_output": "full", "model.backbone.head_rank": 3,
    "model.block_size": 4, "model.diffusion.max_loss_weight": 0.5, "model.diffusion.min_time": 0.2,
    "model.dropout": 0.3, "model.embedding_init_std": 0.5, "model.hidden_size": 32,
    "model.kd.kind": "token", "model.noise.layers": (1,), "model.num_heads": 4,
    "optimization.ema_decay": 0.1, "optimization.max_grad_norm": 0.1,
    "training.num_noise_draws": 1, "training.num_validation_rows": 4, "training.precision": "bf16",
    "training.trackers": ("tensorboard",), "training.validate_every_steps": 3, "student": "ar",
}  # fmt: skip
HOW_IT_RUNS = {
    *("checkpoint_every_steps", "device", "keep_every_steps", "keep_last"),
    *("noise_kernel", "num_workers", "sharding", "trackers"),
}
"""Of ``training``, with attention: to one CPU they are the same to the bit."""
FREE = {f"training.{name}" for name in HOW_IT_RUNS} | {"model.attention"}
LONGER = {"training.num_steps", "training.num_epochs", "training.micro_batch_size"}
"""These change a result's last bits or its end, and not the way there."""
ELSEWHERE = {
    *("model.backbone.location", "model.language_model", "model.predicts_next"),
    "training.num_epochs",
}
"""Of other models, and in place of the steps: other tests have them."""


def bases(tmp_path: Path) -> Iterator[tuple[RunConfig, Path]]:
    """Short runs and their stores; every setting does something in one of them."""
    store, backbone = write_store(tmp_path / "store"), write_backbone(tmp_path / "backbone")
    scored = store_of(tmp_path / "scored", backbone)
    noise = {"model__noise__rank": 3, "model__noise__prior_share": 0.5}
    yield tiny_run(**SHORT, **noise), store
    teacher = {"model__conditioning": "none", "model__kd__kind": "token"}
    yield tiny_run(**SHORT, **teacher, optimization__weight_decay=0.1), store
    clips = {"model__diffusion__min_time": 0.45, "model__diffusion__max_time": 0.55}
    yield tiny_run(**SHORT, **clips, student="bd3lm", model__block_size=2), store
    yield tiny_run(**SHORT, model__noise__layers="[1]", model__noise__injection="add"), store
    heads = {"model__backbone__head_output": "low_rank", "model__backbone__head_rank": 2}
    yield backbone_run(backbone, **SHORT, **heads), scored
    yield backbone_run(backbone, "drafter", **SHORT, model__backbone__num_starts=2), scored


def test_every_setting_does_something_or_is_known_not_to(tmp_path: Path) -> None:
    """A setting that is declared, shown and validated could still be read by nobody."""
    silent = {name for name, _ in changed(tiny_run(), VALUES)} - ELSEWHERE
    for number, (base, store) in enumerate(bases(tmp_path)):

        def result(config: RunConfig, name: str) -> object:
            out = tmp_path / f"{number}-{name}"  # noqa: B023 - called in this turn
            assert train(config, store, out)  # noqa: B023
            return run_files(out), metrics_without_timing(out)

        own = result(base, "base")
        for name, other in changed(base, VALUES):
            if name in silent and other is not None:
                with contextlib.suppress(UsageError):  # this student does not read it
                    if result(other, name) != own:
                        silent.remove(name)
    assert silent == FREE


@pytest.mark.parametrize("student", ["mdlm", "bd3lm"])
def test_no_run_goes_on_under_another_setting(student: str) -> None:
    base = tiny_run(student=student)
    saved, free = {"config": to_mapping(base)}, set()
    for name, other in changed(base, VALUES):
        if other is not None:
            with contextlib.suppress(UsageError):
                now = {"config": to_mapping(other)}
                require_same_run(saved, now, operational_fields(other))
                free.add(name)
    unread = {name for name in free if name.startswith("model.backbone.")}
    unread |= set() if student == "bd3lm" else {"model.block_size"}
    assert free - unread == FREE | LONGER - {"training.num_epochs"}
