"""Adaptive parallel decoding (APD; Israel, Van den Broeck, Grover, arXiv 2506.00413).

From left to right: the student drafts all tokens ahead in one forward pass, each from its own
marginal p_D; a small autoregressive model scores the draft in one pass. With the same random draw
the target p_T ~ p_D^R p_AR^(1-R) picks a token at each position too; the longest prefix on which
draft and target agree is kept, and at least the first token, which needs no verifier: all tokens
before it are known. R = 1 keeps every draft and so is the student itself, from left to right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.settings import setting
from trainer.objective.batch import Places
from trainer.sampling.fill import Pass, Rows, Sampler, check_length, check_times, require_whole_row_student
from trainer.sampling.noise import STEPS_PER_ATTEMPT, RowNoise, SampleKeys, position_chunks
from trainer.sampling.verifier import CausalReader, SecondModel
from trainer.students.registry import Student


class AdaptiveRows(Rows):
    """Rows that two models read; each has its own frontier, the first position still masked.

    Attributes:
        active: [m] rows with positions to fill.
        first: [m] their frontiers.
        stop: [m] where their drafts end.
        reader: The verifier.
    """

    active: Int[Tensor, "m"]
    first: Int[Tensor, "m"]
    stop: Int[Tensor, "m"]
    reader: CausalReader

    def predict(self, part: Pass) -> Float[Tensor, "n v1"]:
        """See :class:`Rows`; what stands behind a row's draft is not seen."""
        width = int(self.stop.max())
        visible = torch.arange(width, device=self.stop.device) < self.stop[:, None]
        condition = None if self.condition is None else self.condition[part.rows, :width]
        seen = None if bool(visible.all()) else visible
        tokens = self.tokens[part.rows, :width]
        return self.student.predict_at(tokens, part.where, condition, visible=seen)


@dataclass(frozen=True, kw_only=True)
class AdaptiveSampler(SecondModel, Sampler):
    """Left to right, as many tokens per forward pass as a verifier agrees with.

    ``details`` hold ``verifier_nfe``, ``drafted`` and ``accepted`` tokens, and their ratio
    ``acceptance``.

    Attributes:
        mixture_weight: R in [0, 1]: weight of the student in the target; the rest is the
            verifier's.
        max_lookahead: Most tokens drafted at a time; None drafts to the row's end.
        temperature: Divides the log-probabilities, of draft and target alike.

    Further settings as in :class:`SecondModel` and :class:`Sampler`.
    """

    mixture_weight: float = setting(0.7, within="[0, 1]")
    max_lookahead: int | None = setting(None, within="[1, inf)")
    temperature: float = 1.0

    label: ClassVar[str] = "apd"

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """See :class:`Sampler`; a verifier that does not fit is refused too."""
        super().check(student, tokens)
        check_length(student, tokens)
        check_times(student, False, "use --sampler ancestral")
        self.load(student).require_context(tokens.shape[1])
        require_whole_row_student(student, "adaptive")

    def start(self, student: Student, tokens: Int[Tensor, "b l"], noise: RowNoise, keys: SampleKeys) -> AdaptiveRows:
        """See :class:`Sampler`."""
        rows, verifier = AdaptiveRows(student, tokens, noise, keys), self.load(student)
        rows.active = rows.masked.any(dim=1).nonzero()[:, 0]
        rows.reader = verifier.reader(len(rows.active), tokens.device)
        counts = torch.zeros(3, len(tokens), dtype=torch.int64, device=tokens.device)
        rows.details = dict(zip(("verifier_nfe", "drafted", "accepted"), counts, strict=True))
        return rows

    def order(self, rows: AdaptiveRows) -> Iterator[Pass]:  # type: ignore[override]
        """See :class:`Sampler`."""
        length, mask_id = rows.tokens.shape[1], rows.student.mask_id
        while len(rows.active):
            masked = rows.tokens[rows.active] == mask_id
            rows.first = masked.int().argmax(dim=1)
            rows.reader.keep(torch.minimum(rows.reader.lengths, rows.first - 1))
            rows.stop = (rows.first + (self.max_lookahead or length)).clamp_max(length)
            here = masked & (torch.arange(length, device=masked.device) < rows.stop[:, None])
            where = Places.of(here)
            yield Pass(rows.active, Places(rows.active[where.rows], where.positions), where)
            left = (rows.tokens[rows.active] == mask_id).any(dim=1).nonzero()[:, 0]
            if len(left) < len(rows.active):
                rows.active = rows.active[left]
                rows.reader.select(left)
        details = rows.details
        details["acceptance"] = details["accepted"] / details["drafted"].clamp_min(1)

    def choose(
        self, rows: AdaptiveRows, part: Pass, log_probs: Float[Tensor, "n v1"]
    ) -> tuple[Places, Int[Tensor, "k"]]:
        """See :class:`Sampler`: each row's drafts before the first disagreement."""
        row, position = part.where.index
        # Draft and target of one pass share their draws; every pass has its own.
        draw = rows.keys.attempt * STEPS_PER_ATTEMPT + int(rows.nfe[part.rows[0]]) + 1
        keys = replace(rows.keys.at("sampling tokens", part.places), draw=draw)
        draft = self.rule.choose(log_probs, keys)
        num_drafted = row.bincount(minlength=len(part.rows))
        agrees = torch.ones_like(draft, dtype=torch.bool)
        if self.mixture_weight < 1 and bool((num_drafted > 1).any()):
            tokens = rows.tokens[part.rows].index_put(part.where.index, draft)
            last, width = rows.stop - 1, int((rows.stop - rows.first).max())
            logits = rows.reader.next_logits(tokens, last, width)
            verdict = logits[row, position - last[row] + width - 1].log_softmax(dim=-1)
            mixed = [
                self.rule.choose(mixture(log_probs[chunk], verdict[chunk], self.mixture_weight), keys.select(chunk))
                for chunk in position_chunks(len(draft), log_probs.shape[1], draft.device)
            ]
            agrees = (torch.cat(mixed) == draft) | (position == rows.first[row])
            rows.details["verifier_nfe"][part.rows] += num_drafted > 1
        shape = len(part.rows), rows.tokens.shape[1]
        table = agrees.new_ones(shape).index_put(part.where.index, agrees)
        kept = table.cummin(dim=1).values[part.where.index].nonzero()[:, 0]
        rows.details["drafted"][part.rows] += num_drafted
        rows.details["accepted"][part.rows] += row[kept].bincount(minlength=len(part.rows))
        return Places(part.places.rows[kept], position[kept]), draft[kept]


def mixture(student: Float[Tensor, "n v1"], verifier: Float[Tensor, "n v"], weight: float) -> Float[Tensor, "n v1"]:
    """log p_T = R log p_D + (1 - R) log p_AR, normalised; the mask keeps no probability.

    Args:
        student: Log-probabilities of the student; the last entry is the mask's.
        verifier: Log-probabilities of the verifier.
        weight: R.
    """
    mixed = weight * student[:, :-1].double() + (1 - weight) * verifier.double()
    return torch.nn.functional.pad(mixed.log_softmax(dim=-1), (0, 1), value=-1e6)
