"""BD3-LM: attention paths, block cache, and its limits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from benchmarks.goldens import ArrivalRows
from shards.errors import UsageError
from trainer.objective.batch import Batch
from trainer.students.bd3lm import flex_training_attention, training_mask
from trainer.students.configuration import DiffusionSettings
from trainer.students.dit import masked_attention
from trainer.students.registry import BD3LM, MDLM, BD3LMConfig, MDLMConfig, StudentSettings

VOCAB, LENGTH, BLOCK = 11, 16, 4
TINY = StudentSettings(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    condition_size=8,
    dropout=0.0,
    conditioning="gumbel",
    block_size=BLOCK,
)


def randomise(student: MDLM) -> MDLM:
    torch.manual_seed(0)
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return student.eval()


def with_diffusion(**changes: Any) -> StudentSettings:
    return dataclasses.replace(TINY, diffusion=DiffusionSettings(**changes))


def make_student(settings: StudentSettings = TINY) -> BD3LM:
    student = BD3LM(BD3LMConfig.build(settings, vocab_size=VOCAB, row_length=LENGTH))
    randomise(student)
    return student


def make_batch(num_rows: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(2)
    shape = (num_rows, LENGTH, VOCAB)
    rows = torch.arange(num_rows)
    return Batch(
        tokens=torch.randint(VOCAB, shape[:2], generator=generator),
        token_log_probs=torch.zeros(shape[:2]),
        row_ids=rows,
        slots=rows,
        global_batch_size=num_rows,
        step=0,
        epoch=0,
        seed=1,
        noise=ArrivalRows(-torch.log1p(-torch.rand(shape, generator=generator))),
    )


def test_flex_and_sdpa_agree_on_attention() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 2 * LENGTH, 16).unbind(0)
    device = torch.device("cpu")
    sdpa = masked_attention(training_mask(LENGTH, BLOCK, device))(query, key, value)
    flex = flex_training_attention(LENGTH, BLOCK, device)(query, key, value)
    assert torch.allclose(flex, sdpa, atol=1e-5)


def test_flex_and_sdpa_agree_on_logits() -> None:
    sdpa, batch = make_student(dataclasses.replace(TINY, attention="sdpa")), make_batch()
    flex = make_student(dataclasses.replace(TINY, attention="flex"))
    noised = batch.tokens.masked_fill(sdpa.corrupt(batch).mask, sdpa.mask_id)
    with torch.no_grad():
        expected = sdpa.denoise(noised, batch.tokens)
        assert torch.allclose(flex.denoise(noised, batch.tokens), expected, atol=1e-5)


def test_one_block_is_mdlm() -> None:
    whole = dataclasses.replace(TINY, block_size=None)
    block, plain = (
        make_student(whole),
        MDLM(MDLMConfig.build(whole, vocab_size=VOCAB, row_length=LENGTH)),
    )
    plain.load_state_dict(block.state_dict())
    plain.eval()
    batch = make_batch()
    assert torch.equal(block.loss(batch).loss, plain.loss(batch).loss)


def test_later_blocks_and_the_noised_past_are_not_seen() -> None:
    student, batch = make_student(), make_batch()
    clean = batch.tokens
    noised = clean.clone()
    noised[:, 5:8] = student.mask_id
    base = student.denoise(noised, clean)
    changed = noised.clone()
    changed[:, :4] = student.mask_id
    changed[:, 8:] = student.mask_id
    future = clean.clone()
    future[:, 4:] = (future[:, 4:] + 1) % VOCAB
    same = student.denoise(changed, future)
    assert torch.allclose(base[:, 4:8], same[:, 4:8], atol=1e-6)
    past = clean.clone()
    past[:, 1] = (past[:, 1] + 1) % VOCAB
    assert not torch.allclose(base[:, 4:8], student.denoise(noised, past)[:, 4:8], atol=1e-4)


def test_cache_equals_the_whole_prefix_with_noise_in_every_block() -> None:
    student, batch = make_student(), make_batch()
    tokens = batch.tokens.clone()
    tokens[:, 9:12] = student.mask_id
    everywhere = torch.ones(tokens.shape, dtype=torch.bool)
    condition = student.embed_noise(batch.noise.at(everywhere), 0.85).view(3, LENGTH, -1).detach()
    block, own, nothing = tokens[:, 8:12], condition[:, 8:12], tokens[:, :0]
    masked = block == student.mask_id
    whole = student.predict(tokens[:, :12], condition[:, :12])[:, 8:12]
    prompt, stepwise = student.start_cache(3), student.start_cache(3)
    student.predict_after(tokens[:, :8], block, masked, own, prompt)
    for start in (0, 4):
        student.predict_after(tokens[:, start : start + 4], block, masked, own, stepwise)
    for cache in (prompt, stepwise):
        assert cache.length == 8
        for _ in range(2):
            found = student.predict_after(nothing, block, masked, own, cache)
            assert torch.allclose(found, whole[masked], atol=1e-5)
        part = torch.tensor([2, 0])
        some = student.predict_after(
            nothing[part], block[part], masked[part], own[part], cache.select(part)
        )
        assert torch.allclose(some, whole[part][masked[part]], atol=1e-5)


def test_cache_refusals() -> None:
    timed = make_student(with_diffusion(time_conditioning=True))
    with pytest.raises(UsageError, match="time-conditioned"):
        timed.start_cache(1)


def test_blocks_of_the_loss() -> None:
    student, batch = make_student(), make_batch()
    output = student.loss(batch)
    assert output.block_nlls.shape == (3, 4)
    assert torch.allclose(output.block_nlls.sum() * BLOCK, output.nll_sum)
    assert torch.allclose(output.nll_sum / batch.tokens.numel(), output.loss, rtol=1e-5)
    clipped = student.loss(batch, time_bounds=(0.9, 1.0))
    assert clipped.num_masked > output.num_masked


def test_round_trip(tmp_path: Path) -> None:
    student = make_student()
    student.time_bounds.copy_(torch.tensor([0.3, 0.8]))
    student.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, BD3LM)
    assert isinstance(AutoModelForMaskedLM.from_pretrained(tmp_path), BD3LM)
    assert loaded.block_size == BLOCK
    assert torch.equal(loaded.time_bounds, torch.tensor([0.3, 0.8]))
    batch = make_batch()
    # The same weights at another address: kernels may sum in another order.
    torch.testing.assert_close(loaded.eval().loss(batch).loss, student.loss(batch).loss)


def test_flex_cannot_train_without_its_kernel() -> None:
    student = make_student(dataclasses.replace(TINY, attention="flex"))
    with pytest.raises(UsageError, match=r"no gradient.*model\.attention.*auto"):
        student.loss(make_batch())
    with pytest.raises(UsageError, match="attention"):
        dataclasses.replace(TINY, num_heads=4, attention="flex")


def test_the_smallest_clips_are_kept() -> None:
    """Clips pass through a float32 buffer and come back as they were given."""
    for bounds in ((4e-7, 1.0), (1e-3, 0.95), (0.123456, 0.7)):
        student = make_student(with_diffusion(min_time=bounds[0], max_time=bounds[1]))
        assert student.clips == bounds


def test_open_clips_redraw_nothing() -> None:
    # The clips come from a float32 buffer, in which 1e-3 is a little more than 1e-3.
    free, batch = make_student(), make_batch(64)
    redrawn = make_student(with_diffusion(resample=True))
    mask = redrawn.corrupt(batch).mask
    assert torch.equal(mask, free.corrupt(batch).mask)
    assert bool((~mask.unflatten(1, (-1, BLOCK)).any(dim=-1)).any())


def test_clips_are_enforced_when_they_close() -> None:
    student = make_student(with_diffusion(resample=True, min_time=0.5, max_time=0.5))
    counts = student.corrupt(make_batch(16)).mask[:, BLOCK:].unflatten(1, (-1, BLOCK)).sum(-1)
    assert bool((counts == BLOCK // 2).all())


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_no_rows_cost_nothing(attention: str) -> None:
    student = make_student(dataclasses.replace(TINY, attention=attention))
    with torch.no_grad():
        output = student.loss(make_batch(2).rows(slice(0)))
    assert output.nll_sum == 0.0 and output.num_tokens == output.num_masked == 0


def test_training_goes_on_without_flexattention_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.students import bd3lm
    from trainer.students import bd3lm as attention

    def broken(*_: object) -> None:
        raise RuntimeError("no gcc")

    device = torch.device("cuda", 3)
    monkeypatch.setattr(attention, "flex_training_attention", broken)
    attention.flex_obstacle.cache_clear()
    bd3lm._told_obstacle.cache_clear()
    assert [bd3lm._told_obstacle(device) for _ in range(2)] == ["no gcc", "no gcc"]
    said = capsys.readouterr().err
    assert said.count("FlexAttention fails: no gcc") == 1 and "sdpa on cuda:3" in said
    assert "no gradient" in attention.flex_obstacle(torch.device("cpu"))
