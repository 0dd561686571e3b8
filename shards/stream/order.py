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

from typing import NamedTuple

import numpy as np

from shards.provenance import derive_seed
from shards.stream.stream import Indices, Order, WholeOrder, cut_by_owner, lanes_for, random_bits

BITS_AT_ONCE = 1 << 20
"""Random numbers of chunks drawn at a time."""


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
        # Drawn in parts: drawing takes many times the numbers' memory.
        key, bits = derive_seed(seed, "chunk order", epoch), np.empty(num_chunks, dtype=np.uint64)
        for start in range(0, num_chunks, BITS_AT_ONCE):
            part = slice(start, min(start + BITS_AT_ONCE, num_chunks))
            bits[part] = random_bits(key, np.arange(part.start, part.stop))
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
        bits = random_bits(self._key, unique[:, None] * self.rows_per_chunk + places)
        missing = places >= self._size_of(unique)[:, None]
        order = np.argsort(np.where(missing, np.iinfo(np.uint64).max, bits), kind="stable")
        return order[inverse, offsets]

    def positions_of_rank(self, start: int, stop: int, rank: int, world_size: int) -> Indices:
        if self.num_lanes % world_size == 0:
            first = start + (rank - start) % world_size
            return np.arange(first, stop, world_size, dtype=np.int64)
        return cut_by_owner(np.arange(start, stop) % self.num_lanes, start, rank, world_size)


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
