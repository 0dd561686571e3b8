"""MDLM, BD3-LM and AR as Hugging Face models, as objectives, and behind a cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from benchmarks.goldens import denoise, predict
from shards.errors import UsageError
from shards.settings import nested
from tests.trainer.students.student_cases import BLOCK, LENGTH, VOCAB, make_batch, make_student, row_noise
from trainer.objective.corruption import FULL, masked_log_probs
from trainer.students import bd3lm
from trainer.students.bd3lm import flex_training_attention, training_mask
from trainer.students.conditioning import EmbeddedNoise
from trainer.students.dit import full_attention, masked_attention
from trainer.students.folder import read_model
from trainer.students.registry import AR, BD3LM, MDLM, StudentSettings, read_preset

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [MDLM, BD3LM])
def test_round_trip_through_auto_classes(tmp_path: Path, kind: type[MDLM]) -> None:
    """Weights, clips and the corpus' unigram; the same weights elsewhere may sum in other order."""
    student, batch = make_student(kind, noise={"prior_weight": 1.0}), make_batch()
    assert student.clips == FULL
    student.time_bounds.copy_(torch.tensor([0.3, 0.8]))  # as a search for clips does
    assert student.clips == (0.3, 0.8)
    student.conditioner.set_unigram(torch.arange(VOCAB).float().log_softmax(0))
    student.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(AutoModelForMaskedLM.from_pretrained(tmp_path)) is kind
    assert loaded.config.settings == student.settings and loaded.clips == (0.3, 0.8)
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == VOCAB
    saved, read = student.state_dict(), loaded.state_dict()
    assert saved.keys() == read.keys()
    assert all(torch.equal(saved[name], read[name]) for name in saved)
    torch.testing.assert_close(loaded.loss(batch).loss, student.loss(batch).loss)


def test_predict_carries_known_tokens_and_never_the_mask() -> None:
    """A new student predicts all others alike."""
    new = predict(make_student(std=None), torch.full((2, LENGTH), VOCAB))
    assert torch.allclose(new[..., :VOCAB].exp(), torch.full((), 1 / VOCAB))
    student, batch = make_student(), make_batch()
    tokens = batch.tokens.clone()
    tokens[:, 3:] = student.mask_id
    log_probs = predict(student, tokens)
    assert torch.equal(log_probs[:, :3].argmax(-1), batch.tokens[:, :3])
    assert (log_probs[:, :3].amax(-1) == 0).all()
    assert (log_probs[:, 3:, student.mask_id] < -9e5).all()
    assert torch.allclose(log_probs[:, 3:].exp().sum(-1), torch.ones(()))


def test_validation_keeps_the_bound() -> None:
    """Training's weights and times do not enter a loss whose clips are given."""
    plain, batch = make_student(), make_batch()
    tuned = make_student(diffusion={"max_loss_weight": 1.0, "fully_masked_share": 0.5})
    bound = plain.corrupt(batch, FULL)
    assert torch.equal(tuned.corrupt(batch, FULL).t, bound.t)
    assert torch.equal(tuned.corrupt(batch, FULL).weight, bound.weight)
    assert (tuned.corrupt(batch).weight == 1).all()
    assert not torch.equal(tuned.corrupt(batch).t, plain.corrupt(batch).t)


def test_loss_equals_dense_formulation() -> None:
    student, batch = make_student(noise={"tau": 0.7}, diffusion={"time_conditioning": True}), make_batch()
    corruption = student.corrupt(batch)
    student.loss(batch).loss.backward()
    sparse = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()
    noised = batch.tokens.masked_fill(corruption.mask, student.mask_id)
    xi = -torch.log(batch.noise.arrivals)
    condition = EmbeddedNoise(torch.softmax(0.7 * xi, dim=-1) @ student.conditioner.weight)
    log_probs = masked_log_probs(student(noised, condition, corruption.sigma).logits, student.mask_id)
    nll = -log_probs.gather(-1, batch.tokens[..., None])[..., 0]
    dense = (nll * corruption.weight * corruption.mask).sum() / batch.tokens.numel()
    dense.backward()
    assert torch.allclose(student.loss(batch).loss, dense, rtol=1e-5)
    for name, parameter in student.named_parameters():
        assert torch.allclose(sparse[name], parameter.grad, rtol=1e-4, atol=1e-6), name


