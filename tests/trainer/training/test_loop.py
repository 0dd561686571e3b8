"""The loop: what it writes, that it learns, validation, precision, initial weights."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from shards.atomic import exclusive
from shards.errors import GdistillError, UsageError
from shards.store.store import ShardStore
from shards.stream.stream import RowBatch
from tests.trainer.run_cases import LENGTH, VOCAB, tiny_run, write_store
from trainer.objective.batch import Batch, StoredRowNoise
from trainer.students.registry import BD3LM, MDLM
from trainer.training.checkpoint import CheckpointFolder
from trainer.training.construction import build_student
from trainer.training.loop import Trainer, Validator, train

SEARCH = {"student": "bd3lm", "model__block_size": 4, "model__diffusion__search_schedule": "true"}
GATE = "backbone.blocks.0.attn_out.weight"


def read_metrics(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def trainer_of(store: Path, out: Path, **changes: Any) -> tuple[Trainer, Validator]:
    trainer = Trainer(tiny_run(**changes), ShardStore.open(store), out)
    assert trainer.validator is not None
    return trainer, trainer.validator


@pytest.fixture(scope="module")
def finished(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    assert train(tiny_run(training__trackers='["tensorboard"]'), store, out)
    return out


@pytest.fixture(scope="module")
def plain(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished student without noise."""
    out = tmp_path_factory.mktemp("plain") / "run"
    assert train(tiny_run(model__conditioning="none"), store, out)
    return out


def test_metrics_say_where_the_run_stands(finished: Path) -> None:
    lines = read_metrics(finished, "train")
    assert [line["step"] for line in lines] == [1, 3, 6, 9, 10]
    assert {line["num_steps"] for line in lines} == {10}
    assert lines[-1]["num_tokens"] == 10 * 8 * LENGTH
    assert all(line["tokens_per_second"] > 0 and math.isfinite(line["loss"]) for line in lines)
    assert [line["step"] for line in read_metrics(finished, "validation")] == [4, 8, 10]
    (events,) = (finished / "tensorboard").rglob("events.out.tfevents*")
    content = events.read_bytes()
    assert b"train/loss" in content and b"validation/nll_nats" in content


def test_model_folder_is_a_hugging_face_model(finished: Path) -> None:
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


def test_the_model_holds_the_averaged_weights(finished: Path) -> None:
    model = load_file(finished / "model" / "model.safetensors")
    checkpoint = finished / "checkpoints" / "step-00000010"
    averages = load_file(checkpoint / "ema.safetensors")
    weights = load_file(checkpoint / "weights.safetensors")
    assert set(model) == set(weights)
    assert all(torch.equal(model[name], value) for name, value in averages.items())
    name = "backbone.vocab_embed.embedding"
    assert not torch.equal(model[name], weights[name])


def test_validation_repeats_itself_and_leaves_training_alone(store: Path, tmp_path: Path) -> None:
    """The same figures whatever the micro-batches; of the first rows where only they are asked."""
    trainer, validator = trainer_of(store, tmp_path / "run")
    before = {name: p.detach().clone() for name, p in trainer.student.named_parameters()}
    first, again = (validator.score(trainer.module, trainer.student) for _ in range(2))
    assert first == again and first["num_tokens"] == 10 * (LENGTH - 1)
    assert first["nll_nats"] == pytest.approx(math.log(VOCAB), rel=0.5)  # uniform at the start
    assert all(torch.equal(p, before[name]) for name, p in trainer.student.named_parameters())
    for changes, rows in (
        ({"training__micro_batch_size": 3}, 10),
        ({"training__num_validation_rows": 5}, 5),
    ):
        trainer, validator = trainer_of(store, tmp_path / str(rows), **changes)
        score = validator.score(trainer.module, trainer.student)
        assert score["num_tokens"] == rows * (LENGTH - 1)
        same = score["nll_nats"] == pytest.approx(first["nll_nats"], rel=1e-6)
        assert same == (rows == 10)


