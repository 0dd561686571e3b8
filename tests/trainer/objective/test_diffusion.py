"""Times, masks, schedules, SUBS and the clipped-schedule search."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks import parity
from benchmarks.goldens import substituted_log_probs
from shards.errors import GdistillError, UsageError
from trainer.objective import corruption
from trainer.objective.batch import Batch
from trainer.objective.clips import best_clips, candidates, clip_variance
from trainer.objective.corruption import (
    FULL,
    RATE_SCHEDULE,
    SCHEDULES,
    corrupt,
    draw_mask,
    masking_sigma,
    require_reachable,
    row_uniforms,
    stratified_times,
)
from trainer.students.configuration import DiffusionSettings


def batch_of(rows: Tensor | int, slots: Tensor | None = None, **names: int) -> Batch:
    """Rows of 16 tokens; a number is so many rows, each in its own slot."""
    rows = torch.arange(rows) if isinstance(rows, int) else rows
    slots, tokens = rows if slots is None else slots, torch.zeros(len(rows), 16, dtype=torch.int64)
    batch = Batch(tokens, tokens.float(), rows, slots, len(rows), 0, 3)
    return dataclasses.replace(batch, **names)  # type: ignore[arg-type]


def test_times_by_hand() -> None:
    uniforms = torch.tensor([[0.5, 0.0], [0.25, 1.0]])
    t = stratified_times(uniforms, torch.tensor([0, 1]), 2, 0.0, 1.0)
    assert t.tolist() == [[0.125, 0.25], [0.5625, 0.0]]
    clipped = stratified_times(uniforms, torch.tensor([0, 1]), 2, 0.3, 0.8)
    assert torch.allclose(clipped, 0.3 + 0.5 * t)
    for share, expected in ((0.5, [0.0, 0.5, 1.0, 1.0]), (1.0, [1.0] * 4)):  # v of 0, 1/4, 1/2, 3/4
        shared = stratified_times(torch.zeros(4, 1), torch.arange(4), 4, 0.0, 1.0, share)
        assert shared.flatten().tolist() == expected
    drawn = torch.rand(64, 4, generator=torch.Generator().manual_seed(0))
    t = stratified_times(drawn, torch.arange(64).flip(0), 64, 0.0, 1.0)
    strata = (t * 256).long().flatten().sort().values
    assert strata.tolist() == list(range(256)), "every stratum holds one time"


def test_times_are_the_authors_to_the_last_bit(golden: Path) -> None:
    """The same float32 operations in the same order, each correctly rounded by IEEE 754."""
    tensors = load_file(golden / "ops.safetensors")
    for name, config in json.loads((golden / "ops.json").read_text())["sample_t"].items():
        batch, bounds = config["batch"], (config["eps_min"], config["eps_max"])
        t = stratified_times(tensors[f"{name}.u"], torch.arange(batch), batch, *bounds)
        expected = tensors[f"{name}.t"]
        width = expected.shape[1] // t.shape[1]
        assert t.repeat_interleave(width, dim=1).tolist() == expected.tolist()


def test_masks_follow_p() -> None:
    uniforms = torch.tensor([[0.0, 0.2, 0.3, 0.9]])
    by_hand = draw_mask(lambda _: uniforms, torch.tensor([[0.2, 0.3]]))
    assert by_hand.tolist() == [[False, True, True, False]]
    batch = batch_of(4000)
    mask = draw_mask(lambda r: row_uniforms("mask", batch, r, 16), torch.full((4000, 1), 0.3))
    drawn, total = int(mask.sum()), 4000 * 15
    # Binomial(60000, 0.3) has standard deviation 112; 5 of them is one failure in 1.7 million.
    assert abs(drawn - 0.3 * total) < 5 * math.sqrt(total * 0.3 * 0.7)
    assert not mask[:, 0].any()


def test_resampled_blocks_are_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, p = batch_of(500), torch.full((500, 4), 0.5)

    def uniforms(round_number: int) -> Tensor:
        return row_uniforms("mask", batch, round_number, 16)

    counts = draw_mask(uniforms, p, (0.3, 0.8)).unflatten(1, (4, 4)).sum(dim=2)[:, 1:]
    assert set(counts.unique().tolist()) == {2, 3}
    assert torch.equal(draw_mask(uniforms, p, (1e-3, 1.0)), draw_mask(uniforms, p))
    # The first block anew, until it fits; where U is p nothing is masked. A block that fits stays.
    drawn = torch.tensor([[[0.9] * 4 + [0.1, 0.1, 0.9, 0.9]], [[0.9, 0.1, 0.3, 0.5] + [0.1] * 4]])
    found = draw_mask(lambda number: drawn[number], torch.full((1, 2), 0.5), (0.3, 0.5))
    assert found.int().tolist() == [[0, 1, 1, 0, 1, 1, 0, 0]]
    monkeypatch.setattr(corruption, "MAX_ROUNDS", 5)
    with pytest.raises(GdistillError, match=r"no mask fits.*5 redraws within \(0.3, 0.5\).*widen"):
        draw_mask(lambda _: drawn[0], torch.full((1, 2), 0.5), (0.3, 0.5))
    with pytest.raises(UsageError, match="min_time"):
        draw_mask(uniforms, p, (0.3, 0.45))
    require_reachable((1e-3, 1.0), 1)
    require_reachable((0.29, 0.29), 100)  # 0.29 * 100 is less than 29


@pytest.mark.parametrize("num_blocks", [1, 4])
def test_corruption_does_not_depend_on_the_split(num_blocks: int) -> None:
    settings = DiffusionSettings(resample=True)
    rows = torch.tensor([90, 3, 41, 77, 5, 12])
    slots = torch.arange(6)
    whole = corrupt(batch_of(rows, slots), settings, num_blocks, (0.2, 0.9))
    order = torch.tensor([4, 1, 5])
    some = batch_of(rows[order], slots[order], global_batch_size=6)
    part = corrupt(some, settings, num_blocks, (0.2, 0.9))
    assert torch.equal(whole.mask[order], part.mask)
    assert torch.equal(whole.t[order], part.t)


def test_times_and_masks_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniforms of different purposes, rounds and rows are independent, and none is 0 or 1; other seeds and epochs have
    others."""
    batch, first = batch_of(4000), corrupt(batch_of(8), DiffusionSettings(), 1, FULL)
    for other in (batch_of(8, epoch=1), batch_of(8, seed=4)):
        second = corrupt(other, DiffusionSettings(), 1, FULL)
        assert not torch.equal(first.t, second.t) and not torch.equal(first.mask, second.mask)
    draws = [row_uniforms(*key, 1)[:, 0] for key in (("time", batch, 0), ("mask", batch, 0))]
    draws += [row_uniforms("mask", batch, stream, 1)[:, 0] for stream in (1, 99, 100, 101)]
    correlations = torch.corrcoef(torch.stack(draws)).fill_diagonal_(0.0)
    assert float(correlations.abs().max()) < 5 / math.sqrt(4000)
    monkeypatch.setattr(corruption, "stream_bits", lambda *_: torch.tensor([[0, 2**32 - 1]]))
    assert all(0 < number < 1 for number in row_uniforms("time", batch, 0, 2)[0])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_weights_are_the_logarithmic_slope_of_p(name: str) -> None:
    """w = p'(t) / p(t), away from the authors' floors (p >= 1e-3; cosine adds 1e-3 below)."""
    schedule = SCHEDULES[name]
    t = torch.linspace(0.1, 0.95, 18, dtype=torch.float64, requires_grad=True)
    p = schedule.masking_probability(t)
    (slope,) = torch.autograd.grad(p.sum(), t)
    floor = 1e-3 if name == "cosine" else 0.0
    torch.testing.assert_close(schedule.loss_weight(t), slope / (p + floor), rtol=1e-9, atol=0)
    assert bool((p.diff() > 0).all()) and bool(((p > 0) & (p <= 1)).all())


