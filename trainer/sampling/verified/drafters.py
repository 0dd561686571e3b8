"""Drafts of the next tokens of rows of different lengths, each kind of student in its own way."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.base import UsageError
from trainer.students import BD3LM, MDLM, Student


@runtime_checkable
class Drafter(Protocol):
    """A student as coupled verification sees it."""

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """Where the positions end that one pass predicts when the tokens before ``first`` stand."""
        ...

    def log_probs(
        self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]
    ) -> Float[Tensor, "n v"]:
        """Log-probabilities at the n masked positions of ``where``, row-major.

        Args:
            tokens: The rows: known tokens, then the mask id.
            where: Positions from each row's first masked one, within its reach.
        """
        ...

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """Go on with some of the rows."""
        ...


class WholeRowDrafter:
    """An MDLM reads the whole row, masks and all, as it did in training.

    Args:
        student: The model.
        condition: Noise embeddings of the positions to fill; None without noise.
    """

    def __init__(self, student: MDLM, condition: Float[Tensor, "b l d"] | None) -> None:
        self.student, self.condition = student, condition

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """The row's end."""
        return torch.full_like(first, self.student.config.row_length)

    def log_probs(
        self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]
    ) -> Float[Tensor, "n v"]:
        """See :class:`Drafter`."""
        return self.student.predict_at(tokens, where, self.condition)[:, :-1]

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """See :class:`Drafter`."""
        self.condition = None if self.condition is None else self.condition[rows]


class BlockDrafter:
    """A BD3-LM drafts the rest of a row's current block; finished blocks are kept in its cache.

    Rows may be in different blocks. The cache holds the blocks that are finished in all of them; a
    row that is ahead reads its further ones again, and a row that is behind sees nothing of them.

    Args:
        student: The model.
        condition: Noise embeddings of the positions to fill; None without noise.
        num_rows: B.
    """

    def __init__(
        self, student: BD3LM, condition: Float[Tensor, "b l d"] | None, num_rows: int
    ) -> None:
        self.student, self.condition = student, condition
        self.cache = student.start_cache(num_rows)

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """The end of the block that ``first`` lies in."""
        size = self.student.block_size
        return (first // size + 1) * size

    def log_probs(
        self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]
    ) -> Float[Tensor, "n v"]:
        """See :class:`Drafter`; rows without a position in ``where`` hold the others up."""
        size = self.student.block_size
        masked = tokens == self.student.mask_id
        block = masked.int().argmax(dim=1) // size
        known, start, stop = self.cache.length, int(block.min()) * size, int(block.max() + 1) * size
        return self.student.predict_after(
            tokens[:, known:start],
            tokens[:, start:stop],
            where[:, start:stop],
            None if self.condition is None else self.condition[:, start:stop],
            self.cache,
        )[:, :-1]

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """See :class:`Drafter`."""
        self.cache = self.cache.select(rows)
        self.condition = None if self.condition is None else self.condition[rows]


def require_drafter(student: Student) -> MDLM:
    """The student, if it can draft.

    Raises:
        UsageError: For an autoregressive student, or one that must be told the time.
    """
    if not isinstance(student, MDLM):
        raise UsageError(
            "this student drafts no rows for another model",
            where="sampler",
            got=type(student).__name__,
            expected="an MDLM or BD3-LM student",
            remedy="use --sampler sequential, or medusa for heads on a backbone",
        )
    return student


def drafter_of(student: MDLM, condition: Float[Tensor, "b l d"] | None, num_rows: int) -> Drafter:
    """The student's way of drafting ``num_rows`` rows."""
    if isinstance(student, BD3LM) and student.num_blocks > 1:
        return BlockDrafter(student, condition, num_rows)
    return WholeRowDrafter(student, condition)
