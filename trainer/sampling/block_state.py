"""The rows of a block sampler under way: tokens, window, key/value cache, who is still running."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from trainer.objective import Places
from trainer.sampling.rules import (
    ConfidenceOrder,
    NoiseUse,
    SampleKeys,
    SampleResult,
    StepLevels,
    StopRule,
    SurestFirst,
    TokenRule,
    reveal,
)
from trainer.students import BD3LM


@dataclass(frozen=True)
class Window:
    """The last tokens that a student of limited length sees.

    Attributes:
        capacity: Most tokens, the trained row length.
        block_size: Tokens per block.
        slide: Tokens dropped at a time.
    """

    capacity: int
    block_size: int
    slide: int

    def start(self, end: int) -> int:
        """First visible token when the current block ends at ``end``."""
        excess = max(0, end - self.capacity)
        return -(-excess // self.slide) * self.slide


class BlockState:
    """B rows on their way; columns of a block are its ``block_size`` positions.

    Args:
        student: Fills the blocks.
        tokens: [B, L] rows as given.
        use: Their noise, checked.
        window: What the student sees.
        use_cache: Whether keys and values are kept.
    """

    def __init__(
        self,
        student: BD3LM,
        tokens: Int[Tensor, "b l"],
        use: NoiseUse,
        window: Window,
        use_cache: bool,
    ) -> None:
        self.student, self.use, self.window = student, use, window
        self.tokens, self.filled = tokens.clone(), tokens == student.mask_id
        self.active = torch.arange(len(tokens), device=tokens.device)
        self.nfe = torch.zeros_like(self.active)
        self.lengths = torch.full_like(self.active, tokens.shape[1])
        self.low_entropy = torch.zeros_like(self.active, dtype=torch.bool)
        self.cache = student.start_cache(len(tokens)) if use_cache else None
        self.window_start = self.start = self.stop = 0
        self.levels = StepLevels(None)
        self.condition: Tensor | None = None

    @property
    def tokens_here(self) -> Int[Tensor, "m block"]:
        """The running rows' tokens of the current block."""
        return self.tokens[self.active, self.start : self.stop]

    @property
    def masked_here(self) -> Bool[Tensor, "m block"]:
        """Which of them are to be filled."""
        return self.tokens_here == self.student.mask_id

    def enter(self, block: int, times: Float[Tensor, "steps1"] | None) -> None:
        """Go to a block; ``times`` are those of its ancestral steps."""
        size = self.student.block_size
        self.start, self.stop = block * size, (block + 1) * size
        window_start = self.window.start(self.stop)
        if window_start != self.window_start and self.cache is not None:
            self.cache.length = 0  # positions shift, so everything visible is read again
        self.window_start = window_start
        self.levels = StepLevels.of(self.student, times)
        self.condition = None
        if not self.use.redraw:
            self.condition = self.use.embed(self.student, self.masked_here, self.active, self.start)

    def fill(self, steps: Int[Tensor, "m block"], rule: TokenRule, keys: SampleKeys) -> None:
        """Reveal positions of the current block in their steps."""
        self._take(
            reveal(self._predict, self.tokens_here, steps, rule, keys, first_position=self.start)
        )

    def fill_surest(
        self, order: ConfidenceOrder, rule: TokenRule, keys: SampleKeys, nfe: int
    ) -> None:
        """Reveal the current block's masked positions in at most ``nfe`` passes, surest first."""
        surest = SurestFirst(order, rule, keys, self.student.mask_id, self.start)
        self._take(surest.reveal(self._predict, self.tokens_here, nfe))

    def _take(self, filled: tuple[Int[Tensor, "m block"], Int[Tensor, "m"]]) -> None:
        tokens, passes = filled
        self.tokens[self.active, self.start : self.stop] = tokens
        self.nfe[self.active] += passes

    def _predict(
        self,
        rows: Int[Tensor, "m"],
        tokens: Int[Tensor, "m block"],
        where: Places,
        steps: Int[Tensor, "m"],
    ) -> Float[Tensor, "n v1"]:
        condition = self._condition(rows, tokens, steps)
        if self.cache is None:
            return self._predict_from_window(rows, tokens, where, condition, steps)
        finished = self.tokens[self.active, self.window_start + self.cache.length : self.start]
        if not finished.shape[1] and 2 * len(rows) < len(self.active):
            # So few rows are better served by a copy of their keys and values.
            part = self.cache.select(rows, room=tokens.shape[1])
            return self.student.predict_after(finished[rows], tokens, where, condition, part)
        # The cache holds all rows or none, so those with nothing to reveal come along. Their NFE
        # does not grow: alone they would read the finished block with the next one.
        everyone = self.tokens_here.index_put((rows,), tokens)
        everywhere = Places(rows[where.rows], where.positions)
        if condition is not None:
            blank = condition.new_zeros(len(everyone), *condition.shape[1:])
            condition = blank.index_put((rows,), condition)
        return self.student.predict_after(finished, everyone, everywhere, condition, self.cache)

    def _predict_from_window(
        self, rows: Tensor, tokens: Tensor, where: Places, condition: Tensor | None, steps: Tensor
    ) -> Float[Tensor, "n v1"]:
        context = self.tokens[self.active[rows], self.window_start : self.start]
        width = context.shape[1]
        if condition is not None:
            condition = pad(condition, (0, 0, width, 0))
        both = torch.cat((context, tokens), dim=1)
        where = where.shifted(width)
        return self.student.predict_at(both, where, condition, self.levels.at(steps))

    def _condition(
        self, rows: Tensor, tokens: Tensor, steps: Tensor
    ) -> Float[Tensor, "m block d"] | None:
        if not self.use.redraw:
            return None if self.condition is None else self.condition[rows]
        masked = tokens == self.student.mask_id
        return self.use.embed(self.student, masked, self.active[rows], self.start, steps)

    def retire(self, stop: StopRule, is_last_try: bool) -> None:
        """Take rows out that have ended, or that will be drawn anew."""
        tokens = self.tokens[self.active, : self.stop]
        filled = self.filled[self.active, : self.stop]
        lengths = stop.ends(tokens, filled, self.student.config.eos_token_id)
        has_ended = lengths < self.stop
        if stop.at_eos:
            has_ended |= (tokens[:, -1] == self.student.config.eos_token_id) & filled[:, -1]
        monotonous = stop.is_monotonous(tokens, lengths)
        self.low_entropy[self.active] |= monotonous
        self.lengths[self.active] = torch.where(has_ended, lengths, self.lengths[self.active])
        is_done = has_ended if is_last_try else has_ended | monotonous
        if bool(is_done.any()):
            kept = (~is_done).nonzero()[:, 0]
            self.active = self.active[kept]
            self.cache = None if self.cache is None else self.cache.select(kept)

    def result(self, stop: StopRule) -> SampleResult:
        """The rows as they are; behind its end a row holds eos."""
        tokens, details = self.tokens, {}
        eos = self.student.config.eos_token_id
        if stop.at_eos and eos is not None:
            place = torch.arange(tokens.shape[1], device=tokens.device)
            tokens = torch.where(place < self.lengths[:, None], tokens, eos)
        if stop.min_entropy_nats is not None:
            details["low_entropy"] = self.low_entropy
        return SampleResult(tokens, self.nfe, self.lengths, details)
