"""The block sampler: cache against no cache at every step, windows, ends, exact distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.sampler_statistics import Goldens, run_case
from tests.trainer.sampling_cases import LENGTH, draw, open_rows, tiny_student
from trainer.sampling.block import BlockRows, BlockSampler
from trainer.sampling.fill import AncestralSampler
from trainer.sampling.noise import RowNoise, SampleKeys
from trainer.sampling.orders import FirstHittingSampler
from trainer.sampling.stopping import StopRule, unigram_entropy_nats
from trainer.students.registry import Student

IDS = torch.tensor([4, 0, 11])


def recorded(
    student: Student, sampler: BlockSampler, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], Tensor]:
    """Log-probabilities of every forward pass, and the samples."""
    log, original = [], BlockRows.predict

    def spy(self, part):
        log.append(original(self, part))
        return log[-1]

    with monkeypatch.context() as patch:
        patch.setattr(BlockRows, "predict", spy)
        result = draw(student, sampler, IDS, tokens)
    return log, result.tokens


@pytest.mark.parametrize("length", [LENGTH, 2 * LENGTH])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
@pytest.mark.parametrize("inner", ["ancestral", "first_hitting", "confidence", "redrawn", "ragged"])
def test_cache_changes_nothing(
    inner: Any, conditioning: str, block_size: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits with and without cache agree within 1e-5 at every step, noise, window and all."""
    student = tiny_student("bd3lm", conditioning, block_size=block_size)
    tokens, settings = open_rows(student, len(IDS), length), {"inner": inner}
    if inner == "ragged":  # a prompt up to the middle of a block, a whole row, a row with a hole
        tokens[0, 1:5], tokens[1, 1:], tokens[2, 1:10] = 7, 2, 3
        tokens[2, 4] = student.mask_id
    if inner in ("ragged", "redrawn"):
        settings = {"redraw_noise": inner == "redrawn" and conditioning == "gumbel"}
    (cached, drawn), (plain, same) = (
        recorded(student, BlockSampler(use_cache=use, **settings), tokens, monkeypatch)
        for use in (True, False)
    )
    assert torch.equal(drawn, same) and (drawn < student.mask_id).all()
    least = 1 if inner == "ragged" else (length - 1) // block_size
    assert len(cached) == len(plain) >= least
    for one, other in zip(cached, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=0)


def test_window_by_hand() -> None:
    """Rows of 12, blocks of 3: when the window is full, its front half of 6 is dropped."""
    student = tiny_student("bd3lm", "none", block_size=3)
    tokens = open_rows(student, 1, 27)
    rows = BlockRows(student, tokens, RowNoise(None, 27), SampleKeys(3, torch.arange(1)))
    starts = []
    for block in range(9):
        rows.enter(block)
        starts.append(rows.window_start)
    assert starts == [0, 0, 0, 0, 6, 6, 12, 12, 18]


def test_one_block_is_the_whole_row_sampler() -> None:
    student = tiny_student("bd3lm", block_size=LENGTH)
    ancestral = draw(student, AncestralSampler(nfe=5), IDS)
    block = draw(student, BlockSampler(nfe=5), IDS)
    assert torch.equal(ancestral.tokens, block.tokens)
    assert torch.equal(ancestral.nfe, block.nfe)
    first_hitting = draw(student, FirstHittingSampler(), IDS).tokens
    one_by_one = draw(student, BlockSampler(inner="first_hitting"), IDS).tokens
    assert torch.equal(first_hitting, one_by_one)
    redrawn = {"nfe": 5, "redraw_noise": True}
    block = draw(student, BlockSampler(**redrawn), IDS).tokens
    assert block.tolist() == draw(student, AncestralSampler(**redrawn), IDS).tokens.tolist()
    assert block.tolist() != draw(student, BlockSampler(nfe=5), IDS).tokens.tolist()


def test_budget_is_spread_and_counted() -> None:
    student, ids = tiny_student("bd3lm", block_size=4), torch.arange(40)
    assert BlockSampler(nfe=7).budgets(3, 4) == [2, 2, 3]
    assert BlockSampler(passes_per_block=2).budgets(3, 4) == [2, 2, 2]
    for nfe in (3, 7, 12):
        used = draw(student, BlockSampler(nfe=nfe, final_argmax=False), ids).nfe
        assert used.max() <= nfe and used.min() >= 3
    assert (draw(student, BlockSampler(nfe=3), ids).nfe == 3).all()
    assert (draw(student, BlockSampler(inner="first_hitting"), ids).nfe == LENGTH - 1).all()


@pytest.mark.parametrize("use_cache", [True, False])
def test_samples_end_at_eos(use_cache: bool) -> None:
    student, ids = tiny_student("bd3lm", "none", block_size=3), torch.arange(60)
    eos = student.config.eos_token_id
    free = draw(student, BlockSampler(use_cache=use_cache), ids)
    stopped = draw(student, BlockSampler(use_cache=use_cache, stop=StopRule(at_eos=True)), ids)
    ended = 0
    for row in range(len(ids)):
        place = (free.tokens[row, 1:] == eos).nonzero()
        length = int(place[0]) + 2 if len(place) else LENGTH
        ended += len(place) > 0
        assert int(stopped.lengths[row]) == length
        assert torch.equal(stopped.tokens[row, :length], free.tokens[row, :length])
        assert (stopped.tokens[row, length:] == eos).all()
    assert 5 < ended < 60
    assert stopped.nfe.sum() < free.nfe.sum()


def test_monotonous_samples_are_drawn_anew() -> None:
    student, ids = tiny_student("bd3lm", "gumbel", block_size=3), torch.arange(60)
    # The least entropy is set where some samples pass at once and some after a few tries.
    rule = StopRule(min_entropy_nats=1.2, entropy_window=6, max_tries=4)
    plain = draw(student, BlockSampler(), ids)
    kept = draw(student, BlockSampler(stop=rule), ids)
    attempts, flagged = kept.details["attempt"], kept.details["low_entropy"]
    assert (attempts == 0).any() and (attempts > 0).any()
    assert torch.equal(kept.tokens[attempts == 0], plain.tokens[attempts == 0])
    assert (kept.nfe[attempts == 0] == plain.nfe[attempts == 0]).all()
    assert (attempts[flagged] == 3).all(), "only the last try may be kept flagged"
    for end in range(6, LENGTH + 1, 3):
        entropy = unigram_entropy_nats(kept.tokens[~flagged, end - 6 : end])
        assert (entropy >= 1.2).all()
    assert (kept.tokens < student.mask_id).all()


def test_unigram_entropy(golden: Path) -> None:
    from safetensors.torch import load_file

    ops = load_file(golden / "ops.safetensors")
    # The golden takes all rows together.
    ours = unigram_entropy_nats(ops["entropy.x"].reshape(1, -1))
    assert torch.allclose(ours.float(), ops["entropy.value"], atol=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        "bd3lm.first_hitting.p1.0",
        "bd3lm.fixed_k_T1.p1.0",
        "bd3lm.fixed_k_T2.p0.8",
        "bd3lm_gumbel.first_hitting.p1.0",
        "bd3lm_gumbel.fixed_k_T1.p0.8",
    ],
)
def test_exact_distribution(golden: Path, case: str) -> None:
    result = run_case(Goldens.read(golden), case, 20_000)
    assert result.passed, result