def test_rate_weights_are_sigmas_slope_over_its_growth() -> None:
    """The older MDLM: p = 1 - e^-sigma, w = sigma' / (e^sigma - 1), p(1) = 0.999."""
    t = torch.linspace(0.01, 1.0, 12, dtype=torch.float64, requires_grad=True)
    sigma = -torch.log(1 - 0.999 * t)
    (slope,) = torch.autograd.grad(sigma.sum(), t)
    found = RATE_SCHEDULE.loss_weight(t), RATE_SCHEDULE.masking_probability(t)
    torch.testing.assert_close(found[0], slope / torch.expm1(sigma), rtol=1e-9, atol=0)
    torch.testing.assert_close(found[1], 0.999 * t, rtol=1e-9, atol=0)


def test_settings_choose_the_schedule_and_the_weights() -> None:
    batch, shares = batch_of(64), {}
    for name in SCHEDULES:
        drawn = corrupt(batch, DiffusionSettings(schedule=name), 2, FULL)  # type: ignore[arg-type]
        p = SCHEDULES[name].masking_probability(drawn.t)
        shares[name] = float(p.mean())
        assert torch.allclose(drawn.weight[:, ::8], SCHEDULES[name].loss_weight(drawn.t))
        assert torch.allclose(drawn.sigma, masking_sigma(p[:, 0]))
    assert float(masking_sigma(torch.ones(()))) == pytest.approx(math.log(1000), rel=1e-4)
    # Means over t of t^2, cosine, t, log2(1 + t), sqrt t: 0.333, 0.364, 0.5, 0.557, 0.667.
    order = ["square", "cosine", "loglinear", "log", "square_root"]
    assert sorted(shares, key=shares.__getitem__) == order
    # Above one half the weight is one.
    corruption = corrupt(batch_of(8), DiffusionSettings(), 2, (0.51, 1.0))
    assert (corruption.weight == 1).all()
    for low in (0.45, 0.5):
        usual = corrupt(batch_of(8), DiffusionSettings(), 2, (low, 1.0))
        assert torch.allclose(usual.weight, 1 / usual.t.repeat_interleave(8, dim=1))


