"""MDLM as a Hugging Face model and as an objective."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from benchmarks.goldens import ArrivalRows
from shards.errors import UsageError
from shards.settings import resolve, to_mapping
from trainer.objective.batch import Batch
from trainer.objective.corruption import FULL
from trainer.students.configuration import DiffusionSettings
from trainer.students.dit import full_attention
from trainer.students.registry import MDLM, MDLMConfig, StudentSettings, read_preset

VOCAB, LENGTH = 11, 8
TINY = StudentSettings(
    hidden_size=16, num_layers=2, num_heads=2, condition_size=8, dropout=0.0, conditioning="gumbel"
)


def make_student(settings: StudentSettings = TINY, seed: int = 0) -> MDLM:
    torch.manual_seed(seed)
    student = MDLM(MDLMConfig.build(settings, vocab_size=VOCAB, row_length=LENGTH)).eval()
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return student


def make_batch(num_rows: int = 4, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, LENGTH, VOCAB)
    arrivals = -torch.log1p(-torch.rand(shape, generator=generator))
    return Batch(
        tokens=torch.randint(VOCAB, shape[:2], generator=generator),
        token_log_probs=torch.zeros(shape[:2]),
        row_ids=torch.arange(100, 100 + num_rows),
        slots=torch.arange(num_rows),
        global_batch_size=num_rows,
        step=0,
        epoch=0,
        seed=7,
        noise=ArrivalRows(arrivals),
    )


def test_round_trip_through_auto_classes(tmp_path: Path) -> None:
    student = make_student()
    student.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, MDLM)
    assert loaded.config.settings == TINY
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == VOCAB
    saved, read = student.state_dict(), loaded.state_dict()
    assert saved.keys() == read.keys()
    assert all(torch.equal(saved[name], read[name]) for name in saved)


def test_fresh_student_predicts_uniformly() -> None:
    student = MDLM(MDLMConfig.build(TINY, vocab_size=VOCAB, row_length=LENGTH)).eval()
    tokens = torch.full((2, LENGTH), student.mask_id)
    log_probs = student.predict(tokens)
    assert torch.allclose(log_probs[..., :VOCAB].exp(), torch.full((), 1 / VOCAB))


def test_predict_carries_known_tokens_and_never_the_mask() -> None:
    student, batch = make_student(), make_batch()
    tokens = batch.tokens.clone()
    tokens[:, 3:] = student.mask_id
    log_probs = student.predict(tokens)
    assert torch.equal(log_probs[:, :3].argmax(-1), batch.tokens[:, :3])
    assert (log_probs[:, :3].amax(-1) == 0).all()
    assert (log_probs[:, 3:, student.mask_id] < -9e5).all()
    assert torch.allclose(log_probs[:, 3:].exp().sum(-1), torch.ones(()))


def test_validation_keeps_the_bound() -> None:
    """Training's weights and times do not enter a loss whose clips are given."""
    plain, batch = make_student(), make_batch()
    changes = DiffusionSettings(max_loss_weight=1.0, fully_masked_share=0.5)
    tuned = make_student(dataclasses.replace(TINY, diffusion=changes))
    bound = plain.corrupt(batch, FULL)
    assert torch.equal(tuned.corrupt(batch, FULL).t, bound.t)
    assert torch.equal(tuned.corrupt(batch, FULL).weight, bound.weight)
    assert (tuned.corrupt(batch).weight == 1).all()
    assert not torch.equal(tuned.corrupt(batch).t, plain.corrupt(batch).t)


def test_loss_equals_dense_formulation() -> None:
    student, batch = make_student(), make_batch()
    corruption = student.corrupt(batch)
    student.loss(batch).loss.backward()
    sparse = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()
    noised = batch.tokens.masked_fill(corruption.mask, student.mask_id)
    xi = -torch.log(batch.noise.arrivals)
    condition = torch.softmax(xi, dim=-1) @ student.conditioner.weight
    log_probs = student.predict(noised, condition)
    nll = -log_probs.gather(-1, batch.tokens[..., None])[..., 0]
    dense = (nll * corruption.weight * corruption.mask).sum() / batch.tokens.numel()
    dense.backward()
    assert torch.allclose(student.loss(batch).loss, dense, rtol=1e-5)
    for name, parameter in student.named_parameters():
        assert torch.allclose(sparse[name], parameter.grad, rtol=1e-4, atol=1e-6), name


