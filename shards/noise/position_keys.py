"""The names of token positions, from which the counter-based generator makes their noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Index = Int[Tensor, "m"] | Bool[Tensor, "n"] | slice
"""Which of n positions: their places, a mask, or a range."""


@dataclass(frozen=True)
class PositionKeys:
    """Names n token positions for the counter-based generator.

    Attributes:
        seed: 63-bit stream seed (see :func:`shards.base.seeding.derive_seed`).
        rows: Row index in the split, or sample index when sampling; [n] int64, below 2^44.
        positions: Token position in the row; [n] int64, below 2^20.
        draw: Which draw of the same position: 0 for a frozen draw, else the visit (epoch).
    """

    seed: int
    rows: Int[Tensor, "n"]
    positions: Int[Tensor, "n"]
    draw: int = 0

    def select(self, index: Index) -> PositionKeys:
        """The keys of some of the positions."""
        return PositionKeys(self.seed, self.rows[index], self.positions[index], self.draw)

    def to(self, device: torch.device | str) -> PositionKeys:
        """The same keys on another device."""
        return PositionKeys(self.seed, self.rows.to(device), self.positions.to(device), self.draw)
