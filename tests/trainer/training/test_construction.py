"""What a training begins with: its student and first weights, learning rates, AdamW, averages.

The steps together are compared with plain torch by test_loop, with the authors' by test_benchmarks.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.trainer.run_cases import LENGTH, VOCAB, next_batch, student_of, tiny_run, trainer_of, write_store
from trainer.students.folder import read_model
from trainer.students.registry import BD3LM
from trainer.training.loop import train
from trainer.training.settings import build_student

PLAIN = {"model__conditioning": "none"}
SEQUENCE, TOKEN = {"model__kd__kind": "sequence"}, {"model__kd__kind": "token"}
OTHERS = (
    ("mdlm", "block_size", 4),
    ("ar", "diffusion.search_schedule", "true"),
    ("ar", "block_size", 2),
    ("mdlm", "noise.prior_weight", 1.0),
    ("mdlm", "noise.transform", "uniform"),
    ("mdlm", "noise.injection", "add"),
)
"""Settings that a plain student does not read."""


@pytest.fixture(scope="module")
def plain(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run of a student without noise."""
    out = tmp_path_factory.mktemp("plain") / "run"
    assert train(tiny_run(**PLAIN), store, out)
    return out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"student": s, f"model__{n}": value, **PLAIN}, rf"does not read \[model\.{n}\]") for s, n, value in OTHERS),
        ({"training__num_noise_draws": 2, **PLAIN}, "no draws to count"),
        ({"model__noise__rank": 2, **PLAIN}, "does not read"),
        ({"model__kd__weight": 0.5}, "kd.kind=none"),
        ({"model__kd__temperature": 2, **SEQUENCE}, "kd.kind=sequence"),
        (SEQUENCE, "needs rows of the teacher.*a store of parallel extraction"),
        ({"model__kd_weight": 0.5}, "unknown config key.*kd_weight"),
    ],
)
def test_refused_settings(store: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        student_of(store, **settings)


@pytest.mark.parametrize("codec", ["seeded", "topk", "quantized", "full"])
def test_a_frozen_draw_is_no_teacher(tmp_path: Path, codec: str) -> None:
    store = write_store(tmp_path / "store", codec)
    draws = {"training__num_noise_draws": 2}
    for settings, message in ((TOKEN, rf"one draw of the noise.*{codec}.*posterior or hidden"), (draws, "no draws")):
        with pytest.raises(UsageError, match=message):
            student_of(store, **settings)


def test_a_student_takes_the_stores_shape_ends_and_unigram(store: Path) -> None:
    manifest = replace(ShardStore.open(store).manifest, eos_id=3)
    made, without_bos = (BD3LM.configure(tiny_run().model, m) for m in (manifest, replace(manifest, bos_id=None)))
    assert (made.vocab_size, made.row_length, made.bos_token_id, made.eos_token_id) == (VOCAB, LENGTH, 0, 3)
    assert (made.first_token_id, without_bos.first_token_id) == (0, 3)
    student = student_of(store, model__noise__prior_weight=1.0)
    assert student.conditioner is not None and student.conditioner.unigram_log_probs is not None
    expected = torch.full((VOCAB,), -math.log(VOCAB))
    torch.testing.assert_close(student.conditioner.unigram_log_probs, expected)
    opened = ShardStore.open(store)
    opened.resources.clear()
    with pytest.raises(UsageError, match=r"no corpus unigram \[model.noise.prior_weight\]"):
        build_student(tiny_run(model__noise__prior_weight=1.0), opened, None)


def test_initial_weights_depend_on_the_run_seed_alone(store: Path) -> None:
    first = student_of(store, seed=1).state_dict()
    torch.manual_seed(99)
    again, other = (student_of(store, seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_model_of_another_shape_or_lacking_a_weight_is_refused(store: Path, finished: Path, tmp_path: Path) -> None:
    model = shutil.copytree(finished / "model", tmp_path / "model")
    path = model / "model.safetensors"
    weights = load_file(path)
    del weights["backbone.blocks.0.attn_out.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    for message in (r"do not fit.*attn_out", "cannot be loaded"):
        with pytest.raises(UsageError, match=message):
            student_of(store, model)
        path.write_bytes(path.read_bytes()[:-100])
    for own, noise, message in (
        ({"vocab_size": 16}, "gumbel", "another vocab_size than the store.*got 12; expected the store's 16"),
        ({"row_length": 16}, "gumbel", "another row_length than the store.*got 8; expected the store's 16"),
        ({}, "none", r"do not fit.*unexpected: conditioner\.weight"),
    ):
        other = write_store(tmp_path / message[:11], **own)
        with pytest.raises(UsageError, match=message):
            student_of(other, finished, model__conditioning=noise)


def test_init_from_takes_the_weights_to_another_block_size(store: Path, finished: Path) -> None:
    """The clips of t are the run's own, the unigram the store's."""
    own = {"model__diffusion__min_time": 0.2, "model__noise__prior_weight": 1.0}
    student = student_of(store, finished, student="bd3lm", model__block_size=2, **own)
    assert isinstance(student, BD3LM) and student.num_blocks == 4 and student.clips == (0.2, 1.0)
    saved = load_file(finished / "model" / "model.safetensors")
    assert all(torch.equal(parameter, saved[n]) for n, parameter in student.named_parameters())
    assert bool(student.get_buffer("conditioner.unigram_log_probs").isfinite().all())


@pytest.mark.parametrize(
    "noise", [{}, {"layers": "[1]"}, {"layers": "[1]", "top_k": 5}, {"rank": 4}, {"projection": "tied"}]
)
def test_noise_added_to_a_student_that_has_seen_none_begins_silent_and_learns(
    store: Path, plain: Path, tmp_path: Path, noise: dict[str, Any]
) -> None:
    """The first loss is the source's to the last bit, whatever the noise, and noise is learnt."""
    settings = {f"model__noise__{name}": value for name, value in noise.items()}
    student = student_of(store, plain, model__noise__injection="add", **settings)
    batch = next_batch(trainer_of(store, tmp_path / "run")[0])
    assert next_batch(trainer_of(store, tmp_path / "none", **PLAIN)[0]).noise is None, "which nobody reads there"
    output, source = student.loss(batch), read_model(plain / "model").train()
    assert torch.equal(output.loss, source.loss(replace(batch, noise=None)).loss)
    output.loss.backward()
    learns = {
        name: parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        for name, parameter in student.named_parameters()
        if name.startswith(("conditioner", "backbone.noise_readings")) and name.endswith("weight")
    }
    is_product = bool({"rank", "projection"} & set(noise))  # one of its two factors is zero
    assert any(learns.values()) if is_product else all(learns.values()), learns
    with pytest.raises(UsageError, match=r"model.noise.injection.*expected add"):
        student_of(store, plain)
