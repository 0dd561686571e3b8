"""Which masked positions a pass reveals when the student itself says of which it is surest.

Unlike the orders of :mod:`trainer.sampling.revealing` this one is not drawn beforehand: every
pass predicts all masked positions and keeps the best. For a student without noise such an order
costs variety, for the surest tokens are the commonest ones, so Gumbel noise is added to it (Chang
et al. 2022). With noise as input the text is a function of the noise, and what the student is
surest of is what the noise has decided: the order needs no draw of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.errors import UsageError
from shards.noise.philox import PositionKeys, uniforms
from trainer.objective.batch import Places, placed
from trainer.sampling.revealing import Predict, row_groups
from trainer.sampling.sampler import WholeRow, WholeRowSampler
from trainer.sampling.token_rule import SampleKeys, TokenRule

Confidence = Literal["margin", "probability"]


@dataclass(frozen=True)
class ConfidenceOrder:
    """How sure a student is of a token, and how far that decides.

    Attributes:
        confidence: ``margin``: log p of the most probable token over the next one's, nats (Kim et
            al. 2025, in logarithms); ``probability``: log p of the chosen token (Chang et al.
            2022).
        temperature: Scale of the Gumbel noise on the confidence, nats; falls linearly, to 0 in the
            last pass.
    """

    confidence: Confidence = "margin"
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UsageError(
                "bad scale",
                where="order_temperature",
                got=self.temperature,
                expected="at least 0, finite",
            )

    def scores(
        self,
        log_probs: Float[Tensor, "n v1"],
        chosen: Int[Tensor, "n"],
        gumbels: Float[Tensor, "n"],
        share_ahead: Float[Tensor, "n"],
    ) -> Float[Tensor, "n"]:
        """Confidence + temperature * share_ahead * gumbel; the largest are revealed.

        Args:
            log_probs: Prediction; the last entry is the mask's, which no token takes.
            chosen: The tokens that would be revealed.
            gumbels: Standard Gumbel noise.
            share_ahead: Passes of the row that are still to come, of all its passes.
        """
        if self.confidence == "margin":
            best, second = log_probs[:, :-1].topk(2, dim=-1).values.unbind(-1)
            sure = best - second
        else:
            sure = log_probs.gather(-1, chosen[:, None])[:, 0]
        return sure.double() + self.temperature * share_ahead * gumbels


@dataclass(frozen=True)
class SurestFirst:
    """Reveals masked positions, in each pass those of which the student is surest.

    The draws of a position (its token's, its Gumbel noise) are the same in all passes, so a sample
    depends on its own name alone.

    Attributes:
        order: Which positions.
        rule: How their tokens are chosen.
        keys: Names of the draws.
        mask_id: Id of the mask token.
        first_position: Row position of column 0, for the names of the draws.
    """

    order: ConfidenceOrder
    rule: TokenRule
    keys: SampleKeys
    mask_id: int
    first_position: int = 0

    def reveal(
        self, predict: Predict, tokens: Int[Tensor, "b l"], nfe: int
    ) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b"]]:
        """Fill rows; every pass of a row reveals ceil(masked / nfe) positions, the last the rest.

        How many positions a pass has is known beforehand, on the host, which waits for a GPU once.

        Args:
            predict: The student.
            tokens: The mask id where a token is to be filled in; others are never changed.
            nfe: Most forward passes per row.

        Returns:
            Tokens, and the forward passes each row took part in.
        """
        tokens, device = tokens.clone(), tokens.device
        left = (tokens == self.mask_id).sum(dim=1).cpu()
        each = (-(-left // nfe)).clamp_min(1)
        num_passes = -(-left // each)
        for number in range(1, max(num_passes.tolist(), default=0) + 1):
            running = left.nonzero()[:, 0]
            sizes = left[running]
            for group in row_groups(sizes.tolist()):
                rows, size = running[group], sizes[group]
                ahead = 1 - number / num_passes[rows].double()
                counts = each[rows].minimum(size)
                part = _Part(placed(rows, device), size, counts, ahead, number)
                self._reveal_part(predict, tokens, part)
            left = (left - each).clamp_min(0)
        return tokens, placed(num_passes, device)

    def _reveal_part(self, predict: Predict, tokens: Int[Tensor, "b l"], part: _Part) -> None:
        """One pass of some rows, whose tokens are changed in place."""
        here = tokens[part.rows]
        known = (here != self.mask_id).to(torch.uint8)
        masked_first = known.argsort(dim=1, stable=True)
        listed = part.listed(part.sizes)
        where = Places(listed.rows, masked_first[listed.index])
        log_probs = predict(part.rows, here, where, torch.full_like(part.rows, part.number))
        places = Places(part.rows[where.rows], where.positions)
        names = self.keys.at("sampling tokens", places, self.first_position)
        chosen = self.rule.choose(log_probs, names)
        candidates = here.index_put(where.index, chosen)
        scores = self.order.scores(
            log_probs,
            chosen,
            gumbels(self.keys.at("sampling order", places, self.first_position)),
            placed(part.share_ahead, tokens.device)[where.rows],
        )
        table = scores.new_full(here.shape, -math.inf).index_put(where.index, scores)
        kept = part.listed(part.counts)
        best = table.argsort(dim=1, descending=True, stable=True)[kept.index]
        tokens[part.rows[kept.rows], best] = candidates[kept.rows, best]


def gumbels(keys: PositionKeys) -> Float[Tensor, "n"]:
    """Standard Gumbel noise, one float64 number per position: -log(-log U)."""
    return -(-uniforms(keys, 0, 1)[:, 0].log()).log()


@dataclass(frozen=True)
class _Part:
    """Some rows of one pass; all but ``rows`` on the host.

    Attributes:
        rows: [m], on the rows' device.
        sizes: [m], masked positions.
        counts: [m], how many of them the pass reveals.
        share_ahead: [m], passes still to come, of all.
        number: Of the pass, from 1.
    """

    rows: Int[Tensor, "m"]
    sizes: Int[Tensor, "m"]
    counts: Int[Tensor, "m"]
    share_ahead: Float[Tensor, "m"]
    number: int

    def listed(self, counts: Int[Tensor, "m"]) -> Places:
        """The first ``counts`` columns of each row, row by row, on the rows' device."""
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        starts = (counts.cumsum(0) - counts)[rows]
        columns = torch.arange(len(rows)) - starts
        both = placed(torch.stack((rows, columns)), self.rows.device)
        return Places(both[0], both[1])


# The positions of which the student is surest come first (Chang et al. 2022; Kim et al. 2025).


@dataclass(frozen=True, kw_only=True)
class ConfidenceConfig(WholeRowSampler):
    """The same number of tokens in every forward pass, those that the student is surest of.

    Meant for conditioned students and ``decision=argmax``: their text is a function of the noise,
    so that an order of their choice costs no variety. Without noise it does; ``order_temperature``
    gives some back.

    Attributes:
        nfe: Forward passes per sample: each reveals ceil(masked / nfe) tokens.
        confidence: ``margin``, between the two most probable tokens, or ``probability``, of the
            chosen token.
        order_temperature: Gumbel noise on the confidence, nats, falling to 0 with the last pass.

    Further settings as in :class:`WholeRowSampler`.
    """

    nfe: int = 128
    confidence: Confidence = "margin"
    order_temperature: float = 0.0

    label: ClassVar[str] = "confidence"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.order  # which refuses what it cannot follow

    @property
    def order(self) -> ConfidenceOrder:
        """Which positions come first."""
        return ConfidenceOrder(self.confidence, self.order_temperature)

    def reveal(
        self, predict: WholeRow, tokens: Int[Tensor, "b l"], keys: SampleKeys
    ) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b"]]:
        """See :class:`WholeRowSampler`."""
        surest = SurestFirst(self.order, self.rule, keys, predict.student.mask_id)
        return surest.reveal(predict, tokens, self.nfe)
