"""The loop: what it writes, that it learns, validation, precision, first weights.

Its steps stand beside the same steps in plain torch: nothing that a run sets may be left undone.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from shards.atomic import exclusive
from shards.errors import GdistillError, IntegrityError, UsageError
from shards.stream.stream import RowBatch
from tests.trainer.run_cases import LENGTH, VOCAB, next_batch, tiny_run, trainer_of, write_store
from trainer.objective.batch import Batch, StoredRowNoise
from trainer.objective.corruption import FULL
from trainer.students.registry import MDLM
from trainer.training import loop
from trainer.training.checkpoint import CheckpointFolder
from trainer.training.loop import Trainer, Validator, train

SEARCH = {"student": "bd3lm", "model__block_size": 4, "model__diffusion__search_schedule": "true"}


def read_metrics(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_metrics_say_where_the_run_stands(finished: Path) -> None:
    lines = read_metrics(finished, "train")
    assert [line["step"] for line in lines] == [1, 3, 6, 9, 10]
    assert {line["num_steps"] for line in lines} == {10}
    assert lines[-1]["num_tokens"] == 10 * 8 * LENGTH
    assert [line["epoch"] for line in lines] == [0, 0, 1, 1, 1], "of five steps each"
    assert [line["learning_rate"] for line in lines] == [0.005, *[0.01] * 4], "two steps to warm up"
    assert all(line["tokens_per_second"] > 0 and math.isfinite(line["loss"]) for line in lines)
    assert [line["step"] for line in read_metrics(finished, "validation")] == [4, 8, 10]
    (events,) = (finished / "tensorboard").rglob("events.out.tfevents*")
    content = events.read_bytes()
    assert b"train/loss" in content and b"validation/nll_nats" in content


def test_model_folder_is_a_hugging_face_model_of_the_averaged_weights(finished: Path) -> None:
    folder = finished / "model"
    student = AutoModel.from_pretrained(folder)
    assert isinstance(student, MDLM)
    assert (student.config.vocab_size, student.config.row_length) == (VOCAB, LENGTH)
    assert (folder / "vocab.txt").read_bytes() == b"a b"
    assert (folder / "corpus" / "maze.json").read_bytes() == b"[]"
    record = json.loads((folder / "student.json").read_text())
    assert record["run"]["store"]["codec"]["name"] == "posterior"
    assert record["validation"].items() <= read_metrics(finished, "validation")[-1].items()
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n") and "bigram" in card and "posterior" in card
    model, checkpoint = load_file(folder / "model.safetensors"), finished / "checkpoints" / "step-00000010"
    averages, weights = (load_file(checkpoint / f"{name}.safetensors") for name in ("ema", "weights"))
    assert set(model) == set(weights)
    assert all(torch.equal(model[name], value) for name, value in averages.items())
    name = "backbone.vocab_embed.embedding"
    assert not torch.equal(model[name], weights[name])


def test_validation_repeats_itself_and_leaves_training_alone(store: Path, tmp_path: Path) -> None:
    """The same figures whatever the micro-batches and the clips of training; of the first rows
    where only they are asked."""
    trainer, validator = trainer_of(store, tmp_path / "run")
    before = {name: p.detach().clone() for name, p in trainer.student.named_parameters()}
    clips: list[Any] = []
    trainer.module.register_forward_pre_hook(lambda _, given: clips.append(given[1]))
    first, again = (validator.score(trainer.module, trainer.student) for _ in range(2))
    assert {*clips} == {FULL}
    assert first == again and first["num_tokens"] == 10 * (LENGTH - 1)
    assert first["nll_nats"] == pytest.approx(math.log(VOCAB), rel=0.5)  # uniform at the start
    assert first["perplexity"] == pytest.approx(math.exp(first["nll_nats"]))
    assert first["conditional"]
    assert all(torch.equal(p, before[name]) for name, p in trainer.student.named_parameters())
    for name, value, rows in (
        ("training__micro_batch_size", 3, 10),
        ("model__diffusion__min_time", 0.5, 10),
        ("training__num_validation_rows", 5, 5),
        ("training__num_validation_rows", 50, 10),
    ):
        trainer, validator = trainer_of(store, tmp_path / name, **{name: value})
        score = validator.score(trainer.module, trainer.student)
        assert score["num_tokens"] == rows * (LENGTH - 1)
        same = score["nll_nats"] == pytest.approx(first["nll_nats"], rel=1e-6)
        assert same == (rows == 10)
    seeds = [next(trainer_of(store, tmp_path / "run", seed=n)[1]._batches()).seed for n in (0, 1)]
    assert len({*seeds, 0, 1}) == 4, "no row is masked as the one of its number in training, or in another run"
    far = SimpleNamespace(nll_sum=torch.tensor(8000.0), num_tokens=10)
    with mock.patch.object(validator, "_outputs", return_value=[far]):
        assert validator.score(trainer.module, trainer.student)["perplexity"] == math.exp(700), "and not too large"


def test_clips_are_searched_at_validation(store: Path, tmp_path: Path) -> None:
    more = {"model__diffusion__resample": "true", "training__num_steps": 2}
    trainer = trainer_of(store, tmp_path / "run", **SEARCH, **more)[0]
    assert trainer.run()
    (line,) = read_metrics(tmp_path / "run", "validation")
    chosen = torch.tensor([line["min_time"], line["max_time"]])
    torch.testing.assert_close(trainer.student.time_bounds, chosen)
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")["time_bounds"]
    torch.testing.assert_close(saved, chosen)
    for number, splits in enumerate(({"train": 8}, {"train": 8, "validation": 0})):
        without = write_store(tmp_path / str(number), splits=splits, rows_per_shard=8)
        with pytest.raises(UsageError, match=r"needs validation rows.*search_schedule"):
            train(tiny_run(**SEARCH), without, tmp_path / "search")


def test_a_validation_that_is_not_finite_ends_the_run(store: Path, tmp_path: Path) -> None:
    few = {"training__num_steps": 2, "training__validate_every_steps": 2}
    trainer = trainer_of(store, tmp_path / "run", **few)[0]
    report = trainer._report

    def spoil(*arguments: Any) -> None:
        if trainer.step == 2:
            for shadow in trainer.ema.shadows.values():
                shadow.fill_(math.nan)
        report(*arguments)

    trainer._report = spoil  # type: ignore[assignment]
    with pytest.raises(GdistillError, match=r"validation loss is not finite.*nan nats"):
        trainer.run()
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert all(bool(weight.isfinite().all()) for weight in trainer.parameters), "the averages are out of the model"


def steps(store: Path, out: Path, num: int, init_from: Path | None) -> bool:
    config = tiny_run(optimization__schedule="constant", training__num_steps=num)
    return bool(train(config, store, out, init_from=init_from))


def test_first_weights_are_known_by_content(store: Path, finished: Path, tmp_path: Path) -> None:
    """Not by place; a run that has begun does without them."""
    out, first = tmp_path / "run", shutil.copytree(finished / "model", tmp_path / "first")
    assert steps(store, out, 2, first)
    moved = first.rename(tmp_path / "moved")
    assert steps(store, out, 3, moved)
    other = shutil.copytree(moved, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["backbone.blocks.0.attn_out.weight"] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    before = {path: path.read_bytes() for path in out.rglob("*.safetensors")}
    for start, got in ((other, r"other \(weights"), (None, "none"), (tmp_path / "gone", "gone")):
        with pytest.raises(UsageError, match=rf"other weights \[--init-from\]; got .*{got}"):
            steps(store, out, 4, start)
    assert {p: p.read_bytes() for p in out.rglob("*.safetensors")} == before
    shutil.copytree(moved, first)
    shutil.rmtree(moved)
    assert steps(store, out, 4, moved), "its place is what was said last, and nothing is there now"
    assert steps(store, out, 5, first)
    assert str(tmp_path) not in (out / "model" / "student.json").read_text(), "which others read"


def test_runs_that_remember_a_place_alone(store: Path, finished: Path, tmp_path: Path) -> None:
    """They go on there; checkpoints were so before the content of first weights was recorded."""
    out, first = tmp_path / "run", shutil.copytree(finished / "model", tmp_path / "first")
    assert steps(store, out, 2, first)
    state = next(out.rglob("state.json"))
    record = json.loads(state.read_text())
    record["run"]["init_from"] = str(first)
    del record["sha256"]
    state.write_text(json.dumps(record))
    with pytest.raises(UsageError, match=r"other weights.*expected .*first \(weights not known\)"):
        steps(store, out, 3, finished)
    assert steps(store, out, 3, first)
    state = out / "checkpoints/step-00000003/state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "run": {"init_from": {}}, "sha256": None}))
    with pytest.raises(IntegrityError, match=r"unreadable checkpoint.*state\.json"):
        steps(store, out, 4, first)


def test_nan_loss_names_its_rows_and_keeps_the_last_checkpoint(store: Path, tmp_path: Path) -> None:
    out, spoiled = tmp_path / "run", {13, 29}
    trainer = trainer_of(store, out, training__checkpoint_every_steps=1, seed=1)[0]
    make_batch = trainer.make_batch

    def spoil(rows: RowBatch) -> Batch:
        batch = make_batch(rows)
        bad = torch.isin(batch.row_ids, torch.tensor(sorted(spoiled)))
        values = batch.token_log_probs.masked_fill(bad[:, None], math.nan)
        assert isinstance(batch.noise, StoredRowNoise)
        return replace(batch, noise=replace(batch.noise, token_log_probs=values))

    trainer.make_batch = spoil  # type: ignore[assignment]
    with pytest.raises(GdistillError, match="not finite") as caught:
        trainer.run()
    named = {int(row) for row in caught.value.got.split("rows ")[1].split(", ")}
    assert named and named <= spoiled
    failed = int(caught.value.where.removeprefix("step "))
    last = CheckpointFolder(out / "checkpoints", 2, None).steps()[-1]
    assert failed > 1 and last == failed - 1
    assert f"step {last}" in caught.value.remedy
    assert not (out / "model").exists()
    weights = load_file(out / "checkpoints" / f"step-{last:08d}" / "weights.safetensors")
    assert all(bool(value.isfinite().all()) for value in weights.values())


def test_a_gradient_that_is_not_finite_reaches_no_weight(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.training.loop.MAX_NAMED_ROWS", 4)
    trainer = trainer_of(store, tmp_path / "run")[0]
    before = copy.deepcopy(trainer.student.state_dict())
    trainer.parameters[0].register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(GdistillError, match=r"the gradient is not finite \[step 1\]") as caught:
        trainer.run()
    rows, _, more = caught.value.got.split("rows ")[1].partition(" and ")
    assert more == f"{trainer.config.training.global_batch_size - 4} more"
    assert [*map(int, rows.split(", "))] == sorted(map(int, rows.split(", "))) and rows.count(",") == 3
    assert all(torch.equal(before[n], w) for n, w in trainer.student.state_dict().items())


def test_rates_are_of_training_alone_and_lines_are_safe_before_a_checkpoint(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before the first step, a validation and a checkpoint take 1,000 seconds each here."""
    real, spent, order = time.monotonic, [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: real() + spent[0])
    monkeypatch.setattr(loop.MetricsFile, "sync", lambda _: order.append("sync"))
    every = {f"training__{what}_every_steps": 1 for what in ("validate", "checkpoint")}
    trainer, _ = trainer_of(store, tmp_path / "run", **every, training__num_steps=3)

    def slowly(work: Any, *given: Any) -> Any:
        order.append(work.__name__)
        spent[0] += 1000
        return work(*given)

    trainer._validate = partial(slowly, trainer._validate)  # type: ignore[method-assign]
    trainer.checkpoints.save = partial(slowly, trainer.checkpoints.save)  # type: ignore[method-assign]
    spent[0] += 1000
    assert trainer.run()
    assert all(line["seconds"] < 1000 for line in read_metrics(tmp_path / "run", "train"))
    assert order == 3 * ["_validate", "sync", "save"] + ["sync"]


