"""Block by block from a block-diffusion student (BD3-LM, Arriola et al. 2025), with a KV cache.

Each block is filled by ancestral or first-hitting sampling, or the surest tokens first, while all
earlier blocks are known. The keys and values of finished blocks are kept. A block enters the cache
in the first forward pass of the next block, so every forward pass is one that predicts: NFE is all
there is. Noise is read at masked positions only, which the current block has and finished ones have
not, so the cache of a conditioned student is that of its clean tokens.

Beyond the trained length the student sees a window of the last blocks, at positions 0, 1, ...
When the window is full its front is dropped and the rest is read again in one pass.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.base import UsageError
from trainer.objective import schedule_of
from trainer.sampling.block_state import BlockState, Window
from trainer.sampling.rules import (
    LAST_TIME,
    Confidence,
    ConfidenceOrder,
    DiffusionSampler,
    NoiseUse,
    SampleKeys,
    SampleResult,
    TokenRule,
    ancestral_order,
    ancestral_times,
    check_tokens,
    require_times,
    uniform_order,
)
from trainer.students import BD3LM, Student


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
        return ancestral_order(schedule_of(student.settings), masked, keys, first, times)