def test_substitution_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), 50.0], [5.0, 6.0, 7.0]])
    log_probs = substituted_log_probs(logits, torch.tensor([2, 1]), 2)
    assert torch.allclose(log_probs[0, :2].exp(), torch.tensor([0.25, 0.75]))
    assert log_probs[0, 2] < -9e5
    assert log_probs[1].tolist() == [-1e6, 0.0, -1e6]


def test_the_search_takes_the_best_of_the_authors_candidates() -> None:
    clips = candidates()
    assert clips[0] == FULL
    assert len(clips) == 1 + 11 + 9 + 7 + 5 + 3 == len(set(clips))
    assert {(1e-3, 0.5), (0.5, 1.0), (0.45, 0.95)} <= set(clips)
    assert all(0 < low < high <= 1 for low, high in clips)
    # The one of smallest variance is taken.
    quiet = [torch.tensor([[1.0, 1.1], [0.9, 1.0]])]
    loud = [torch.tensor([[1.0, 3.0], [0.0, 1.0]])]
    assert clip_variance(quiet) == pytest.approx(quiet[0].var().item())
    assert clip_variance(quiet * 2) == pytest.approx(2 * quiet[0].var().item())
    assert best_clips({(0.1, 0.9): loud, (0.3, 0.8): quiet}) == (0.3, 0.8)
    assert best_clips({(0.1, 0.9): quiet, (0.3, 0.8): quiet}) == (0.1, 0.9)
    assert best_clips({(0.1, 0.9): [torch.full((2, 2), torch.nan)], FULL: loud}) == FULL
    with pytest.raises(GdistillError, match=r"no finite variance.*got 1 candidates"):
        best_clips({FULL: [*quiet, torch.full((1, 1), 2.0)]})


def test_known_values(golden: Path) -> None:
    """Schedules, times and noise levels of the authors' small functions."""
    comparisons = parity.operations_case(golden)
    kinds = {c.quantity.split(".")[0] for c in comparisons}
    assert kinds >= {"schedule", "times", "mask", "rotary"}
    assert not [c for c in comparisons if not c.passed]