def test_a_folder_takes_one_run_at_a_time_and_no_file_is_one(store: Path, tmp_path: Path) -> None:
    with exclusive(tmp_path / "run"), pytest.raises(UsageError, match="another run"):
        train(tiny_run(), store, tmp_path / "run")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "file/run", "link", "link/run"):
        with pytest.raises(UsageError, match="cannot write there"):
            train(tiny_run(), store, tmp_path / name)
    config = tmp_path / "model/config.json"
    config.parent.mkdir()
    config.write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError, match=r"another's config.*model/config\.json"):
        train(tiny_run(), store, config.parent)
    assert "gpt2" in config.read_text()


# Beside plain torch.


NUM_STEPS = 5
ADAMW = {"learning_rate": 3e-2, "beta1": 0.6, "beta2": 0.7, "weight_decay": 0.5}
ADAMW |= {"schedule": "cosine", "warmup_steps": 2, "max_grad_norm": 0.05, "ema_decay": 0.28}
SETTINGS = {"training": {"num_steps": NUM_STEPS, "micro_batch_size": 3}, "optimization": ADAMW}
RATES = (0.015, 0.03, 0.03, 0.015, 0.0)
"""Half the peak, the peak, then a half cosine over steps 2, 3, 4 from the peak to zero."""
DECAYS = (2 / 11, 3 / 12, 0.28, 0.28, 0.28)
"""(1 + n) / (10 + n) up to the limit."""


