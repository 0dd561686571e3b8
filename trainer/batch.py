"""What one training step sees: token rows, their teacher log-probabilities and their noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.noise import Noise


@runtime_checkable
class RowNoise(Protocol):
    """The noise of a batch of rows, read at the masked positions only."""

    def at(self, mask: Bool[Tensor, "b l"]) -> Noise:
        """Noise of the masked positions in row-major order; column 0 is never masked."""
        ...


@dataclass(frozen=True)
class Batch:
    """This rank's share of one global batch.

    Attributes:
        tokens: [B, L] int64 clean rows.
        token_log_probs: [B, L] float32, log p of each token under the teacher, nats; column 0 is 0.
        row_ids: [B] int64, row index in the split.
        slots: [B] int64, index in the global batch.
        global_batch_size: Rows of the global batch.
        step: Optimizer step the batch belongs to.
        epoch: Pass over the split.
        seed: Run seed; with epoch and row id it keys times and masks.
        noise: Noise of the rows; None when the store's noise is not needed.
    """

    tokens: Int[Tensor, "b l"]
    token_log_probs: Float[Tensor, "b l"]
    row_ids: Int[Tensor, "b"]
    slots: Int[Tensor, "b"]
    global_batch_size: int
    step: int
    epoch: int
    seed: int
    noise: RowNoise | None = None
