"""The order of an epoch: a pure function of (seed, epoch), cheap to read from disk and well mixed.

1. The inner chunks are permuted, and the rows behind them laid out as one sequence.
2. The sequence is cut into K lanes of equal length. Position p of the epoch takes the next row of
   lane p mod K. A rank takes every w-th position, so when its world size w divides K it meets
   w-th of the lanes, and no other rank reads their chunks.
3. Within a lane, the rows of a chunk are spread over a sliding window of W chunks: bucket k holds
   the (k - j)-th of W random parts of each chunk j in (k - W, k], shuffled together. A lane
   holds W chunks in memory and opens one more at each bucket: reading is smooth.

Nothing depends on the batch size, the world size or the number of workers. Random bits come from
the Philox bit generator, whose stream NumPy guarantees, and orders from sorting them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64, UInt64

from shards.base import UsageError, derive_seed

LANE_CHOICES = (48, 24, 8, 4, 2, 1)
"""Lane counts with many divisors, largest first; each is a multiple of the next."""
CHUNKS_PER_LANE = 4
"""A lane end cuts a chunk, which is then read twice: at most 1/4 of all chunks."""
BLOCK_ROWS = 4096
"""Rows of a lane that are ordered at a time: a matter of speed only, not of the order."""

Indices = Int64[np.ndarray, "n"]


@runtime_checkable
class Order(Protocol):
    """Which row stands at which position of one epoch."""

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """The row at each position, and the last position at which its chunk may be needed.

        Args:
            positions: Positions in the epoch, [n], each in 0..num_rows - 1.
        """
        ...

    def positions_of_rank(self, start: int, stop: int, rank: int, world_size: int) -> Indices:
        """The positions in start..stop-1 (one global batch) that a rank reads, ascending."""
        ...


@dataclass(frozen=True)
class Shuffle:
    """How well an order mixes and how much memory that takes; part of the order's identity.

    Attributes:
        num_lanes: K. World sizes that divide it read every chunk once in total; others w read it
            w / gcd(w, K) times.
        window_chunks: W. K * W decoded chunks are in memory at a time, over all ranks.
    """

    num_lanes: int
    window_chunks: int = 8

    def __post_init__(self) -> None:
        for name in ("num_lanes", "window_chunks"):
            if getattr(self, name) < 1:
                raise UsageError(
                    "size out of range", where=name, got=getattr(self, name), expected="at least 1"
                )

    @classmethod
    def for_chunks(cls, num_chunks: int) -> Shuffle:
        """The default: as many lanes as the number of chunks can feed."""
        fitting = (k for k in LANE_CHOICES if num_chunks >= CHUNKS_PER_LANE * k)
        return cls(next(fitting, 1))


class SequentialOrder:
    """Rows as they are stored; each rank takes a contiguous part of a batch."""

    def __init__(self, num_rows: int, rows_per_chunk: int) -> None:
        self.num_rows, self.rows_per_chunk = num_rows, rows_per_chunk

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        last = (positions // self.rows_per_chunk + 1) * self.rows_per_chunk - 1
        return positions, np.minimum(last, self.num_rows - 1)

    def positions_of_rank(self, start: int, stop: int, rank: int, world_size: int) -> Indices:
        size = stop - start
        first, end = rank * size // world_size, (rank + 1) * size // world_size
        return np.arange(start + first, start + end, dtype=np.int64)


class ShuffledOrder:
    """The order described at the top of this module.

    Args:
        num_rows: N, rows of the split.
        rows_per_chunk: Rows of an inner chunk; the last chunk may hold fewer.
        seed: The user's seed.
        epoch: Which pass over the data.
        shuffle: K and W; derived from the number of chunks unless given.
    """

    def __init__(
        self,
        num_rows: int,
        rows_per_chunk: int,
        seed: int,
        epoch: int,
        shuffle: Shuffle | None = None,
    ) -> None:
        num_chunks = -(-num_rows // rows_per_chunk)
        self.num_rows, self.rows_per_chunk = num_rows, rows_per_chunk
        self.shuffle = shuffle or Shuffle.for_chunks(num_chunks)
        self._key = derive_seed(seed, "row order", epoch)
        bits = _random_bits(derive_seed(seed, "chunk order", epoch), 0, num_chunks)
        self._chunks = np.argsort(bits, kind="stable")
        sizes = np.full(num_chunks, rows_per_chunk, dtype=np.int64)
        sizes[self._chunks == num_chunks - 1] = num_rows - (num_chunks - 1) * rows_per_chunk
        self._chunk_ends = np.cumsum(sizes)
        self._lanes = [self._make_lane(lane) for lane in range(self.shuffle.num_lanes)]
        self._blocks: dict[int, tuple[int, Indices, Indices]] = {}

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        num_lanes = self.shuffle.num_lanes
        rows, last = np.empty_like(positions), np.empty_like(positions)
        lanes, indices = positions % num_lanes, positions // num_lanes
        for lane in np.unique(lanes).tolist():
            chosen = np.flatnonzero(lanes == lane)
            rows[chosen], ends = self._locate_in_lane(lane, indices[chosen])
            last[chosen] = ends * num_lanes + lane
        return rows, last

    def positions_of_rank(self, start: int, stop: int, rank: int, world_size: int) -> Indices:
        first = start + (rank - start) % world_size
        return np.arange(first, stop, world_size, dtype=np.int64)

    def _make_lane(self, lane: int) -> _Lane:
        num_lanes = self.shuffle.num_lanes
        sizes = -(-(self.num_rows - np.arange(num_lanes)) // num_lanes)
        start, stop = int(sizes[:lane].sum()), int(sizes[: lane + 1].sum())
        first = int(np.searchsorted(self._chunk_ends, start, side="right"))
        last = int(np.searchsorted(self._chunk_ends, stop, side="left"))
        inner = self._chunk_ends[first:last] if stop > start else self._chunk_ends[:0]
        edges = np.concatenate([[start], inner, [stop]] if stop > start else [[start]])
        return _Lane(edges.astype(np.int64), self.shuffle.window_chunks)

    def _locate_in_lane(self, lane: int, indices: Indices) -> tuple[Indices, Indices]:
        """Rows at indices of a lane, and the last index at which each one's chunk is needed."""
        blocks = self._lanes[lane].block_of(indices)
        rows, last = np.empty_like(indices), np.empty_like(indices)
        for block in np.unique(blocks).tolist():
            chosen = np.flatnonzero(blocks == block)
            start, block_rows, block_last = self._block(lane, block)
            rows[chosen] = block_rows[indices[chosen] - start]
            last[chosen] = block_last[indices[chosen] - start]
        return rows, last

    def _block(self, lane: int, block: int) -> tuple[int, Indices, Indices]:
        """First index, rows and last needs of one block of a lane; the lane's latest is kept."""
        kept = self._blocks.get(lane)
        start = self._lanes[lane].block_start(block)
        if kept is None or kept[0] != start:
            sequence, last = self._lanes[lane].block(block, self._key)
            place = np.searchsorted(self._chunk_ends, sequence, side="right")
            before = self._chunk_ends[place - 1] * (place > 0)
            rows = self._chunks[place] * self.rows_per_chunk + sequence - before
            kept = self._blocks[lane] = (start, rows, last)
        return kept


