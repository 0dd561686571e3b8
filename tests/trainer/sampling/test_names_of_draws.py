"""What names the randomness of samples: seed, sample, position, step and attempt each change it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shards.noise.kinds import dense_arrivals
from tests.trainer.sampling_cases import LENGTH, VOCAB, draw, noise_for, open_rows, tiny_student
from trainer.sampling.block import BlockSampler
from trainer.sampling.fill import AncestralSampler, Rows, Sampler, StopRule
from trainer.sampling.noise import RowNoise, SampleKeys, sampling_noise
from trainer.students.registry import BD3LM, MDLM, Student

IDS = torch.tensor([5, 0, 17])


def arrivals(seed: int, ids: Tensor, draw: int = 0) -> Tensor:
    noise = sampling_noise(seed, ids, LENGTH, VOCAB, draw=draw)
    return dense_arrivals(noise).view(len(ids), LENGTH, VOCAB)


def test_every_name_gives_noise_of_its_own() -> None:
    """Exponentials of other names agree nowhere; those of one name agree whatever the batch."""
    ours = arrivals(3, IDS)
    assert torch.equal(arrivals(3, IDS[1:2])[0], ours[1])
    rows = [*ours, *arrivals(4, IDS), *arrivals(3, IDS, draw=1), *arrivals(3, IDS + 1)]
    positions = torch.cat(rows)
    for one, other in itertools.combinations(range(len(positions)), 2):
        assert not (positions[one] == positions[other]).all(), (one, other)
    for one, other in itertools.combinations(rows, 2):
        assert (one == other).float().mean() < 0.01


def conditions_seen(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """(masked positions, noise embeddings) of each forward pass over one row."""
    kind = "bd3lm" if isinstance(sampler, BlockSampler) else "mdlm"
    student = tiny_student(kind, block_size=6 if kind == "bd3lm" else None)
    seen, original = [], MDLM.predict_at

    def spy(self, tokens, where, condition=None, *rest):
        seen.append((tokens[0] == self.mask_id, condition[0]))
        return original(self, tokens, where, condition, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(BD3LM if kind == "bd3lm" else MDLM, "predict_at", spy)
        draw(student, sampler, IDS[:1])
    return seen


@pytest.mark.parametrize("redraw", [False, True])
@pytest.mark.parametrize("name", ["whole rows", "blocks"])
def test_noise_is_redrawn_at_every_step_or_at_none(
    name: str, redraw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = AncestralSampler(nfe=6, redraw_noise=redraw)
    if name == "blocks":
        sampler = BlockSampler(redraw_noise=redraw, use_cache=False)
    compared = 0
    for before, after in itertools.pairwise(conditions_seen(sampler, monkeypatch)):
        width = min(len(before[0]), len(after[0]))
        both = before[0][:width] & after[0][:width]
        same = (before[1][:width][both] == after[1][:width][both]).all(dim=-1)
        compared += len(same)
        assert (~same).all() if redraw else same.all()
    assert compared >= LENGTH


def test_attempts_have_noise_of_their_own() -> None:
    student = tiny_student()
    noise = noise_for(student, IDS, 3)
    use = RowNoise(noise, LENGTH, 1.0)
    rows = torch.tensor([2, 0])
    attempts = [dense_arrivals(use.of(rows, attempt).noise) for attempt in (0, 1, 2)]
    assert torch.equal(attempts[0].view(2, LENGTH, VOCAB), arrivals(3, IDS)[rows])
    for one, other in itertools.combinations(attempts, 2):
        assert (one == other).float().mean() < 0.01
    # An attempt's steps do not run into the next attempt's.
    last_step = use.of(rows, 0).noise.redrawn(LENGTH)
    assert (dense_arrivals(last_step) == attempts[1]).float().mean() < 0.01


def test_a_sample_drawn_anew_sees_other_noise() -> None:
    """argmax of x_0 in one pass is a function of the noise alone: it changes only with it."""
    student, ids = tiny_student(), torch.arange(40)
    entropic = StopRule(min_entropy_nats=100.0, entropy_window=LENGTH, max_tries=2)
    once = draw(student, AncestralSampler(nfe=1, decision="argmax"), ids)
    twice = draw(student, AncestralSampler(nfe=1, decision="argmax", stop=entropic), ids)
    assert (twice.details["attempt"] == 1).all()
    assert (twice.tokens != once.tokens).any(dim=1).float().mean() > 0.9


def final_fill(sampler: AncestralSampler, student: Student, keys: SampleKeys) -> Tensor:
    """1 where the passes of the final fill, which have a rule of their own, reveal a position."""
    tokens = open_rows(student, len(keys.sample_ids))
    rows, left = Rows(student, tokens, RowNoise(None, LENGTH), keys), torch.zeros_like(tokens)
    for part in sampler.order(rows):
        if part.rule is not None:
            left[part.places.index] = 1
    return left


def test_the_final_fill_takes_the_most_probable_tokens() -> None:
    """Under the square-root schedule 3.2e-3 of the positions are left after the last step."""
    student = tiny_student(conditioning="none", diffusion={"schedule": "square_root"})
    ids, sampler = torch.arange(1200), AncestralSampler(nfe=1, nucleus_p=0.5)
    result = draw(student, sampler, ids)
    left = final_fill(sampler, student, SampleKeys(3, ids))
    assert (left > 0).sum() >= 20  # 42 expected
    assert torch.equal(result.nfe, 1 + (left > 0).any(dim=1).long())
    rows = (left > 0).any(dim=1)
    before = result.tokens.masked_fill(left > 0, student.mask_id)[rows]
    where = before == student.mask_id
    with torch.no_grad():
        best = student.predict_at(before, where)[:, :-1].argmax(dim=-1)
    assert torch.equal(result.tokens[rows][where], best)


def test_no_final_fill_where_the_last_step_goes_to_zero() -> None:
    student = tiny_student(conditioning="none", diffusion={"schedule": "square_root"})
    sampler = AncestralSampler(nfe=1, final_argmax=False)
    assert not final_fill(sampler, student, SampleKeys(3, torch.arange(1200))).any()