def test_forward_refuses_what_it_would_ignore() -> None:
    student, known = make_student(), make_batch().tokens
    tokens, padded = known.index_fill(1, torch.tensor([3]), VOCAB), torch.ones_like(known)
    padded[0, -1] = 0
    for model, given, change, named in (
        (student, tokens, {}, r"needs the noise.*noise_embeddings"),
        (student, known, {"attention_mask": padded}, "attention_mask"),
        (student, known, {"labels": known}, r"labels.*student\.loss"),
        (student, known, {"output_hidden_states": True}, "output_hidden_states"),
        (student, known, {"output_attentions": True}, "output_attentions"),
        (student, known, {"return_dict": False}, "return_dict"),
        (student, known, {"inputs_embeds": torch.zeros(1)}, "inputs_embeds"),
        (make_student(AR), known, {"labels": known}, "labels"),
        (make_student(AR), known, {"attention_mask": torch.zeros_like(known)}, "attention_mask"),
    ):
        with pytest.raises(UsageError, match=named):
            model(given, **change)
    plain = make_student(conditioning="none")
    whole = {"attention_mask": torch.ones_like(known), "return_dict": None, "output_attentions": False}
    for use_cache in (True, False):
        assert torch.equal(plain(tokens, **whole, use_cache=use_cache).logits, plain(tokens).logits)


OUTSIDE = ("hidden_size", "noise.tau", "diffusion.max_time", "kd.temperature", "backbone.num_proposed")
BAD_SETTINGS = [
    *((nested(name.split("."), 0), rf"out of range \[model\.{name}\]") for name in OUTSIDE),
    ({"hidden_size": 14}, "hidden_size.*a multiple of 4"),
    ({"block_size": 3}, "block_size"),
    ({"attention": "flex"}, "attention.*narrower than 16"),
    ({"diffusion": {"min_time": 0.9, "max_time": 0.5}}, "min_time"),
    ({"noise": {"rank": 17}}, r"noise\.rank.*at most hidden_size = 16"),
    ({"noise": {"rank": 2, "projection": "tied"}}, r"noise\.rank.*a projection of its own"),
    ({"noise": {"layers": [0]}}, r"noise\.layers"),
    ({"noise": {"layers": [3]}}, r"noise\.layers"),
    ({"noise": {"layers": [1]}, "conditioning": "none"}, r"noise\.layers"),
    ({"noise": {"layers": [1], "transform": "uniform"}}, r"noise\.layers"),
    ({"noise": {"top_k": 2}}, "noise.top_k.*got 2"),
    ({"noise": {"layers": [1], "top_k": VOCAB + 1}}, rf"noise.top_k.*at most V = {VOCAB}"),
]


def test_presets_are_valid_and_bad_settings_are_named() -> None:
    for name in ("tiny", "small", "medium", "maze"):
        assert StudentSettings(**read_preset(name)).num_layers >= 2
    assert make_student(noise={"rank": 16}).conditioner.weight.shape == (VOCAB, 16), "the largest rank"
    for change, named in BAD_SETTINGS:
        with pytest.raises(UsageError, match=named):
            make_student(**change)
    for name in ("vocab_size", "row_length"):
        with pytest.raises(UsageError, match=rf"model\.{name}.*got 1; expected at least 2"):
            MDLM.config_class.build(StudentSettings(), **{name: 1})


def test_noise_goes_to_students_that_read_it_alone() -> None:
    batch, plain = make_batch(), make_student(conditioning="none")
    with pytest.raises(UsageError, match="no noise"):
        make_student().loss(dataclasses.replace(batch, noise=None))
    with pytest.raises(UsageError, match="takes no noise"):
        row_noise(plain, batch)
    with pytest.raises(UsageError, match="takes no noise"):
        make_student(AR, conditioning="gumbel")


