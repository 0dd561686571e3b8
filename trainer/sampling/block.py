"""The samplers that go from left to right with a key/value cache: by blocks, and token by token.

A BD3-LM (Arriola et al. 2025) fills each block by ancestral or first-hitting sampling, or in
confidence order, while all earlier blocks are known. The keys and values of finished blocks are
kept. A block enters the cache in the first forward pass of the next block, so every forward pass is
one that predicts: NFE is all there is. Noise is read at masked positions only, which the current
block has and finished ones have not, so the cache of a conditioned student is that of its clean
tokens.

Beyond the trained length the student sees a window of the last blocks, at positions 0, 1, ...
When the window is full its front half is dropped and the rest is read again in one pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from shards.errors import UsageError
from shards.settings import setting
from trainer.objective.batch import Places
from trainer.sampling.fill import (
    PASSES,
    DiffusionSampler,
    Pass,
    Rows,
    Sampler,
    ancestral_order,
    ancestral_times,
    check_length,
    check_times,
)
from trainer.sampling.noise import Decision, RowNoise, SampleKeys
from trainer.sampling.orders import Confidence, ConfidencePass, confidence_order, most_certain, uniform_order
from trainer.students.dit import KeyValueCache
from trainer.students.registry import AR, BD3LM, Student

TOKENS_BETWEEN_QUESTIONS = 8
"""How often rows that may end early are asked whether all have, which makes the host wait."""


class BlockRows(Rows):
    """Rows of which one block is filled at a time.

    Attributes:
        active: [m] rows that have not ended.
        cache: Keys and values of finished blocks; None where every pass reads the window.
        columns: The current block.
        window_start: First position that the student sees.
    """

    student: BD3LM
    cache: KeyValueCache | None

    def start(self) -> None:
        """See :class:`Rows`."""
        self.cache, self.condition = None, None
        self.columns, self.window_start = slice(0, 0), 0

    def enter(self, block: int) -> None:
        """Go to a block."""
        size, capacity = self.student.block_size, self.student.config.row_length
        self.columns = slice(block * size, (block + 1) * size)
        half = max(1, capacity // size // 2) * size
        window_start = -(-max(0, self.columns.stop - capacity) // half) * half
        if window_start != self.window_start and self.cache is not None:
            self.cache.length = 0  # positions shift, so everything visible is read again
        self.window_start, self.levels = window_start, None
        self.condition = self.noise.embed(self.student, self.open, self.active, self.columns.start)

    def predict(self, part: Pass) -> Float[Tensor, "n v1"]:
        """See :class:`Rows`."""
        rows = torch.searchsorted(self.active, part.rows)  # their places among the active ones
        if self.cache is None:
            condition = None
            if self.condition is not None:
                before = (0, 0, self.columns.start - self.window_start, 0)
                condition = self.condition[rows].map(lambda part: pad(part, before))
            tokens = self.tokens[part.rows, self.window_start : self.columns.stop]
            where = part.where.shifted(-self.window_start)
            return self.student.predict_at(tokens, where, condition, self.level(part))
        # The cache holds all rows or none, so those with nothing to reveal come along. Their NFE
        # does not grow: alone they would read the finished block with the next one.
        where = Places(rows[part.where.rows], part.where.positions - self.columns.start)
        seen = slice(self.window_start + self.cache.length, self.columns.start)
        everyone, finished = (self.tokens[self.active, columns] for columns in (self.columns, seen))
        return self.student.predict_after(finished, everyone, where, self.condition, self.cache)

    def keep(self, kept: Int[Tensor, "k"]) -> None:
        """Go on with some of the active rows."""
        self.active = self.active[kept]
        self.cache = None if self.cache is None else self.cache.select(kept)


@dataclass(frozen=True, kw_only=True)
class BlockSampler(DiffusionSampler):
    """Semi-autoregressive sampling of rows of any length that the block size divides.

    Given tokens inside a row are kept, but a block is filled before the student sees what is given
    behind it.

    Attributes:
        inner: How a block is filled: ``ancestral`` in steps, ``first_hitting``, one token per
            forward pass, or by ``confidence``, as :class:`ConfidenceSampler` fills a row.
        nfe: Not of ``first_hitting``: most forward passes per sample, spread evenly over its blocks
            (one block more wherever the division leaves a rest).
        passes_per_block: Instead of ``nfe``: most forward passes of each block. With neither there
            is one per token.
        confidence: Of ``inner=confidence`` only: see :class:`ConfidenceSampler`.
        order_temperature: Likewise.
        final_argmax: Ancestral only: see :class:`AncestralSampler`.
        use_cache: Keep keys and values; without, every pass reads the whole window.

    Further settings as in :class:`DiffusionSampler`.
    """

    inner: Literal["ancestral", "first_hitting", "confidence"] = "ancestral"
    nfe: int | None = setting(None, within=PASSES)
    passes_per_block: int | None = setting(None, within=PASSES)
    confidence: Confidence = "margin"
    order_temperature: float = setting(0.0, within="[0, inf)")
    final_argmax: bool = True
    use_cache: bool = True

    label: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        nfe, each = self.nfe, self.passes_per_block
        if nfe is not None and each is not None:
            raise UsageError("these exclude each other", where="nfe", got=f"nfe={nfe}, passes_per_block={each}")
        for name, neutral, inner in (
            ("nfe", None, "ancestral or confidence"),
            ("passes_per_block", None, "ancestral or confidence"),
            ("confidence", "margin", "confidence"),
            ("order_temperature", 0, "confidence"),
            ("final_argmax", True, "ancestral"),
        ):
            if self.inner not in inner and (got := getattr(self, name)) != neutral:
                got, remedy = f"{got} with inner={self.inner}", f"leave it out, or inner={inner}"
                raise UsageError("a setting of another order", where=name, got=got, remedy=remedy)

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """See :class:`Sampler`."""
        if not isinstance(student, BD3LM):
            what, got = "the block sampler fills block by block", type(student).__name__
            expected, remedy = "a BD3-LM student", "use --sampler ancestral for an MDLM"
            raise UsageError(what, where="sampler", got=got, expected=expected, remedy=remedy)
        Sampler.check(self, student, tokens)
        has_times = self.inner == "ancestral" and not self.use_cache
        # Finished blocks are read at the time of the current one, so no cache can hold them.
        check_times(student, has_times, "--set inner=ancestral --set use_cache=false")
        length, block = tokens.shape[1], student.block_size
        if length % block:
            what, expected = "the block size does not divide the length", f"a multiple of {block}"
            raise UsageError(what, where="length", got=length, expected=expected)
        if self.nfe is not None and self.nfe < length // block:
            what, got = "fewer forward passes than blocks", self.nfe
            expected = f"at least {length // block}, one for each block of {block} tokens"
            remedy = "--passes-per-block counts the passes of each block"
            raise UsageError(what, where="nfe", got=got, expected=expected, remedy=remedy)

    def budgets(self, num_blocks: int, block_size: int) -> list[int]:
        """Most forward passes of each block."""
        if self.nfe is None:
            return [self.passes_per_block or block_size] * num_blocks
        marks = [self.nfe * block // num_blocks for block in range(num_blocks + 1)]
        return [stop - start for start, stop in itertools.pairwise(marks)]

    def start(self, student: Student, tokens: Int[Tensor, "b l"], noise: RowNoise, keys: SampleKeys) -> BlockRows:
        """See :class:`Sampler`."""
        rows = BlockRows(student, tokens, noise, keys)
        if self.use_cache:
            rows.cache = rows.student.start_cache(len(tokens))
        return rows

    def order(self, rows: BlockRows) -> Iterator[Pass]:  # type: ignore[override]
        """See :class:`Sampler`; rows that have ended, or will be drawn anew, leave."""
        size, stop, eos = rows.student.block_size, self.stop, rows.student.config.eos_token_id
        low = torch.zeros_like(rows.everyone, dtype=torch.bool)
        for block, budget in enumerate(self.budgets(rows.tokens.shape[1] // size, size)):
            rows.enter(block)
            if self.inner == "confidence":
                yield from confidence_order(rows, budget)
            elif self.inner == "first_hitting":
                yield from uniform_order(rows, None)
            else:
                yield from ancestral_order(rows, ancestral_times(budget, self.final_argmax))
            if self.can_stop and bool((done := self._is_done(rows, low)).any()):
                rows.keep((~done).nonzero()[:, 0])
            if not len(rows.active):
                break
        if stop.min_entropy_nats is not None:
            rows.details["low_entropy"] = low
        if stop.at_eos and eos is not None:  # behind its end a row holds eos
            lengths = stop.ends(rows.tokens, rows.masked, eos)
            place = torch.arange(rows.tokens.shape[1], device=lengths.device)
            rows.tokens = torch.where(place < lengths[:, None], rows.tokens, eos)

    def _is_done(self, rows: BlockRows, low: Bool[Tensor, "b"]) -> Bool[Tensor, "m"]:
        """Which active rows have ended or will be drawn anew; ``low`` marks monotonous ones."""
        stop, end, eos = self.stop, rows.columns.stop, rows.student.config.eos_token_id
        tokens, filled = (x[rows.active, :end] for x in (rows.tokens, rows.masked))
        lengths = stop.ends(tokens, filled, eos)
        has_ended = lengths < end
        if stop.at_eos:
            has_ended |= (tokens[:, -1] == eos) & filled[:, -1]
        monotonous = stop.is_monotonous(tokens, lengths)
        low[rows.active] |= monotonous
        is_last_try = rows.keys.attempt + 1 >= stop.max_tries
        return has_ended if is_last_try else has_ended | monotonous

    def choose(self, rows: Rows, part: Pass, log_probs: Float[Tensor, "n v1"]) -> tuple[Places, Int[Tensor, "k"]]:
        """See :class:`Sampler`."""
        if isinstance(part, ConfidencePass):
            return most_certain(self, rows, part, log_probs)
        return super().choose(rows, part, log_probs)


class SequenceRows(Rows):
    """Rows of an autoregressive student, which reads every token once.

    Attributes:
        stop: The position that is drawn now, behind the last one that is read.
        here: [B], rows that have a token to draw there.
    """

    student: AR
    stop: int
    here: Bool[Tensor, "b"]

    def start(self) -> None:
        """See :class:`Rows`."""
        self.cache, self.read = self.student.start_cache(len(self.tokens)), 0

    def predict(self, part: Pass) -> Float[Tensor, "n v1"]:
        """See :class:`Rows`; all rows are at one position."""
        new = self.tokens[:, self.read : self.stop]
        self.read = self.stop
        return self.student.predict_next(new, self.cache)


@dataclass(frozen=True, kw_only=True)
class SequentialSampler(Sampler):
    """Ordinary autoregressive sampling with a key/value cache, one token per forward pass.

    NFE is the number of tokens from the first to the last position to fill; given tokens among
    them are kept. The student takes no noise.

    Attributes:
        temperature: Divides the log-probabilities of the prediction; 1 leaves them.
        decision: Draw the tokens (``categorical``), or take the most probable ones.

    Further settings as in :class:`Sampler`.
    """

    temperature: float = 1.0
    decision: Decision = "categorical"

    label: ClassVar[str] = "sequential"
    rows_type: ClassVar[type[Rows]] = SequenceRows

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """See :class:`Sampler`."""
        super().check(student, tokens)
        check_length(student, tokens)
        if not isinstance(student, AR):
            what, got = "the sequential sampler goes from left to right", type(student).__name__
            expected = "an autoregressive student"
            raise UsageError(what, where="sampler", got=got, expected=expected)

    def order(self, rows: SequenceRows) -> Iterator[Pass]:  # type: ignore[override]
        """See :class:`Sampler`."""
        place, masked = torch.arange(rows.tokens.shape[1], device=rows.tokens.device), rows.masked
        eos = rows.student.config.eos_token_id
        begin = torch.where(masked, place, len(place)).amin(dim=1)
        end = torch.where(masked, place + 1, 0).amax(dim=1)
        has_ended = torch.zeros_like(begin, dtype=torch.bool)
        for position in range(int(begin.min()), int(end.max())):
            rows.stop, rows.here = position, masked[:, position] & ~has_ended
            # All rows draw, also those whose token is given: to leave some out is to count them.
            places = Places(rows.everyone, torch.full_like(rows.everyone, position))
            yield Pass(rows.everyone, places, places)
            if self.stop.at_eos and eos is not None:
                has_ended |= rows.here & (rows.tokens[:, position] == eos)
                rest = rows.tokens[:, position + 1 :]
                rows.tokens[:, position + 1 :] = torch.where(has_ended[:, None], eos, rest)
                if position % TOKENS_BETWEEN_QUESTIONS == 0 and bool(has_ended.all()):
                    break
        lengths = self.stop.ends(rows.tokens, masked, eos)
        rows.nfe = (torch.minimum(end, lengths) - begin).clamp_min(0)

    def choose(
        self, rows: SequenceRows, part: Pass, log_probs: Float[Tensor, "n v1"]
    ) -> tuple[Places, Int[Tensor, "n"]]:
        """See :class:`Sampler`."""
        places, drawn = super().choose(rows, part, log_probs)
        return places, torch.where(rows.here, drawn, places.read(rows.tokens))