@pytest.mark.parametrize("student", ["mdlm", "bd3lm", "ar"])
def test_every_student_trains_in_bf16_over_float32_weights(
    store: Path, tmp_path: Path, student: str
) -> None:
    small = {"training__precision": "bf16", "training__micro_batch_size": 3}
    small |= {"training__num_steps": 2, "student": student}
    small |= {"model__conditioning": "none"} if student == "ar" else {}
    small |= {"model__block_size": 4} if student == "bd3lm" else {}
    trainer, _ = trainer_of(store, tmp_path / "run", **small)
    assert trainer.run()
    assert {p.dtype for p in trainer.student.parameters()} == {torch.float32}
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(bool(w.isfinite().all()) for w in weights.values())


def test_a_batch_is_overfitted(tmp_path: Path) -> None:
    path = write_store(tmp_path / "store", "full", splits={"train": 8}, rows_per_shard=8)
    config = tiny_run(
        model__hidden_size=64,
        model__num_layers=2,
        training__num_steps=400,
        training__log_every_steps=50,
        optimization__learning_rate="5e-3",
        optimization__schedule="cosine",
    )
    assert train(config, path, tmp_path / "run")
    losses = [line["loss"] for line in read_metrics(tmp_path / "run", "train")]
    assert losses[-1] < 0.05  # the uniform guess is log 12 = 2.48 nats
    with pytest.raises(UsageError, match=r"needs validation rows.*search_schedule"):
        train(tiny_run(**SEARCH), path, tmp_path / "search")


def test_clips_are_searched_at_validation(store: Path, tmp_path: Path) -> None:
    more = {"model__diffusion__resample": "true", "training__num_steps": 2}
    trainer, _ = trainer_of(store, tmp_path / "run", **SEARCH, **more)
    assert trainer.run()
    (line,) = read_metrics(tmp_path / "run", "validation")
    chosen = torch.tensor([line["min_time"], line["max_time"]])
    torch.testing.assert_close(trainer.student.time_bounds, chosen)
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")["time_bounds"]
    torch.testing.assert_close(saved, chosen)


@pytest.mark.parametrize(
    ("student", "name", "value"),
    [
        ("mdlm", "block_size", 4),
        ("ar", "diffusion.search_schedule", "true"),
        ("ar", "block_size", 2),
        ("mdlm", "noise.prior_weight", 1.0),
        ("mdlm", "noise.transform", "uniform"),
        ("mdlm", "noise.injection", "add"),
    ],
)
def test_settings_of_another_student_are_refused(
    store: Path, student: str, name: str, value: object
) -> None:
    changes = {f"model__{name}": value, "model__conditioning": "none"}
    with pytest.raises(UsageError, match=rf"does not read \[model\.{name}\]"):
        build_student(tiny_run(student=student, **changes), ShardStore.open(store), None)


def test_a_validation_that_is_not_finite_ends_the_run(store: Path, tmp_path: Path) -> None:
    few = {"training__num_steps": 2, "training__validate_every_steps": 2}
    trainer, _ = trainer_of(store, tmp_path / "run", **few)
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


def steps(store: Path, out: Path, num: int, init_from: Path | None) -> bool:
    config = tiny_run(optimization__schedule="constant", training__num_steps=num)
    return bool(train(config, store, out, init_from=init_from))


