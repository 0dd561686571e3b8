"""The order of an epoch: a pure function of (seed, epoch), cheap to read from disk and well mixed.

1. The inner chunks are permuted, and the rows of each; laid out one behind the other they are one
   sequence.
2. The sequence is cut into K lanes of equal length. Position p of the epoch takes the next row of
   lane p mod K. One chunk per lane is open at a time: K decoded chunks, over all ranks together.
3. Lanes that would all come to the end of a chunk at once are turned, each by another part of a
   chunk, so that reading is smooth.

K is a multiple of the global batch size where memory allows, so that the rows of a batch come from
as many chunks, and each of w ranks keeps to lanes of its own whatever w is: an epoch reads at most
1 + K / (number of chunks) times what there is. Where K is less than the batch, lanes on the border
between ranks are read by both: (w - gcd(w, K)) / K more if w < K, else w / K times. A split of a
few chunks is permuted whole (K = 0): then a rank may have to read all of it.

Nothing depends on the world size or the number of workers.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, UInt64

from shards.noise.philox import philox4x32
from shards.provenance import derive_seed

WINDOW_BYTES = 7 << 27
"""Decoded chunks open at a time, over all ranks of a run: 0.94 GB."""
WHOLE_CHUNKS = 384
"""A split of at most so many chunks is permuted whole, if the window holds it."""
TARGET_LANES = 512
"""Small batches take turns over so many lanes."""
MIXED_CHUNK_BYTES = WINDOW_BYTES // TARGET_LANES
"""Of chunks of this size, or of one row each, the window holds as many as a batch wants."""

BITS_AT_ONCE = 1 << 20
"""Random numbers of chunks drawn at a time."""

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


def lanes_for(
    num_chunks: int, chunk_bytes: int, batch_size: int, window_bytes: int = WINDOW_BYTES
) -> int:
    """K for a split: how many lanes a global batch wants, as far as memory goes; 0 for one whole.

    Args:
        num_chunks: Inner chunks of the split.
        chunk_bytes: Decoded bytes of one, all arrays together.
        batch_size: Rows of a global batch.
        window_bytes: Decoded chunks that may be open at a time. One chunk always may.
    """
    fitting = max(1, window_bytes // max(1, chunk_bytes))
    if num_chunks <= min(fitting, WHOLE_CHUNKS):
        return 0
    most = min(fitting, num_chunks)
    if batch_size <= most:
        return batch_size * max(1, min(TARGET_LANES, most) // batch_size)
    divisor = next(k for k in range(most, 0, -1) if batch_size % k == 0)
    return divisor if 2 * divisor >= most else most


def window_bytes_of(num_chunks: int, chunk_bytes: int, batch_size: int) -> int:
    """Decoded bytes that shuffling a split keeps in memory, over all ranks of a run."""
    return (lanes_for(num_chunks, chunk_bytes, batch_size) or num_chunks) * chunk_bytes


class Shuffling(NamedTuple):
    """What shuffling a split costs, over all ranks, and how well it mixes.

    Attributes:
        window_bytes: Decoded chunks in memory.
        batch_bytes: A global batch beside them; as many again for each that is read ahead.
        shared_rows: Share of a batch's rows that come from a chunk already met in it.
    """

    window_bytes: int
    batch_bytes: int
    shared_rows: float


def shuffling_of(num_rows: int, per_chunk: int, chunk_bytes: int, batch_size: int) -> Shuffling:
    """Cost and mixing, the latter of eight batches spread over epoch 0.

    Args:
        num_rows: Of the split.
        per_chunk: Rows of an inner chunk.
        chunk_bytes: Decoded bytes of one.
        batch_size: Rows of a global batch.
    """
    batch_size = min(batch_size, num_rows)
    num_chunks = -(-num_rows // per_chunk)
    lanes = lanes_for(num_chunks, chunk_bytes, batch_size)
    kind = LaneOrder if lanes else WholeOrder
    order: Order = kind(num_rows, per_chunk, 0, 0, *([lanes] if lanes else []))
    starts = np.linspace(0, num_rows - batch_size, 8).astype(np.int64)
    batches = (order.locate(start + np.arange(batch_size))[0] // per_chunk for start in starts)
    shared = float(np.mean([1 - len(np.unique(chunks)) / batch_size for chunks in batches]))
    row_bytes = chunk_bytes // per_chunk
    return Shuffling((lanes or num_chunks) * chunk_bytes, batch_size * row_bytes, shared)


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


class WholeOrder:
    """A permutation of all rows, of a split that the window holds.

    Args: as of :class:`LaneOrder`.
    """

    def __init__(self, num_rows: int, rows_per_chunk: int, seed: int, epoch: int) -> None:
        self.rows_per_chunk = rows_per_chunk
        key = derive_seed(seed, "row order", epoch)
        self._rows = np.argsort(_random_bits(key, np.arange(num_rows)), kind="stable")

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        return self._rows[positions], np.full_like(positions, len(self._rows) - 1)

    def positions_of_rank(self, start: int, stop: int, rank: int, world_size: int) -> Indices:
        return _cut(self._rows[start:stop] // self.rows_per_chunk, start, rank, world_size)


class LaneOrder:
    """The order described at the top of this module, for K > 0.

    Args:
        num_rows: N, rows of the split.
        rows_per_chunk: Rows of an inner chunk; the last chunk may hold fewer.
        seed: The user's seed.
        epoch: Which pass over the data.
        num_lanes: K, at most N.
    """

    def __init__(
        self, num_rows: int, rows_per_chunk: int, seed: int, epoch: int, num_lanes: int
    ) -> None:
        num_chunks = -(-num_rows // rows_per_chunk)
        self.num_rows, self.rows_per_chunk, self.num_lanes = num_rows, rows_per_chunk, num_lanes
        self._key = derive_seed(seed, "row order", epoch)
        bits = _chunk_bits(derive_seed(seed, "chunk order", epoch), num_chunks)
        # The one array that grows with the corpus: 4 bytes a chunk, an eighth of a byte a row.
        self._chunks = np.argsort(bits, kind="stable").astype(np.int32)
        self._short_place = int(np.flatnonzero(self._chunks == num_chunks - 1)[0])
        self._num_missing = num_chunks * rows_per_chunk - num_rows
        lanes, longer = np.arange(num_lanes), num_rows % num_lanes
        self._lengths = num_rows // num_lanes + (lanes < longer)
        self._starts = lanes * (num_rows // num_lanes) + np.minimum(lanes, longer)
        self._turns = self._turns_of_lanes()

    def _turns_of_lanes(self) -> Indices:
        """How far into a lane it begins; what it skips comes at its end."""
        lanes, phases = np.arange(self.num_lanes), self._starts % self.rows_per_chunk
        if 2 * len(np.unique(phases)) >= min(self.rows_per_chunk, self.num_lanes):
            return np.zeros_like(phases)  # spread already, and a turn reads a chunk twice
        wanted = lanes * self.rows_per_chunk // self.num_lanes
        return (wanted - phases) % self.rows_per_chunk % self._lengths

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        lanes, indices = positions % self.num_lanes, positions // self.num_lanes
        starts, lengths, turns = (a[lanes] for a in (self._starts, self._lengths, self._turns))
        inside = (indices + turns) % lengths
        chunks, offsets, ends = self._place(starts + inside)
        first_rows = self._chunks[chunks].astype(np.int64) * self.rows_per_chunk
        rows = first_rows + self._shuffled(chunks, offsets)
        # The lane is done with the chunk at its end, or where the lane came round to its turn.
        stops = np.minimum(ends - starts, lengths)
        last = np.where(inside >= turns, stops - turns, np.minimum(stops, turns) + lengths - turns)
        return rows, (last - 1) * self.num_lanes + lanes

    def _place(self, sequence: Indices) -> tuple[Indices, Indices, Indices]:
        """Of places in the sequence of all chunks' rows: chunk, offset in it, where it ends.

        All chunks are whole but the last one of the split, wherever it stands in the sequence.
        """
        behind = sequence >= self._short_place * self.rows_per_chunk
        whole = sequence + np.where(behind, self._num_missing, 0)
        chunks = whole // self.rows_per_chunk
        later = chunks > self._short_place
        begins = chunks * self.rows_per_chunk - np.where(later, self._num_missing, 0)
        return chunks, sequence - begins, begins + self._size_of(chunks)

    def _size_of(self, chunks: Indices) -> Indices:
        missing = np.where(chunks == self._short_place, self._num_missing, 0)
        return self.rows_per_chunk - missing

    def _shuffled(self, chunks: Indices, offsets: Indices) -> Indices:
        """The rows within their chunks at some offsets of the chunks' own permutations."""
        unique, inverse = np.unique(chunks, return_inverse=True)
        places = np.arange(self.rows_per_chunk)
        bits = _random_bits(self._key, unique[:, None] * self.rows_per_chunk + places)
        missing = places >= self._size_of(unique)[:, None]
        order = np.argsort(np.where(missing, np.iinfo(np.uint64).max, bits), kind="stable")
        return order[inverse, offsets]

    def positions_of_rank(self, start: int, stop: int, rank: int, world_size: int) -> Indices:
        if self.num_lanes % world_size == 0:
            first = start + (rank - start) % world_size
            return np.arange(first, stop, world_size, dtype=np.int64)
        return _cut(np.arange(start, stop) % self.num_lanes, start, rank, world_size)