def test_bfloat16_weights_and_autocast_change_little(tmp_path: Path) -> None:
    student, batch = make_student(), make_batch()
    exact = student.loss(batch).loss.item()
    student.save_pretrained(tmp_path)
    narrow = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    rounded = narrow.loss(batch).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(exact, rel=2e-2)
    assert narrow.conditioner.weight.grad.dtype == torch.bfloat16
    assert predict(narrow, torch.full((2, LENGTH), narrow.mask_id)).isfinite().all()
    three = torch.randn(3, 1, 2, 40, 16).bfloat16()
    assert torch.equal(full_attention(*three), full_attention(*three.float()).bfloat16()), "attention of a CPU"
    assert narrow.backbone.output_layer.norm_final(three).dtype == torch.float32
    assert masked_log_probs(three, 0).dtype == torch.float32
    narrow.save_pretrained(tmp_path)
    assert read_model(tmp_path).dtype == torch.float32, "a student is read in full precision"
    with torch.autocast("cpu", torch.bfloat16):
        rounded = student.loss(batch).loss
    rounded.backward()
    assert rounded.item() == pytest.approx(exact, rel=2e-2)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in student.parameters())


def test_dropout_is_of_what_a_block_adds() -> None:
    """In training nearly all of it is dropped, and the embeddings stay; elsewhere nothing is."""
    student = make_student(dropout=1 - 1e-7, mlp_ratio=3).train()
    x, level = torch.randn(2, LENGTH, 16), student.backbone.embed_sigma(torch.zeros(1))
    run = (x, level, torch.arange(LENGTH), full_attention)
    torch.testing.assert_close(student.backbone(*run), x, rtol=0, atol=1e-5)
    assert not torch.allclose(student.eval().backbone(*run), x, atol=1e-2)
    assert student.backbone.blocks[0].mlp[0].out_features == 3 * 16
    assert student.backbone(x[:0], *run[1:3], pytest.fail).shape == (0, LENGTH, 16), "no kernel is asked about no rows"


# Attention in blocks.


def test_blocks_of_the_loss() -> None:
    student, batch = make_student(BD3LM), make_batch()
    output = student.loss(batch)
    assert output.block_nlls.shape == (4, 2) and output.num_tokens == 4 * (LENGTH - 1)
    assert torch.allclose(output.block_nlls.sum(1) * BLOCK, output.row_nlls)
    both = torch.stack((output.nll_sum, output.row_nlls.sum())) / batch.tokens.numel()
    assert torch.allclose(both, output.loss, rtol=1e-5)
    assert student.loss(batch, time_bounds=(0.9, 1.0)).num_masked > output.num_masked


def test_flex_and_sdpa_agree() -> None:
    query, key, value = torch.randn(3, 2, 2, 2 * LENGTH, 16).unbind(0)
    dense = masked_attention(training_mask(LENGTH, BLOCK, CPU))(query, key, value)
    found = flex_training_attention(LENGTH, BLOCK, CPU)(query, key, value)
    assert torch.allclose(found, dense, atol=1e-5)
    sdpa, flex = (make_student(BD3LM, attention=name) for name in ("sdpa", "flex"))
    batch = make_batch()
    noised = batch.tokens.masked_fill(sdpa.corrupt(batch).mask, sdpa.mask_id)
    with torch.no_grad():
        expected = denoise(sdpa, noised, batch.tokens)
        assert torch.allclose(denoise(flex, noised, batch.tokens), expected, atol=1e-5)
    with pytest.raises(UsageError, match=r"no gradient.*model\.attention.*auto"):
        flex.loss(batch)
    with pytest.raises(UsageError, match="time-conditioned"):
        make_student(BD3LM, diffusion={"time_conditioning": True}).start_cache(1)


def test_one_block_is_mdlm() -> None:
    block = make_student(BD3LM, block_size=None, noise={"layers": [1]})
    plain = make_student(hidden_size=32, noise={"layers": [1]})
    plain.load_state_dict(block.state_dict())
    batch = make_batch()
    assert torch.equal(block.loss(batch).loss, plain.loss(batch).loss)


def test_later_blocks_and_the_noised_past_are_not_seen() -> None:
    """Of [0..3 | 4..7], the second block noised: its own tokens and the clean first block."""
    student, clean = make_student(BD3LM), make_batch().tokens
    noised = clean.clone()
    noised[:, 5:] = student.mask_id
    base = denoise(student, noised, clean)[:, 4:]
    changed, future, past = noised.clone(), clean.clone(), clean.clone()
    changed[:, :4] = student.mask_id
    future[:, 4:] = (future[:, 4:] + 1) % VOCAB
    past[:, 1] = (past[:, 1] + 1) % VOCAB
    assert torch.allclose(base, denoise(student, changed, future)[:, 4:], atol=1e-6)
    assert not torch.allclose(base, denoise(student, noised, past)[:, 4:], atol=1e-4)
    first = denoise(student, noised, clean)[:, :4]
    assert torch.allclose(first, denoise(student, noised, future)[:, :4], atol=1e-6)