def test_split_batch_gives_the_same_loss() -> None:
    student, batch = make_student(), make_batch(4)
    whole = student.loss(batch)
    parts = []
    for rows in (slice(0, 2), slice(2, 4)):
        part = dataclasses.replace(
            batch,
            tokens=batch.tokens[rows],
            token_log_probs=batch.token_log_probs[rows],
            row_ids=batch.row_ids[rows],
            slots=batch.slots[rows],
            noise=batch.noise.rows(rows),
        )
        parts.append(student.loss(part))
    token_nlls = torch.cat([part.token_nlls for part in parts])
    assert torch.allclose(token_nlls, whole.token_nlls, atol=1e-5)
    assert torch.allclose((parts[0].loss + parts[1].loss) / 2, whole.loss, rtol=1e-5)


def test_conditioned_student_needs_noise() -> None:
    batch = dataclasses.replace(make_batch(), noise=None)
    with pytest.raises(UsageError, match="no noise"):
        make_student().loss(batch)
    plain = make_student(dataclasses.replace(TINY, conditioning="none"))
    with pytest.raises(UsageError, match="takes no noise"):
        plain.embed_noise(make_batch().noise.at(torch.ones(4, LENGTH, dtype=torch.bool)))


def test_forward_refuses_what_it_would_ignore() -> None:
    student, tokens = make_student(), torch.full((4, LENGTH), VOCAB)
    with pytest.raises(UsageError, match=r"needs the noise.*noise_embeddings"):
        student(tokens)
    known = make_batch().tokens
    padded = torch.ones_like(known)
    padded[0, -1] = 0
    for change, named in (
        ({"attention_mask": padded}, "attention_mask"),
        ({"labels": known}, r"labels.*student\.loss"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"inputs_embeds": torch.zeros(1)}, "inputs_embeds"),
    ):
        with pytest.raises(UsageError, match=named):
            student(known, **change)
    plain = make_student(dataclasses.replace(TINY, conditioning="none"))
    whole = {"attention_mask": torch.ones_like(known), "use_cache": True, "return_dict": None}
    assert torch.equal(plain(tokens, **whole).logits, plain(tokens).logits)


@pytest.mark.parametrize("name", ["tiny", "small", "medium", "maze"])
def test_presets_are_valid(name: str) -> None:
    assert StudentSettings(**read_preset(name)).num_layers >= 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 15}, "hidden_size"),
        ({"dropout": 1.0}, "dropout"),
        ({"diffusion": {"min_time": 0.9, "max_time": 0.5}}, "min_time"),
        ({"noise": {"injection": "concat"}}, "injection"),
        ({"noise": {"prior_weight": -1.0}}, "prior_weight"),
    ],
)
def test_bad_settings_are_named(change: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        resolve(StudentSettings, to_mapping(TINY), change)


def test_block_size_must_divide_the_row() -> None:
    settings = dataclasses.replace(TINY, block_size=3)
    with pytest.raises(UsageError, match="block_size"):
        MDLMConfig.build(settings, vocab_size=VOCAB, row_length=LENGTH)


def test_unigram_is_saved_with_the_weights(tmp_path: Path) -> None:
    student = make_student(
        resolve(StudentSettings, to_mapping(TINY), {"noise": {"prior_weight": 1.0}})
    )
    log_probs = torch.log_softmax(torch.arange(VOCAB).float(), dim=0)
    student.conditioner.set_unigram(log_probs)
    student.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.conditioner.unigram_log_probs, log_probs)
    batch = make_batch()
    torch.testing.assert_close(loaded.eval().loss(batch).loss, student.loss(batch).loss)


def test_bfloat16_weights_train_and_predict(tmp_path: Path) -> None:
    student, batch = make_student(), make_batch()
    student.save_pretrained(tmp_path)
    narrow = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    exact, rounded = student.loss(batch).loss, narrow.loss(batch).loss
    assert rounded.item() == pytest.approx(exact.item(), rel=2e-2)
    rounded.backward()
    assert narrow.conditioner.weight.grad.dtype == torch.bfloat16
    tokens = torch.full((2, LENGTH), narrow.mask_id)
    assert narrow.predict(tokens).isfinite().all()


def test_autocast_changes_little() -> None:
    student, batch = make_student(), make_batch()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = student.loss(batch).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(student.loss(batch).loss.item(), rel=2e-2)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in student.parameters())


def test_dropout_is_of_what_a_block_adds() -> None:
    """In training nearly all of it is dropped, and the embeddings stay; elsewhere nothing is."""
    student = make_student(dataclasses.replace(TINY, dropout=1 - 1e-7)).train()
    x, level = torch.randn(2, LENGTH, 16), student.backbone.embed_sigma(torch.zeros(1))
    run = (x, level, torch.arange(LENGTH), full_attention)
    torch.testing.assert_close(student.backbone(*run), x, rtol=0, atol=1e-5)
    assert not torch.allclose(student.eval().backbone(*run), x, atol=1e-2)