class _Lane:
    """A run of the chunk-permuted row sequence, cut into fragments of one chunk each.

    Args:
        edges: Where the fragments begin in the sequence, and where the last one ends; [F + 1].
        window: W.
    """

    def __init__(self, edges: Indices, window: int) -> None:
        self.edges, self.window = edges, window
        sizes = np.diff(edges)
        num_fragments = len(sizes)
        buckets = np.zeros(num_fragments + window - 1, dtype=np.int64)
        for part in range(window):
            buckets[part : part + num_fragments] += (
                sizes * (part + 1) // window - sizes * part // window
            )
        self.bucket_starts = np.concatenate([[0], np.cumsum(buckets)])
        typical = max(1, int(sizes.max(initial=1)))
        self.buckets_per_block = max(4 * window, BLOCK_ROWS // typical)

    def block_of(self, indices: Indices) -> Indices:
        """Which block holds each index."""
        bucket = np.searchsorted(self.bucket_starts, indices, side="right") - 1
        return bucket // self.buckets_per_block

    def block_start(self, block: int) -> int:
        """The first index of a block."""
        return int(self.bucket_starts[block * self.buckets_per_block])

    def block(self, block: int, key: int) -> tuple[Indices, Indices]:
        """Sequence places of one block in lane order, and each one's fragment's last index."""
        first, stop = block * self.buckets_per_block, (block + 1) * self.buckets_per_block
        stop = min(stop, len(self.bucket_starts) - 1)
        low, high = max(0, first - self.window + 1), min(stop, len(self.edges) - 1)
        sizes = np.diff(self.edges[low : high + 1])
        begin, end = int(self.edges[low]), int(self.edges[high])
        fragment = np.repeat(np.arange(len(sizes)), sizes)
        bits = _random_bits(key, 2 * begin, 2 * (end - begin))
        # Ranks within each fragment in random order, then its part of W, then its bucket.
        by_fragment = np.lexsort((bits[0::2], fragment))
        rank = np.empty_like(fragment)
        rank[by_fragment] = np.arange(end - begin) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        size = sizes[fragment]
        part = ((rank + 1) * self.window - 1) // size
        bucket = low + fragment + part
        inside = np.flatnonzero((bucket >= first) & (bucket < stop))
        ordered = inside[np.lexsort((bits[1::2][inside], bucket[inside]))]
        last_bucket = np.minimum(low + fragment[ordered] + self.window, len(self.bucket_starts) - 1)
        return begin + ordered, self.bucket_starts[last_bucket] - 1


def _random_bits(key: int, start: int, count: int) -> UInt64[np.ndarray, "count"]:
    """Words start..start+count-1 of the Philox stream of ``key`` (four words per counter)."""
    generator = np.random.Philox(key=key, counter=start // 4)
    return generator.random_raw(start % 4 + count)[start % 4 :]


def epoch_order(
    num_rows: int, rows_per_chunk: int, seed: int, epoch: int, shuffle: Shuffle | None = None
) -> Indices:
    """All rows of a split in the order of one epoch; a pure function of its arguments.

    Returns:
        A permutation of 0..num_rows-1, [num_rows].
    """
    order = ShuffledOrder(num_rows, rows_per_chunk, seed, epoch, shuffle)
    return order.locate(np.arange(num_rows, dtype=np.int64))[0]
