"""Whole rows in uniform order, and in confidence order.

The first-hitting sampler is the limit of ancestral sampling in many steps: of the uniforms of
:mod:`trainer.sampling.fill` only the order matters then. With a fixed count several positions come
at a time.

Confidence order is not drawn beforehand: every pass predicts all masked positions and keeps the
tokens of which the student is most certain. For a student without noise such an order costs
variety, for the most certain tokens are the commonest ones, so Gumbel noise is added to it (Chang
et al. 2022). With noise as input the text is a function of the noise, and the student is most
certain of what the noise has decided: the order needs no draw of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.noise.philox import PositionKeys, uniforms
from shards.settings import setting
from trainer.objective.batch import Places, placed
from trainer.sampling.fill import PASSES, DiffusionSampler, Pass, Rows, planned, row_groups

Confidence = Literal["margin", "probability"]


@dataclass(frozen=True, kw_only=True)
class FirstHittingSampler(DiffusionSampler):
    """First-hitting sampling (Zheng et al., arXiv 2409.02908): exact for masked diffusion.

    One uniformly chosen masked token per forward pass, so NFE is the number of masked tokens.
    Settings as in :class:`DiffusionSampler`.
    """

    label: ClassVar[str] = "first-hitting"

    def order(self, rows: Rows) -> Iterator[Pass]:
        """See :class:`Sampler`."""
        return uniform_order(rows, None)


@dataclass(frozen=True, kw_only=True)
class FixedCountSampler(DiffusionSampler):
    """The same number of uniformly chosen masked tokens in every forward pass.

    Attributes:
        nfe: Forward passes per sample: each reveals ceil(masked / nfe) tokens.

    Further settings as in :class:`DiffusionSampler`.
    """

    nfe: int = setting(128, within=PASSES)

    label: ClassVar[str] = "fixed-count"

    def order(self, rows: Rows) -> Iterator[Pass]:
        """See :class:`Sampler`."""
        return uniform_order(rows, self.nfe)


def uniform_order(rows: Rows, nfe: int | None) -> Iterator[Pass]:
    """A uniformly random order: ceil(masked / nfe) positions per step, or one.

    The largest uniform comes first, as in ancestral sampling.
    """
    masked = rows.open
    uniform = rows.keys.uniforms("sampling order", rows.active, rows.columns)
    ordered = torch.where(masked, uniform, -1.0).argsort(dim=-1, descending=True, stable=True)
    steps = 1 + ordered.argsort(dim=-1)
    if nfe is not None:
        per_step = (-(-masked.sum(dim=1, keepdim=True) // nfe)).clamp_min(1)
        steps = 1 + (steps - 1) // per_step
    return planned(rows, torch.where(masked, steps, 0), None)


@dataclass(frozen=True, kw_only=True)
class ConfidenceSampler(DiffusionSampler):
    """The same number of tokens in every forward pass, in confidence order.

    Meant for conditioned students and ``decision=argmax``: their text is a function of the noise,
    so that an order of their choice costs no variety. Without noise it does; ``order_temperature``
    gives some back.

    Attributes:
        nfe: Forward passes per sample: each reveals ceil(masked / nfe) tokens.
        confidence: ``margin``: log p of the most probable token over the next one's, nats (Kim et
            al. 2025, in logarithms); ``probability``: log p of the chosen token (Chang et al.
            2022).
        order_temperature: Scale of the Gumbel noise on the confidence, nats; falls linearly, to 0
            in the last pass.

    Further settings as in :class:`DiffusionSampler`.
    """

    nfe: int = setting(128, within=PASSES)
    confidence: Confidence = "margin"
    order_temperature: float = setting(0.0, within="[0, inf)")

    label: ClassVar[str] = "confidence"

    def order(self, rows: Rows) -> Iterator[Pass]:
        """See :class:`Sampler`."""
        return confidence_order(rows, self.nfe)

    def choose(
        self, rows: Rows, part: ConfidencePass, log_probs: Float[Tensor, "n v1"]
    ) -> tuple[Places, Int[Tensor, "k"]]:
        """See :class:`Sampler`."""
        return most_certain(self, rows, part, log_probs)


@dataclass(frozen=True, kw_only=True)
class ConfidencePass(Pass):
    """A pass over all masked positions of some rows.

    Attributes:
        kept: (row among the m, rank) of what the pass keeps: the best of each row.
        share_ahead: [m], passes of each row that are still to come, of all.
    """

    kept: Places
    share_ahead: Float[Tensor, "m"]


def confidence_order(rows: Rows, nfe: int) -> Iterator[ConfidencePass]:
    """Every pass of a row reveals ceil(masked / nfe) positions, the last one the rest.

    How many positions a pass has is known beforehand, on the host, which waits for a GPU once.
    """
    device, mask_id = rows.active.device, rows.student.mask_id
    left = rows.open.sum(dim=1).cpu()
    each = (-(-left // nfe)).clamp_min(1)
    num_passes = -(-left // each)
    for number in range(1, max(num_passes.tolist(), default=0) + 1):
        running = left.nonzero()[:, 0]
        for group in row_groups(left[running].tolist(), mask_id + 1):
            some = running[group]
            sizes, chosen = left[some], rows.active[placed(some, device)]
            known = (rows.tokens[chosen, rows.columns] != mask_id).to(torch.uint8)
            listed = _first_columns(sizes, device)
            positions = known.argsort(dim=1, stable=True)[listed.index] + rows.columns.start
            yield ConfidencePass(
                chosen,
                Places(chosen[listed.rows], positions),
                Places(listed.rows, positions),
                torch.full_like(chosen, number),
                kept=_first_columns(each[some].minimum(sizes), device),
                share_ahead=placed(1 - number / num_passes[some].double(), device),
            )
        left = (left - each).clamp_min(0)


def _first_columns(counts: Int[Tensor, "m"], device: torch.device) -> Places:
    """The first ``counts`` columns of each row, row by row; counted on the host."""
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    columns = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    return Places(*placed(torch.stack((rows, columns)), device))


def most_certain(
    sampler: Any, rows: Rows, part: ConfidencePass, log_probs: Float[Tensor, "n v1"]
) -> tuple[Places, Int[Tensor, "k"]]:
    """The places that a pass keeps, and their tokens, by the settings of a confidence sampler.

    The draws of a position (its token's, its Gumbel noise) are the same in all passes, so a sample
    depends on its own name alone.
    """
    tokens = sampler.rule.choose(log_probs, rows.keys.at("sampling tokens", part.places))
    noise = gumbels(rows.keys.at("sampling order", part.places))
    scale = sampler.order_temperature * part.share_ahead[part.where.rows]
    scores = certainty(log_probs, tokens, sampler.confidence).double() + scale * noise
    shape = len(part.rows), rows.tokens.shape[1]
    table = scores.new_full(shape, -math.inf).index_put(part.where.index, scores)
    candidates = tokens.new_zeros(shape).index_put(part.where.index, tokens)
    best = table.argsort(dim=1, descending=True, stable=True)[part.kept.index]
    return Places(part.rows[part.kept.rows], best), candidates[part.kept.rows, best]


def certainty(log_probs: Float[Tensor, "n v1"], tokens: Int[Tensor, "n"], confidence: Confidence) -> Float[Tensor, "n"]:
    """How certain the student is of some tokens, nats; the last entry is the mask's, no rival."""
    if confidence == "probability":
        return log_probs.gather(-1, tokens[:, None])[:, 0]
    best, second = log_probs[:, :-1].topk(2, dim=-1).values.unbind(-1)
    return best - second


def gumbels(keys: PositionKeys) -> Float[Tensor, "n"]:
    """Standard Gumbel noise, one float64 number per position: -log(-log U)."""
    return -(-uniforms(keys, 0, 1)[:, 0].log()).log()