def test_clips_are_kept_and_enforced_when_they_close() -> None:
    """They pass through a float32 buffer, in which 1e-3 is a little more than 1e-3: still open."""
    for low, high in ((4e-7, 1.0), (1e-3, 0.95), (0.123456, 0.7)):
        assert make_student(diffusion={"min_time": low, "max_time": high}).clips == (low, high)
    free, batch = make_student(BD3LM), make_batch(64)
    mask = make_student(BD3LM, diffusion={"resample": True}).corrupt(batch).mask
    assert torch.equal(mask, free.corrupt(batch).mask)
    assert bool((~mask.unflatten(1, (-1, BLOCK)).any(dim=-1)).any())
    closed = {"resample": True, "min_time": 0.5, "max_time": 0.5}
    mask = make_student(BD3LM, diffusion=closed).corrupt(batch).mask
    assert bool((mask[:, BLOCK:].sum(-1) == BLOCK // 2).all())


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_no_rows_cost_nothing(attention: str) -> None:
    for student in (make_student(BD3LM, attention=attention), make_student(AR)):
        with torch.no_grad():
            output = student.loss(make_batch(2).rows(slice(0)))
        assert output.nll_sum == 0.0 and output.num_tokens == output.num_masked == 0


def test_training_goes_on_without_flexattention_and_says_so(monkeypatch: Any, capsys: Any) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no gcc")

    device = torch.device("cuda", 3)
    monkeypatch.setattr(bd3lm, "flex_training_attention", broken)
    bd3lm.flex_works.cache_clear()
    assert not bd3lm.flex_works(device) and not bd3lm.flex_works(device)
    said = capsys.readouterr().err
    assert said.count("FlexAttention fails: no gcc") == 1 and "sdpa on cuda:3" in said
    # Where it works, heads of 16 take it on a GPU, and narrower ones do not.
    mask = torch.ones(1, 1, dtype=torch.bool)
    for name, made in (("flex_works", True), ("training_mask", mask), ("flex_training_attention", full_attention)):
        monkeypatch.setattr(bd3lm, name, lambda *_, made=made: made)
    wide, narrow = (make_student(BD3LM, hidden_size=w)._training_attention(LENGTH, device) for w in (32, 16))
    assert wide is full_attention is not narrow


# The autoregressive baseline.


def test_ar_loss_is_the_mean_nll_of_the_next_token() -> None:
    student, batch = make_student(AR, std=0.2), make_batch(3)
    output, log_probs = student.loss(batch), student.predict(batch.tokens)
    nlls = -log_probs[:, :-1].gather(-1, batch.tokens[:, 1:, None])[..., 0]
    assert torch.allclose(output.loss, nlls.mean(), rtol=1e-5)
    assert torch.allclose(output.token_nlls[:, 1:], nlls, atol=1e-5)
    assert output.num_tokens == output.num_masked == 3 * (LENGTH - 1)
    assert (log_probs[..., VOCAB] < -9e5).all()
    assert not [n for n, _ in student.named_parameters() if "adaLN" in n or "sigma" in n]


def test_ar_sees_no_future_and_its_cache_is_the_whole_past() -> None:
    """The cache reads a prompt, then single tokens."""
    student, tokens = make_student(AR, std=0.2), make_batch(3).tokens
    whole, changed = student.predict(tokens).detach(), tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB
    assert torch.equal(whole[:, :5], student.predict(changed)[:, :5])
    cache = student.start_cache(3)
    found = [student.predict_next(tokens[:, :4], cache)]
    found += [student.predict_next(tokens[:, i : i + 1], cache) for i in range(4, LENGTH)]
    assert torch.allclose(torch.stack(found, 1), whole[:, 3:], atol=1e-5) and not found[0].requires_grad
    with pytest.raises(UsageError, match="one token"):
        student.predict_next(tokens[:, :2], cache)
    with pytest.raises(ValueError, match=f"{LENGTH} tokens cannot hold {LENGTH + 1}"):
        student.predict_next(tokens[:, :1], cache)
    assert student.bfloat16().start_cache(1).keys.dtype == torch.bfloat16
