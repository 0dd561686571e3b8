"""Gumbel noise as the rest of the system sees it: arrival times F = exp(-xi), read in vocabulary tiles.

A ``Noise`` is a flat batch of n token positions with one noise vector of V entries each. Nothing
asks for the whole [n, V] tensor: readers walk the vocabulary in tiles, and a tile that is asked
for twice (once in forward, once in backward) has the same bits both times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class PositionKeys:
    """Names n token positions for the counter-based generator.

    Attributes:
        seed: 63-bit stream seed (see :func:`shards.seeding.derive_seed`).
        rows: Row index in the split, or sample index when sampling; [n] int64.
        positions: Token position in the row; [n] int64.
        draw: Which draw of the same position: 0 for a frozen draw, else the visit (epoch).
    """

    seed: int
    rows: Int[Tensor, "n"]
    positions: Int[Tensor, "n"]
    draw: int = 0

    def select(self, index: Int[Tensor, "m"] | Bool[Tensor, "n"]) -> PositionKeys:
        """The keys of some of the positions."""
        return PositionKeys(self.seed, self.rows[index], self.positions[index], self.draw)

    def to(self, device: torch.device | str) -> PositionKeys:
        """The same keys on another device."""
        return PositionKeys(self.seed, self.rows.to(device), self.positions.to(device), self.draw)


@runtime_checkable
class Noise(Protocol):
    """n positions x V vocabulary entries of arrival times F = exp(-xi), float32."""

    @property
    def num_positions(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """Arrival times of vocabulary ids start..stop-1; +inf where the entry was truncated away.

        A pure function of its arguments: the same bits at every call.
        """
        ...

    def select(self, index: Int[Tensor, "m"] | Bool[Tensor, "n"]) -> Noise:
        """The noise of some of the positions."""
        ...

    def to(self, device: torch.device | str) -> Noise:
        """The same noise on another device."""
        ...


@dataclass(frozen=True)
class DenseNoise:
    """Noise whose arrival times are all in memory; [n, V] float32."""

    arrivals: Float[Tensor, "n v"]

    @property
    def num_positions(self) -> int:
        return self.arrivals.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.arrivals.shape[1]

    @property
    def device(self) -> torch.device:
        return self.arrivals.device

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.arrivals[:, start:stop]

    def select(self, index: Int[Tensor, "m"] | Bool[Tensor, "n"]) -> DenseNoise:
        return DenseNoise(self.arrivals[index])

    def to(self, device: torch.device | str) -> DenseNoise:
        return DenseNoise(self.arrivals.to(device))


def dense_arrivals(noise: Noise) -> Float[Tensor, "n v"]:
    """All arrival times at once; for small vocabularies, tests and diagnostics."""
    return noise.tile(0, noise.vocab_size)
