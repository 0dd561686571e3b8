"""The rows of a block sampler under way: tokens, window, key/value cache, who is still running."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from shards.errors import UsageError
from trainer.objective.batch import Places
from trainer.objective.schedules import law_of
from trainer.sampling.confidence import Confidence, ConfidenceOrder, SurestFirst
from trainer.sampling.noise import NoiseUse, StepLevels, require_times
from trainer.sampling.revealing import (
    LAST_TIME,
    ancestral_order,
    ancestral_times,
    reveal,
    uniform_order,
)
from trainer.sampling.sampler import DiffusionSampler, check_tokens
from trainer.sampling.stopping import SampleResult, StopRule
from trainer.sampling.token_rule import SampleKeys, TokenRule
from trainer.students.registry import BD3LM, Student


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


# Block by block from a block-diffusion student (BD3-LM, Arriola et al. 2025), with a KV cache.
#
# Each block is filled by ancestral or first-hitting sampling, or the surest tokens first, while all
# earlier blocks are known. The keys and values of finished blocks are kept. A block enters the
# cache in the first forward pass of the next block, so every forward pass is one that predicts:
# NFE is all there is. Noise is read at masked positions only, which the current block has and
# finished ones have not, so the cache of a conditioned student is that of its clean tokens.
#
# Beyond the trained length the student sees a window of the last blocks, at positions 0, 1, ...
# When the window is full its front is dropped and the rest is read again in one pass.


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DiffusionSampler):
    """Semi-autoregressive sampling of rows of any length that the block size divides.

    Given tokens inside a row are kept, but a block is filled before the student sees what is given
    behind it.

    Attributes:
        inner: How a block is filled: ``ancestral`` in steps, ``first_hitting``, one token per
            forward pass, or by ``confidence``, as :class:`ConfidenceConfig` fills a row.
        nfe: Not of ``first_hitting``: most forward passes per sample, spread evenly over its blocks
            (one block more wherever the division leaves a rest); None is one per token of a block.
        confidence: Of ``inner=confidence`` only: see :class:`ConfidenceConfig`.
        order_temperature: Likewise.
        final_argmax: Ancestral only: see :class:`AncestralConfig`.
        use_cache: Keep keys and values; without, every pass reads the whole window.
        slide: Tokens dropped when the window is full, a multiple of the block size; None is half
            the window. (The authors drop one block at a time and keep no cache.)

    Further settings as in :class:`DiffusionSampler`.
    """

    inner: Literal["ancestral", "first_hitting", "confidence"] = "ancestral"
    nfe: int | None = None
    confidence: Confidence = "margin"
    order_temperature: float = 0.0
    final_argmax: bool = True
    use_cache: bool = True
    slide: int | None = None

    label: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.order  # which refuses what it cannot follow
        if self.inner == "first_hitting" and self.nfe is not None:
            raise UsageError(
                "first-hitting blocks take no NFE", where="nfe", got=self.nfe, remedy="leave it out"
            )
        if self.inner != "confidence" and self.order != ConfidenceOrder():
            raise UsageError(
                "a setting of another order",
                where="confidence, order_temperature",
                got=f"{self.confidence}, {self.order_temperature:g} with inner={self.inner}",
                remedy="leave them out, or --set inner=confidence",
            )

    @property
    def order(self) -> ConfidenceOrder:
        """Which positions of a block come first, where the student says so."""
        return ConfidenceOrder(self.confidence, self.order_temperature)

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> BD3LM:
        """See :class:`Sampler`."""
        super().check(student, tokens)
        check_tokens(student, tokens)
        if not isinstance(student, BD3LM):
            raise UsageError(
                "the block sampler fills block by block",
                where="sampler",
                got=type(student).__name__,
                expected="a BD3-LM student",
                remedy="use --sampler ancestral for an MDLM",
            )
        has_times = self.inner == "ancestral" and not self.use_cache
        # Finished blocks are read at the time of the current one, so no cache can hold them.
        require_times(student, has_times, "--set inner=ancestral --set use_cache=false")
        length, block = tokens.shape[1], student.block_size
        if length % block:
            raise UsageError(
                "the block size does not divide the length",
                where="length",
                got=length,
                expected=f"a multiple of {block}",
            )
        num_blocks = length // block
        if self.nfe is not None and self.nfe < num_blocks:
            raise UsageError(
                "fewer forward passes than blocks",
                where="nfe",
                got=self.nfe,
                expected=f"at least {num_blocks}, one for each block of {block} tokens",
            )
        self.window(student)
        return student

    def window(self, student: BD3LM) -> Window:
        """What the student sees.

        Raises:
            UsageError: For a slide that is no multiple of the block size within the window.
        """
        block, capacity = student.block_size, student.config.row_length
        half = max(1, capacity // block // 2) * block
        slide = half if self.slide is None else self.slide
        if slide % block or not block <= slide <= capacity:
            expected = f"a multiple of {block} up to {capacity}"
            raise UsageError("bad slide", where="slide", got=slide, expected=expected)
        return Window(capacity, block, slide)

    def block_budgets(self, num_blocks: int, block_size: int) -> list[int]:
        """Ancestral steps of each block."""
        if self.nfe is None:
            return [block_size] * num_blocks
        marks = [self.nfe * block // num_blocks for block in range(num_blocks + 1)]
        return [stop - start for start, stop in itertools.pairwise(marks)]

    def fill(
        self, student: BD3LM, tokens: Int[Tensor, "b l"], use: NoiseUse, keys: SampleKeys
    ) -> SampleResult:
        """See :class:`DiffusionSampler`."""
        size, num_blocks = student.block_size, tokens.shape[1] // student.block_size
        budgets = self.block_budgets(num_blocks, size)
        state = BlockState(student, tokens, use, self.window(student), self.use_cache)
        last_time = LAST_TIME if self.final_argmax else 0.0
        is_last_try = keys.attempt + 1 >= self.stop.max_tries
        for block, budget in enumerate(budgets):
            times = ancestral_times(budget, last_time) if self.inner == "ancestral" else None
            state.enter(block, times)
            here = keys.select(state.active)
            if self.inner == "confidence":
                state.fill_surest(self.order, self.rule, here, budget)
            else:
                drawn, left = self._steps(student, state.masked_here, here, block * size, times)
                state.fill(drawn, self.rule, here)
                state.fill(left, TokenRule("argmax"), here)
            state.retire(self.stop, is_last_try)
            if not len(state.active):
                break
        return state.result(self.stop)

    def _steps(
        self,
        student: BD3LM,
        masked: Bool[Tensor, "b block"],
        keys: SampleKeys,
        first: int,
        times: Float[Tensor, "steps1"] | None,
    ) -> tuple[Int[Tensor, "b block"], Int[Tensor, "b block"]]:
        """Steps that reveal the block's positions, those of the final fill apart."""
        if times is None:
            return uniform_order(masked, keys, first)
        return ancestral_order(law_of(student.settings.diffusion), masked, keys, first, times)
