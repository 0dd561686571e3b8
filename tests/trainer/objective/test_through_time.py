"""Targets of self-distillation through time: by hand, by what must hold, and their distribution."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trainer.objective.batch import Batch, Places
from trainer.objective.schedules import SCHEDULES
from trainer.objective.substitution import Corruption
from trainer.objective.through_time import EarlierSteps, SelfDistillation, draw

MASK, VOCAB, LENGTH = 3, 3, 6
LOGLINEAR = SCHEDULES["loglinear"]


def a_batch(num_rows: int, seed: int = 1) -> Batch:
    tokens = torch.arange(num_rows * LENGTH).view(num_rows, LENGTH) % VOCAB
    ids = torch.arange(num_rows)
    return Batch(
        tokens=tokens,
        token_log_probs=torch.zeros(tokens.shape),
        row_ids=ids,
        slots=ids,
        step=0,
        epoch=0,
        seed=seed,
        global_batch_size=num_rows,
        noise=None,
    )


def all_masked(num_rows: int, t: float = 1.0, num_blocks: int = 1) -> Corruption:
    mask = torch.ones(num_rows, LENGTH, dtype=torch.bool)
    mask[:, 0] = False
    times = torch.full((num_rows, num_blocks), t)
    return Corruption(times, mask, torch.ones(num_rows, LENGTH), torch.zeros(num_rows))


class Recorder:
    """Says token ``number`` of pass ``number``, surely, and keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[Tensor] = []
        self.times: list[float] = []

    def __call__(self, noised: Tensor, places: Places, t: Tensor) -> Tensor:
        token = len(self.shown)
        self.shown.append(noised.clone())
        self.times.append(float(t[0, 0]))
        log_probs = torch.full((len(places), VOCAB + 1), -1e6)
        log_probs[:, token] = 0.0
        return log_probs


def test_a_target_is_what_was_said_in_the_step_that_revealed_the_token() -> None:
    """Three passes at t = 1, 0.75, 0.5; the pass that a token is shown after names it."""
    batch, corruption, seen = a_batch(40), all_masked(40), Recorder()
    steps = EarlierSteps(time_step=0.25, num_steps=3, is_drawn=False)
    targets = steps.log_probs(seen, batch, corruption, LOGLINEAR, MASK).argmax(dim=-1)
    assert seen.times == [1.0, 0.75, 0.5]
    masked = [shown == MASK for shown in seen.shown]
    assert torch.equal(masked[0], corruption.mask)
    for before, after in pairwise(masked):
        assert not (after & ~before).any(), "nothing is masked again"
        assert (before & ~after).any()
    expected = torch.where(~masked[1], 0, torch.where(~masked[2], 1, 2))
    assert targets.tolist() == expected[corruption.mask].tolist()
    shown = seen.shown[2][corruption.mask & ~masked[2]]
    assert torch.equal(shown, expected[corruption.mask & ~masked[2]]), "as they were chosen"
    assert torch.equal(seen.shown[2][:, 0], batch.tokens[:, 0])


@pytest.mark.parametrize(("name", "t", "step"), [("loglinear", 1.0, 0.3), ("cosine", 0.8, 0.5)])
def test_as_many_are_revealed_as_the_schedule_says(name: str, t: float, step: float) -> None:
    """Binomial(n, 1 - p(s) / p(t)), within 4.5 standard deviations."""
    schedule, num_rows = SCHEDULES[name], 2_000
    seen = Recorder()
    EarlierSteps(step, 2, is_drawn=False).log_probs(
        seen, a_batch(num_rows), all_masked(num_rows, t), schedule, MASK
    )
    ratio = schedule.masking_probability(torch.tensor([t - step, t]))
    chance = 1 - float(ratio[0] / ratio[1])
    count = num_rows * (LENGTH - 1)
    found = int((seen.shown[1][:, 1:] != MASK).sum())
    assert abs(found - count * chance) < 4.5 * math.sqrt(count * chance * (1 - chance))


def test_steps_end_at_zero_and_times_of_blocks_differ() -> None:
    """The first block's step goes below 0, so that all of it is known; the second's is half way."""
    batch, corruption, seen = a_batch(400), all_masked(400, num_blocks=2), Recorder()
    corruption.t[:, 0] = 0.1
    EarlierSteps(0.5, 2, is_drawn=False).log_probs(seen, batch, corruption, LOGLINEAR, MASK)
    first, second = (seen.shown[1] == MASK).unflatten(1, (2, 3)).float().mean(dim=(0, 2))
    assert float(first) < 0.01
    assert abs(float(second) - 0.5) < 4.5 * math.sqrt(0.25 / 1200)


def test_draws_are_keyed_by_row_not_by_the_batch_and_stand() -> None:
    batch, corruption, shown = a_batch(8), all_masked(8), []

    def denoise(noised: Tensor, places: Places, t: Tensor) -> Tensor:
        shown.append(noised)
        flat = torch.tensor([0.2, 0.3, 0.5, 1e-30]).log().expand(len(places), -1)
        return flat + 0.1 * (noised.sum(dim=1)[places.rows, None] == 0)

    steps = EarlierSteps(0.3, 3, is_drawn=True)
    whole = steps.log_probs(denoise, batch, corruption, LOGLINEAR, MASK)
    known = shown[1] != MASK
    assert torch.equal(shown[2][known], shown[1][known]), "what is drawn once is not drawn again"
    drawn = shown[1][known & corruption.mask]
    assert drawn.unique().tolist() == [0, 1, 2], "not the most probable one everywhere"
    part = slice(3, 5)
    few = Corruption(
        corruption.t[part], corruption.mask[part], corruption.weight[part], corruption.sigma[part]
    )
    alone = steps.log_probs(denoise, batch.rows(part), few, LOGLINEAR, MASK)
    assert torch.equal(whole.unflatten(0, (8, -1))[part], alone.unflatten(0, (2, -1)))


def test_draws_have_the_distribution() -> None:
    """Chi-square with 2 degrees of freedom: below 18.4 with probability 1 - 1e-4."""
    probs = torch.tensor([0.5, 0.125, 0.375, 0.0])
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    found = draw(probs.log().clamp_min(-1e6).expand(20_000, -1), uniforms)
    counts = torch.bincount(found, minlength=4)
    assert counts[3] == 0
    expected = 20_000 * probs[:3]
    assert float(((counts[:3] - expected).square() / expected).sum()) < 18.4
    edges = torch.tensor([0.0, 0.499, 0.501, 0.624, 0.626, 0.999999])
    assert draw(probs.log().clamp_min(-1e6).expand(6, -1), edges).tolist() == [0, 0, 1, 1, 2, 2]


def test_loss_is_the_reverse_kl_by_hand() -> None:
    earlier = torch.tensor([[0.5, 0.5, 1e-30], [0.9, 0.1, 1e-30]]).log()
    student = torch.tensor([[0.25, 0.75, 1e-30]]).log()
    found = SelfDistillation(earlier).losses(student, torch.tensor([0]), slice(1, 2))
    wanted = 0.25 * math.log(0.25 / 0.9) + 0.75 * math.log(0.75 / 0.1)
    assert float(found) == pytest.approx(wanted, rel=1e-5)
