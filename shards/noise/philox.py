"""Philox4x32-10: random bits as a pure function of (seed, row, position, vocabulary id, draw).

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). One
call turns a counter of four 32-bit words and a key of two into four 32-bit words. There is no
state: the noise of any token is found again on any machine, in any order, in any tile.

A token position and a vocabulary id j name the counter

    (j // 4,  position + 2^20 * (row >> 32),  row mod 2^32,  draw mod 2^32)      lane j mod 4

and the seed names the key (low word, high word). Rows go up to 2^44 and positions up to 2^20.
Blocks from 2^31 on are no vocabulary ids; they are streams for other draws at the same position.

Words are kept in int64 tensors, since torch has no 32-bit unsigned product. The product of two
words wraps in int64; its low 64 bits are right, and so are both halves once masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from shards.noise.positions import OfPositions

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
NUM_ROUNDS = 10
POSITION_BITS = 20
STREAM_BLOCK = 1 << 31
STREAM_STRIDE = 1 << 24
"""Stream s owns the blocks STREAM_BLOCK + s * STREAM_STRIDE onwards."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class PositionKeys(OfPositions):
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

    @property
    def num_positions(self) -> int:
        return self.rows.shape[0]

    @cached_property
    def row_rounds(self) -> list[Int[Tensor, "n 1"]]:
        """What the first two rounds make of the positions alone: r0, r2, r3 (24 bytes each)."""
        (k0, _), (next_k0, _) = round_keys(self.seed)[:2]
        c1, c2, _ = position_words(self)
        row = c2 * MULTIPLIERS[1]
        c0, c1 = ((row >> 32) ^ c1 ^ k0) & MASK, row & MASK
        row = c0 * MULTIPLIERS[0]
        return [c1 ^ next_k0, (row >> 32) & MASK, row]

    def redrawn(self, draw: int) -> PositionKeys:
        """The same positions, ``draw`` draws further on."""
        return replace(self, draw=self.draw + draw)


def round_keys(seed: int) -> list[tuple[int, int]]:
    """The ten key pairs of a 64-bit seed."""
    low, high = seed & MASK, (seed >> 32) & MASK
    return [((low + r * WEYL[0]) & MASK, (high + r * WEYL[1]) & MASK) for r in range(NUM_ROUNDS)]


def philox4x32(counter: Words, seed: int) -> Words:
    """Four words per counter.

    Args:
        counter: Four int64 tensors with values below 2^32, of shapes that broadcast.
        seed: The key, low word first.

    Returns:
        Four int64 tensors with values below 2^32.
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in round_keys(seed):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & MASK, ((p0 >> 32) ^ c3 ^ k1) & MASK
        c1, c3 = p1, p0
    return c0, c1 & MASK, c2, c3 & MASK


def position_words(keys: PositionKeys) -> tuple[Int[Tensor, "n 1"], Int[Tensor, "n 1"], int]:
    """Counter words 1, 2 and 3 of n positions."""
    c1 = (keys.positions & ((1 << POSITION_BITS) - 1)) | ((keys.rows >> 32) << POSITION_BITS)
    return (c1 & MASK)[:, None], (keys.rows & MASK)[:, None], keys.draw & MASK


def keyed_bits(keys: PositionKeys, start: int, stop: int) -> Int[Tensor, "n tile"]:
    """32 random bits per position and vocabulary id start..stop-1, as int64."""
    first = start // 4
    blocks = torch.arange(first, -(-stop // 4), dtype=torch.int64, device=keys.rows.device)
    c1, c2, c3 = position_words(keys)
    draw = torch.full_like(blocks, c3)
    words = philox4x32((blocks[None], c1, c2, draw[None]), keys.seed)
    return torch.stack(words, dim=-1).flatten(1)[:, start - 4 * first : stop - 4 * first]


def stream_bits(keys: PositionKeys, stream: int, count: int) -> Int[Tensor, "n count"]:
    """``count`` words per position from stream 0..126, apart from every vocabulary id."""
    start = 4 * (STREAM_BLOCK + stream * STREAM_STRIDE)
    return keyed_bits(keys, start, start + count)
