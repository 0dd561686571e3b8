"""What verified samples must equal; and checks of what all verified samplers promise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.trainer.sampling_cases import draw, open_rows
from trainer.sampling.coupled import gumbel_scores
from trainer.sampling.fill import SampleResult
from trainer.sampling.noise import TokenRule, sampling_noise
from trainer.students.registry import Student

IDS = torch.tensor([4, 0, 11, 7, 23])


def prompts(student: Student, length: int, given: int = 2) -> Tensor:
    """Rows of 1, 5, 11, ``given`` and 1 known tokens."""
    tokens = open_rows(student, len(IDS), length)
    tokens[1, 1:5] = torch.tensor([3, 8, 3, 2])
    tokens[2, 1:11] = 7
    tokens[3, 1:given] = 9
    return tokens


@torch.no_grad()
def own_decode(
    model: Any,
    tokens: Tensor,
    ids: Tensor,
    vocab: int,
    tau: float = 1.0,
    rule: TokenRule | None = None,
    room: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """argmax(l + tau xi) over what the rule keeps, one token a pass over the whole prefix.

    Returns:
        The rows, and up to where of each no two tokens came closer than ``room``.
    """
    rows, certain = tokens.clone(), torch.full((len(tokens),), tokens.shape[1])
    for slot, index in enumerate(ids):
        noise = sampling_noise(3, index[None], tokens.shape[1], vocab)
        for place in (tokens[slot] == vocab).nonzero()[:, 0]:
            logits = model(rows[slot : slot + 1, :place]).logits[:, -1, :vocab].float()
            scores = gumbel_scores(logits, noise.select(place[None]), tau)
            if rule is not None:
                scores = scores.masked_fill(rule.probabilities(logits) == 0, -torch.inf)
            best = scores[0].topk(2)
            rows[slot, place] = best.indices[0]
            if best.values[0] - best.values[1] < room:
                certain[slot] = certain[slot].minimum(place)
    return rows, certain


def every_pass_gains(result: SampleResult, num_filled: Tensor) -> None:
    """A pass of the verifier gives what was accepted and one token more; a draft is reached behind accepted ones."""
    accepted, reached, drafted, agreed = (result.details[n] for n in ("accepted", "reached", "drafted", "agreed"))
    assert torch.equal(accepted.sum(dim=1) + result.details["verifier_nfe"], num_filled)
    assert torch.equal(reached[:, :1], drafted[:, :1]) and torch.equal(accepted[:, :1], agreed[:, :1])
    assert ((accepted <= reached) & (reached <= drafted) & (accepted <= agreed)).all()
    assert (reached[:, 1:] <= accepted[:, :-1]).all()


def alone_as_together(student: Student, sampler: Any, tokens: Tensor) -> SampleResult:
    """No sample depends on its companions; returns the samples."""
    together = draw(student, sampler, IDS, tokens)
    for slot, index in enumerate(IDS):
        alone = draw(student, sampler, index[None], tokens[slot : slot + 1])
        assert torch.equal(alone.tokens[0], together.tokens[slot]) and alone.nfe[0] == together.nfe[slot]
        for name, value in alone.details.items():
            assert torch.equal(value[0], together.details[name][slot]), name
    return together


def ended_at_eos(ended: SampleResult, free: SampleResult, eos: int) -> None:
    """Rows that end at the first eos, as those that were drawn to the end have it."""
    length = free.tokens.shape[1]
    for ours, stop, whole in zip(ended.tokens, ended.lengths.tolist(), free.tokens, strict=True):
        place = (whole[1:] == eos).nonzero()
        assert stop == (int(place[0]) + 2 if len(place) else length)
        assert torch.equal(ours[:stop], whole[:stop]) and (ours[stop:] == eos).all()