def test_first_weights_are_known_by_content_and_not_by_place(
    store: Path, finished: Path, tmp_path: Path
) -> None:
    """A run that has begun does without them."""
    out, first = tmp_path / "run", shutil.copytree(finished / "model", tmp_path / "first")
    assert steps(store, out, 2, first)
    moved = first.rename(tmp_path / "moved")
    assert steps(store, out, 3, moved)
    other = shutil.copytree(moved, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights[GATE] += 1
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


def test_runs_that_remember_a_place_alone_go_on_there(
    store: Path, finished: Path, tmp_path: Path
) -> None:
    """As checkpoints were before the content of first weights was recorded."""
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


def test_a_model_lacking_a_weight_is_refused(store: Path, finished: Path, tmp_path: Path) -> None:
    model = shutil.copytree(finished / "model", tmp_path / "model")
    path = model / "model.safetensors"
    weights = load_file(path)
    del weights[GATE]
    save_file(weights, path, metadata={"format": "pt"})
    for message in (r"do not fit.*attn_out", "cannot be loaded"):
        with pytest.raises(UsageError, match=message):
            build_student(tiny_run(), ShardStore.open(store), model)
        path.write_bytes(path.read_bytes()[:-100])


def test_init_from_takes_the_weights_to_another_block_size(store: Path, finished: Path) -> None:
    config = tiny_run(student="bd3lm", model__block_size=2)
    student = build_student(config, ShardStore.open(store), finished)
    assert isinstance(student, BD3LM) and student.num_blocks == 4
    saved = load_file(finished / "model" / "model.safetensors")
    assert all(torch.equal(parameter, saved[n]) for n, parameter in student.named_parameters())


@pytest.mark.parametrize(("layers", "top_k"), [("[]", 0), ("[1]", 0), ("[1]", 5)])
def test_noise_is_added_to_a_student_that_has_seen_none(
    store: Path, plain: Path, tmp_path: Path, layers: str, top_k: int
) -> None:
    """The first loss is the source's to the last bit, whatever the noise, and noise is learnt."""
    opened, added = ShardStore.open(store), {"model__noise__injection": "add"}
    before = build_student(tiny_run(model__conditioning="none"), opened, plain)
    config = tiny_run(**added, model__noise__layers=layers, model__noise__top_k=top_k)
    student = build_student(config, opened, plain)
    trainer = Trainer(config, opened, tmp_path / "run", plain)
    batch = trainer.make_batch(next(trainer._rows()), 0)
    output = student.loss(batch)
    assert torch.equal(output.loss, before.loss(replace(batch, noise=None)).loss)
    output.loss.backward()
    for name, parameter in student.named_parameters():
        if name.startswith(("conditioner", "backbone.noise_readings")) and name.endswith("weight"):
            assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0), name
    with pytest.raises(UsageError, match=r"model.noise.injection.*expected add"):
        build_student(tiny_run(), opened, plain)


def test_prior_weight_takes_the_stores_unigram(store: Path) -> None:
    student = build_student(tiny_run(model__noise__prior_weight=1.0), ShardStore.open(store), None)
    assert student.conditioner is not None and student.conditioner.unigram_log_probs is not None
    expected = torch.full((VOCAB,), -math.log(VOCAB))
    torch.testing.assert_close(student.conditioner.unigram_log_probs, expected)


def test_initial_weights_depend_on_the_run_seed_alone(store: Path) -> None:
    opened = ShardStore.open(store)
    first = build_student(tiny_run(seed=1), opened, None).state_dict()
    torch.manual_seed(99)
    again = build_student(tiny_run(seed=1), opened, None).state_dict()
    other = build_student(tiny_run(seed=2), opened, None).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_nan_loss_names_its_rows_and_keeps_the_last_checkpoint(store: Path, tmp_path: Path) -> None:
    out, spoiled = tmp_path / "run", {13, 29}
    trainer, _ = trainer_of(store, out, training__checkpoint_every_steps=1, seed=1)
    make_batch = trainer.make_batch

    def spoil(rows: RowBatch, step: int) -> Batch:
        batch = make_batch(rows, step)
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


def test_a_folder_takes_one_run_at_a_time_and_no_file_is_one(store: Path, tmp_path: Path) -> None:
    with exclusive(tmp_path / "run"), pytest.raises(UsageError, match="another run"):
        train(tiny_run(), store, tmp_path / "run")
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match="cannot write there"):
            train(tiny_run(), store, out)
