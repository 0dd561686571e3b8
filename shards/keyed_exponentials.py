"""Exp(1) variates keyed by position and vocabulary id, a tile at a time: the trainer's hot path.

A student of batch 16 x 512 asks for 2 x 10^8 of them per step, twice. So one Philox call serves
four vocabulary ids, its first two rounds are shared along rows and columns (only their exclusive
or is per entry), and the rest works in place on blocks that stay in a core's cache.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from shards.gumbel import exponential_from_bits
from shards.philox import (
    MASK,
    MULTIPLIERS,
    STREAM_BLOCK,
    STREAM_STRIDE,
    position_words,
    round_keys,
)
from shards.position_keys import PositionKeys

SHARED_ROUNDS = 2
BLOCK_ELEMENTS = 1 << 15
"""Counters per block and thread: six int64 buffers of that size fit a level-2 cache of 2 MB."""


def keyed_exponentials(keys: PositionKeys, start: int, stop: int) -> Float[Tensor, "n tile"]:
    """Exp(1) variates of n positions and vocabulary ids start..stop-1, float32.

    Equal to ``exponential_from_bits(keyed_bits(keys, start, stop))``.
    """
    rows, columns = _shared_rounds(keys, start, stop)
    num_positions, num_blocks = len(keys.rows), columns[0].shape[1]
    out = torch.empty(num_positions, num_blocks, 4, device=keys.rows.device)
    step = _rows_per_block(num_positions, num_blocks, out.device)
    for first in range(0, num_positions, step):
        part = slice(first, first + step)
        _fill(out[part], [word[part] for word in rows], columns, keys.seed)
    offset = start % 4
    return out.flatten(1)[:, offset : offset + stop - start]


def stream_exponentials(keys: PositionKeys, stream: int, count: int) -> Float[Tensor, "n count"]:
    """``count`` Exp(1) variates per position from a stream apart from every vocabulary id."""
    start = 4 * (STREAM_BLOCK + stream * STREAM_STRIDE)
    return keyed_exponentials(keys, start, start + count)


def first_arrivals(keys: PositionKeys) -> Float[Tensor, "n"]:
    """E_0 of n positions: stream 0."""
    return stream_exponentials(keys, 0, 1)[:, 0]


def _rows_per_block(num_positions: int, num_blocks: int, device: torch.device) -> int:
    if device.type != "cpu":
        return max(1, num_positions)
    return max(1, BLOCK_ELEMENTS * torch.get_num_threads() // max(1, num_blocks))


def _shared_rounds(keys: PositionKeys, start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
    """Two rounds in factored form: c0 = r0 ^ s0, c1 = s1, c2 = r2 ^ s2, c3 = r3.

    Returns:
        [r0, r2, r3], each [n, 1], and [s0, s1, s2], each [1, blocks].
    """
    blocks = torch.arange(start // 4, -(-stop // 4), device=keys.rows.device)[None]
    c1, c2, draw = position_words(keys)
    (k0, k1), (next_k0, next_k1) = round_keys(keys.seed)[:SHARED_ROUNDS]
    column, row = blocks * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
    c0, c2 = ((row >> 32) ^ c1 ^ k0) & MASK, ((column >> 32) ^ draw ^ k1) & MASK
    c1, c3 = row & MASK, column & MASK
    row, column = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
    rows = [c1 ^ next_k0, (row >> 32) & MASK, row]
    return rows, [(column >> 32) & MASK, column, c3 ^ next_k1]


def _fill(out: Tensor, rows: list[Tensor], columns: list[Tensor], seed: int) -> None:
    """Run the remaining rounds for [rows, blocks] counters and write [rows, blocks, 4] variates."""
    c0, c2 = rows[0] ^ columns[0], rows[1] ^ columns[2]
    c1, c3 = columns[1].expand_as(c0).contiguous(), rows[2].expand_as(c0).contiguous()
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    for k0, k1 in round_keys(seed)[SHARED_ROUNDS:]:
        torch.mul(c0, MULTIPLIERS[0], out=p0)
        torch.mul(c2, MULTIPLIERS[1], out=p1)
        torch.bitwise_right_shift(p1, 32, out=c0)
        c0.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK)
        torch.bitwise_right_shift(p0, 32, out=c2)
        c2.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK)
        c1, p1, c3, p0 = p1, c1, p0, c3
    c1.bitwise_and_(MASK)
    c3.bitwise_and_(MASK)
    for lane, words in enumerate((c0, c1, c2, c3)):
        out[..., lane] = exponential_from_bits(words)