def _cut(owners: Indices, start: int, rank: int, world_size: int) -> Int64[np.ndarray, "m"]:
    """A rank's equal share of a batch's positions, sorted by what they are read from."""
    size = len(owners)
    by_owner = np.argsort(owners, kind="stable")
    return start + np.sort(by_owner[rank * size // world_size : (rank + 1) * size // world_size])


def _chunk_bits(key: int, num_chunks: int) -> UInt64[np.ndarray, "chunks"]:
    """A random number for each chunk, in parts: drawing takes many times the numbers' memory."""
    bits = np.empty(num_chunks, dtype=np.uint64)
    for start in range(0, num_chunks, BITS_AT_ONCE):
        stop = min(start + BITS_AT_ONCE, num_chunks)
        bits[start:stop] = _random_bits(key, np.arange(start, stop))
    return bits


def _random_bits(key: int, places: Int64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """64 random bits for each place, a pure function of (key, place)."""
    place = torch.from_numpy(np.ascontiguousarray(places, dtype=np.int64))
    zero = torch.zeros_like(place)
    high, low, _, _ = philox4x32((place & 0xFFFFFFFF, place >> 32, zero, zero), key)
    return high.numpy().astype(np.uint64) << np.uint64(32) | low.numpy().astype(np.uint64)