def make_trainer(store: Path, out: Path, *given: Any, **changes: Any) -> tuple[Trainer, Validator]:
    """A trainer whose weights are all away from zero, so that every one of them has a gradient."""
    trainer, validator = trainer_of(store, out, *given, **changes)
    torch.manual_seed(0)
    for name, parameter in trainer.student.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        trainer.ema.shadows[name].copy_(parameter.detach())
    return trainer, validator


def in_plain_torch(student: Any, batches: list[Batch]) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Weights and their average after AdamW, and the norms of its gradients before they were clipped."""
    weights, norms = list(student.parameters()), []
    averages = [w.detach().clone() for w in weights]
    optimizer = torch.optim.AdamW(weights, betas=(0.6, 0.7), weight_decay=0.5)
    for batch, rate, decay in zip(batches, RATES, DECAYS, strict=True):
        optimizer.zero_grad()
        student.loss(batch).loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights, 0.05)))
        assert norms[-1] > 2 * 0.05, "clipping must have something to do"
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        for average, weight in zip(averages, weights, strict=True):
            average.mul_(decay).add_((1 - decay) * weight.detach())
    return weights, averages, norms


def test_steps_are_those_of_plain_torch(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", partial(torch.optim.AdamW, eps=1e-3))
    trainer = make_trainer(store, tmp_path / "run", SETTINGS)[0]
    twin, start = copy.deepcopy(trainer.student), copy.deepcopy(trainer.student)
    rows = trainer._rows()
    batches = []
    for _ in range(NUM_STEPS):
        batches.append(trainer.make_batch(next(rows)))
        trainer.advance(batches[-1])
    weights, averages, norms = in_plain_torch(twin, batches)
    assert trainer.window.norm_sum == pytest.approx(sum(norms), rel=1e-4)
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


def at_a_standstill(store: Path, out: Path, dropout: float = 0.5, seed: int = 0, rank: int = 0) -> list[float]:
    """Losses of three steps over one batch whose learning rate is all but zero; ``seed`` and ``rank`` are those of
    dropout alone."""
    still = {"optimization__learning_rate": "1e-30", "training__num_steps": 3}
    trainer, _ = make_trainer(store, out, **still, model__dropout=dropout)
    batch, losses = next_batch(trainer), []
    trainer.config = replace(trainer.config, seed=seed)
    for _ in range(3):
        before = trainer.window.loss_sum
        with mock.patch.object(Accelerator, "process_index", rank):
            trainer.advance(batch)
        losses.append(trainer.window.loss_sum - before)
    return losses


def test_dropout_draws_anew_at_every_step_and_by_the_seed(store: Path, tmp_path: Path) -> None:
    """Without it only the weights change a loss."""
    losses = at_a_standstill(store, tmp_path / "a")
    assert len(set(losses)) == 3
    torch.manual_seed(123)
    assert at_a_standstill(store, tmp_path / "b") == losses
    for other in ({"seed": 1}, {"rank": 1}):
        assert at_a_standstill(store, tmp_path / "c", **other)[0] != losses[0]
    without = at_a_standstill(store, tmp_path / "d", dropout=0.0)
    assert without == pytest.approx([without[0]] * 3, rel=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_products_have_the_precision_asked_for(store: Path, tmp_path: Path, precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    trainer, validator = make_trainer(store, tmp_path / "run", training__precision=precision)
    seen = set()
    products = trainer.student.backbone.blocks[0].attn_qkv
    products.register_forward_hook(lambda _module, _inputs, output: seen.add(output.dtype))
    trainer.advance(next_batch(trainer))
    assert seen == {dtype}
    seen.clear()
    validator.score(trainer.module, trainer.student)
    assert seen == {dtype}


def test_validation_is_of_the_averaged_weights_without_dropout(store: Path, tmp_path: Path) -> None:
    trainer, validator = make_trainer(store, tmp_path / "run", model__dropout=0.5)
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
    trainer.metrics = mock.Mock(**{"write.side_effect": OSError(28, "no space left")})
    with pytest.raises(GdistillError, match=r"cannot write \[.*metrics\.jsonl\]; got no space left"):
        trainer._validate(validator)
    with mock.patch.object(Accelerator, "num_processes", 11), pytest.raises(UsageError, match="too few validation"):
        Validator(trainer.config, trainer.store, trainer.accelerator, True)


def test_clips_are_searched_each_under_its_own(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, validator = make_trainer(store, tmp_path / "run", **SEARCH)
    seen: dict[Any, Any] = {}
    few = (FULL, (0.5, 1.0), (0.2, 0.7), (0.05, 0.55))
    monkeypatch.setattr(loop, "candidates", lambda: few)
    monkeypatch.setattr(loop, "best_clips", lambda losses: seen.update(losses) or (0.5, 1.0))
    for most in (1, 2):
        monkeypatch.setattr(loop, "MAX_BATCHES", most)
        validator.search_clips(trainer.module, trainer.student)
        assert {len(losses) for losses in seen.values()} == {most}
    batch = next(validator._batches())
    for clips in few:
        with torch.no_grad():
            expected = trainer.student.loss(batch, time_bounds=clips).block_nlls
        torch.testing.assert_close(seen[clips][0], expected, rtol=1e-5, atol=1e-6)
    first = [values[0] for values in seen.values()]
    assert not any(torch.equal(first[0], other) for other in first[1:])
    for resample in ("true", "false"):
        own = {"model__block_size": 1, "model__diffusion__resample": resample}
        trainer, validator = make_trainer(store, tmp_path / resample, **{**SEARCH, **own})
        seen.clear()
        validator.search_clips(trainer.module, trainer.student)
        assert ((0.05, 0.55) in seen) == (resample == "false"), "no block of one token is half masked"
