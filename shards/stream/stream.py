"""Rows of a store in training order: shuffled, resumable, the same for every world size.

Global batch b of an epoch is positions b * G .. (b + 1) * G - 1 of the epoch's order, the same rows
for every world size and number of workers. A split that the window holds is permuted whole (then a
rank may have to read all of it); see :class:`LaneOrder` for larger ones. When shuffling, an epoch
ends with its last full global batch: the ragged rest, other rows in each epoch, is left out.
Without shuffling the last batch may be smaller, so that every row is met once.

A chunk is read once, ahead of its first row, and kept to its last. Chunks are read and batches put together on a pool
of threads (decompression releases the interpreter lock), first in first out, so that a batch waits only for reads that
were started before it. State is counted when a batch is handed out, never when it is prefetched.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, UInt64
from torch import Tensor, from_numpy

from shards.errors import GdistillError, UsageError
from shards.noise.philox import philox4x32
from shards.settings import derive_seed

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
PLACE_FIELDS = ("epoch", "rows_consumed", "num_lanes", "step")
"""What a state counts, beside its fingerprint."""
Indices = Int64[np.ndarray, "n"]
ChunkFuture = Future[dict[str, np.ndarray]]


def lanes_for(num_chunks: int, chunk_bytes: int, batch_size: int, window_bytes: int = WINDOW_BYTES) -> int:
    """K for a split: how many lanes a global batch wants, as far as memory goes; 0 for one permuted whole.

    ``chunk_bytes`` are the decoded bytes of a chunk, all arrays together; one chunk may always be open.
    """
    fitting = max(1, window_bytes // max(1, chunk_bytes))
    if num_chunks <= min(fitting, WHOLE_CHUNKS):
        return 0
    most = min(fitting, num_chunks)
    if batch_size <= most:
        return batch_size * max(1, min(TARGET_LANES, most) // batch_size)
    divisor = next(k for k in range(most, 0, -1) if batch_size % k == 0)
    return divisor if 2 * divisor >= most else most


class SequentialOrder:
    """Rows as they are stored; each rank takes a contiguous part of a batch."""

    def __init__(self, rows_per_chunk: int) -> None:
        self.rows_per_chunk = rows_per_chunk

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """The row at each of n positions of the epoch, and the last position at which its chunk may be needed."""
        return positions, (positions // self.rows_per_chunk + 1) * self.rows_per_chunk - 1

    def positions_of_rank(self, start: int, stop: int, rank: int, world_size: int) -> Indices:
        """The positions in start..stop-1 (one global batch) that a rank reads, ascending."""
        size = stop - start
        first, end = rank * size // world_size, (rank + 1) * size // world_size
        return np.arange(start + first, start + end, dtype=np.int64)


class WholeOrder:
    """A permutation of all rows, of a split that the window holds; arguments as of LaneOrder."""

    def __init__(self, num_rows: int, rows_per_chunk: int, seed: int, epoch: int) -> None:
        self.rows_per_chunk = rows_per_chunk
        key = derive_seed(seed, "row order", epoch)
        self._rows = np.argsort(random_bits(key, np.arange(num_rows)), kind="stable")

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        return self._rows[positions], np.full_like(positions, len(self._rows) - 1)

    def positions_of_rank(self, start: int, stop: int, rank: int, world_size: int) -> Indices:
        return cut_by_owner(self._rows[start:stop] // self.rows_per_chunk, start, rank, world_size)


class LaneOrder:
    """The order of an epoch: a pure function of (seed, epoch), cheap to read and well mixed.

    1. The inner chunks are permuted, and the rows of each; laid out one behind the other they are
       one sequence.
    2. The sequence is cut into K lanes of equal length. Position p of the epoch takes the next row
       of lane p mod K. One chunk per lane is open at a time: K decoded chunks, over all ranks.
    3. Lanes that would all come to the end of a chunk at once are turned, each by another part of
       a chunk, so that reading is smooth.

    K is a multiple of the global batch size where memory allows: the rows of a batch come from as many chunks, and each
    rank keeps to lanes of its own. An epoch then reads at most 1 + K / (number of chunks) times what there is. Where K
    is less than the batch, lanes on the border between ranks are read by both.
    """

    def __init__(self, num_rows: int, rows_per_chunk: int, seed: int, epoch: int, num_lanes: int) -> None:
        num_chunks = -(-num_rows // rows_per_chunk)
        self.rows_per_chunk, self.num_lanes = rows_per_chunk, num_lanes
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
        # How far into a lane it begins; what it skips comes at its end.
        phases = self._starts % rows_per_chunk
        self._turns = np.zeros_like(phases)  # a turn reads a chunk twice
        if 2 * len(np.unique(phases)) < min(rows_per_chunk, num_lanes):  # not spread already
            wanted = lanes * rows_per_chunk // num_lanes
            self._turns = (wanted - phases) % rows_per_chunk % self._lengths

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
            return np.arange(start + rank, stop, world_size, dtype=np.int64)
        return cut_by_owner(np.arange(start, stop) % self.num_lanes, start, rank, world_size)


def cut_by_owner(owners: Indices, start: int, rank: int, world_size: int) -> Int64[np.ndarray, "m"]:
    """A rank's equal share of a batch's positions, sorted by what they are read from."""
    size = len(owners)
    by_owner = np.argsort(owners, kind="stable")
    return start + np.sort(by_owner[rank * size // world_size : (rank + 1) * size // world_size])


def random_bits(key: int, places: Int64[np.ndarray, "*shape"]) -> UInt64[np.ndarray, "*shape"]:
    """64 random bits for each place, a pure function of (key, place)."""
    place = torch.from_numpy(np.ascontiguousarray(places, dtype=np.int64))
    zero = torch.zeros_like(place)
    high, low, _, _ = philox4x32((place & 0xFFFFFFFF, place >> 32, zero, zero), key)
    return high.numpy().astype(np.uint64) << np.uint64(32) | low.numpy().astype(np.uint64)


Order = SequentialOrder | WholeOrder | LaneOrder
"""Which row stands at which position of one epoch."""


@runtime_checkable
class ChunkReader(Protocol):
    """What a stream needs of a split of a store."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def rows_per_chunk(self) -> int: ...

    @property
    def chunk_bytes(self) -> int:
        """Decoded bytes of a whole chunk with every array there is: what is read must not change the order of rows."""
        ...

    def read_chunk(self, index: int) -> dict[str, np.ndarray]:
        """All arrays of rows index * rows_per_chunk onwards; called from several threads."""
        ...


@dataclass(frozen=True)
class Slice:
    """This rank's rows of the global batch at positions start..stop-1 of an epoch."""

    start: int
    stop: int
    positions: Indices
    rows: Indices
    last_needs: Indices


Gathered = tuple[Slice, dict[str, Tensor]]
"""A slice with its rows' arrays, [b, L, ...]."""


def gather(reader: ChunkReader, slices: Iterator[Slice], num_workers: int) -> Iterator[Gathered]:
    """Read the slices' rows ahead of the consumer; with 0 workers one batch, on one thread."""
    window = _ChunkWindow(reader)
    pending: deque[Future[Gathered]] = deque()
    rows_ahead = 0
    executor = ThreadPoolExecutor(max(1, num_workers), thread_name_prefix="shard-reader")
    try:
        for part in slices:
            pending.append(window.submit(executor, part))
            rows_ahead += len(part.rows)
            # Enough rows ahead to keep every thread at a chunk, and one batch besides.
            while len(pending) > 1 and rows_ahead > 2 * num_workers * reader.rows_per_chunk:
                result = pending.popleft().result()
                rows_ahead -= len(result[0].rows)
                yield result
        while pending:
            yield pending.popleft().result()
    finally:  # reads not yet started are dropped when the consumer leaves early
        executor.shutdown(wait=True, cancel_futures=True)


class _ChunkWindow:
    """Chunks being read or still needed; used by the consumer's thread only."""

    def __init__(self, reader: ChunkReader) -> None:
        self._reader = reader
        self._futures: dict[int, ChunkFuture] = {}
        self._last_needs: dict[int, int] = {}
        self._expiries: list[tuple[int, int]] = []

    def submit(self, executor: Executor, part: Slice) -> Future[Gathered]:
        """Start reading what a slice needs and does not have, then putting it together."""
        rows_per_chunk = self._reader.rows_per_chunk
        self._forget_before(part.start)
        chunks = (part.rows // rows_per_chunk).tolist()
        for chunk, last in zip(chunks, part.last_needs.tolist(), strict=True):
            self._last_needs[chunk] = max(last, self._last_needs.get(chunk, -1))
        # An empty slice reads a chunk too, to know the arrays' names and shapes.
        needed = {chunk: self._future(executor, chunk) for chunk in dict.fromkeys(chunks or [0])}
        return executor.submit(_put_together, part, needed, rows_per_chunk)

    def _future(self, executor: Executor, chunk: int) -> ChunkFuture:
        if chunk not in self._futures:
            self._futures[chunk] = executor.submit(self._reader.read_chunk, chunk)
            heapq.heappush(self._expiries, (self._last_needs.setdefault(chunk, -1), chunk))
        return self._futures[chunk]

    def _forget_before(self, position: int) -> None:
        while self._expiries and self._expiries[0][0] < position:
            _, chunk = heapq.heappop(self._expiries)
            if self._last_needs[chunk] >= position:  # needed for longer than was known
                heapq.heappush(self._expiries, (self._last_needs[chunk], chunk))
            else:
                del self._futures[chunk], self._last_needs[chunk]


def _put_together(part: Slice, futures: Mapping[int, ChunkFuture], rows_per_chunk: int) -> Gathered:
    chunks = {index: future.result() for index, future in futures.items()}
    places = np.stack(np.divmod(part.rows, rows_per_chunk), axis=1).tolist()
    arrays = {}
    for name, like in next(iter(chunks.values()), {}).items():
        target = np.empty((len(places), *like.shape[1:]), dtype=like.dtype)
        for index, (chunk, row) in enumerate(places):
            target[index] = chunks[chunk][name][row]
        arrays[name] = torch.from_numpy(target)
    return part, arrays


@dataclass(frozen=True)
class RowBatch:
    """One rank's rows of one global batch.

    Attributes:
        arrays: The store's arrays by name, [b, L, ...]; b may be 0 in a last, partial batch.
        row_ids: Row index in the split, [b] int64.
        slots: Index in the global batch, [b] int64.
        num_global_rows: Rows of the global batch over all ranks.
        step: Global batches handed out before this one, earlier epochs included.
    """

    arrays: dict[str, Tensor]
    row_ids: Int64[Tensor, "b"]
    slots: Int64[Tensor, "b"]
    num_global_rows: int
    epoch: int
    step: int


class ShardStream:
    """Iterates over one rank's part of a split, epoch by epoch.

    Each ``for`` loop runs to the end of the current epoch. ``state_dict`` counts exactly the batches handed out so far,
    and a stream given that state continues with the batch that would have come next, bit for bit, with any world size
    and number of workers. With another global batch size it goes through the rest of the epoch in the same order of
    rows; how later epochs are shuffled depends on that size.

    Args:
        reader: A split of a store.
        seed: Decides the order together with the epoch.
        global_batch_size: Rows of a batch over all ranks; a multiple of ``world_size``.
        rank: This process among the ``world_size`` processes.
        world_size: Processes that share each batch.
        num_workers: Threads that read ahead; 0 reads a batch ahead.
        shuffle: False keeps the stored order (for validation).
        window_bytes: Decoded chunks that shuffling may keep open, over all ranks.

    Raises:
        UsageError: If sizes do not fit each other or the split.
    """

    def __init__(
        self,
        reader: ChunkReader,
        *,
        seed: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        shuffle: bool = True,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._reader, self._seed = reader, seed
        self._batch_size, self._rank, self._world_size = global_batch_size, rank, world_size
        self._num_workers, self._shuffle = num_workers, shuffle
        _check_sizes(reader.num_rows, global_batch_size, rank, world_size, num_workers, shuffle)
        num_chunks = -(-reader.num_rows // reader.rows_per_chunk)
        self._own_lanes = lanes_for(num_chunks, reader.chunk_bytes, global_batch_size, window_bytes)
        self._num_lanes = self._own_lanes
        self._epoch, self._rows_consumed, self._step = 0, 0, 0
        self._running: object = None

    def __len__(self) -> int:
        """Global batches of a whole epoch."""
        return -(-self._end_of_epoch(0) // self._batch_size)

    @property
    def fingerprint(self) -> str:
        """Names the store, the split and the seed of the order of its rows."""
        order = f"seed {self._seed}, lanes" if self._shuffle else "stored order"
        return f"{self._reader.fingerprint}, {order}"

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch handed out; a small JSON value."""
        return {
            "fingerprint": self.fingerprint,
            "epoch": self._epoch,
            "num_lanes": self._num_lanes,
            "rows_consumed": self._rows_consumed,
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, a GdistillError if it is of another order; iterators made before end with an error."""
        if state.get("fingerprint") != self.fingerprint:
            what, got = "the saved data order is of another store or order", state.get("fingerprint")
            remedy = "resume with the store, split and seed that the run began with"
            raise GdistillError(what, where="stream state", got=got, expected=self.fingerprint, remedy=remedy)
        num_rows = self._reader.num_rows
        values: list[Any] = [state.get(name) for name in PLACE_FIELDS]
        if not all(
            isinstance(value, int) and 0 <= value <= most
            for value, most in zip(values, (math.inf, num_rows, num_rows, math.inf), strict=True)
        ):
            got = ", ".join(f"{name} {value}" for name, value in zip(PLACE_FIELDS, values, strict=True))
            expected = f"epoch >= 0, rows_consumed and num_lanes in 0..{num_rows}, step >= 0"
            what, where = "the saved data order is damaged", "stream state"
            raise GdistillError(what, where=where, got=got, expected=expected)
        epoch, rows_consumed, self._num_lanes, self._step = values
        self._move_to(epoch, rows_consumed)
        self._running = None

    def __iter__(self) -> Iterator[RowBatch]:
        """The batches from here to the end of the epoch."""
        self._running = token = object()
        return self._run(token)

    def one_pass(self, epoch: int = 0) -> Iterator[RowBatch]:
        """All batches of an epoch; leaves the stream's own place alone."""
        return self._batches(epoch, 0, epoch * len(self), self._own_lanes)

    def _run(self, token: object) -> Iterator[RowBatch]:
        for batch in self._batches(self._epoch, self._rows_consumed, self._step, self._num_lanes):
            if self._running is not token:
                what = "the stream was repositioned, or iterated anew, during an iteration"
                remedy = "call iter() on the stream again"
                raise GdistillError(what, where="ShardStream", remedy=remedy)
            self._step = batch.step + 1
            self._move_to(batch.epoch, self._rows_consumed + batch.num_global_rows)
            yield batch

    def _move_to(self, epoch: int, rows_consumed: int) -> None:
        """Go to a place, which is the next epoch's start if no batch of this one is left."""
        if rows_consumed < self._end_of_epoch(rows_consumed):
            self._epoch, self._rows_consumed = epoch, rows_consumed
        else:
            self._epoch, self._rows_consumed = epoch + 1, 0
            self._num_lanes = self._own_lanes

    def skip_epoch(self) -> None:
        """Go to the start of the next epoch, as if the batches left of this one had been met."""
        left = self._end_of_epoch(self._rows_consumed) - self._rows_consumed
        self._step += -(-left // self._batch_size)
        self._move_to(self._epoch, self._reader.num_rows)

    def _end_of_epoch(self, start: int) -> int:
        """Where the last batch ends when batches begin at position ``start``."""
        num_rows = self._reader.num_rows
        return num_rows - (num_rows - start) % self._batch_size if self._shuffle else num_rows

    def _batches(self, epoch: int, start: int, step: int, lanes: int) -> Iterator[RowBatch]:
        """The batches of an epoch from position ``start`` on, the first of them number ``step``."""
        size, end = self._batch_size, self._end_of_epoch(start)
        sizes = self._reader.num_rows, self._reader.rows_per_chunk
        order: Order
        if not self._shuffle:
            order = SequentialOrder(self._reader.rows_per_chunk)
        elif lanes == 0:
            order = WholeOrder(*sizes, self._seed, epoch)
        else:
            order = LaneOrder(*sizes, self._seed, epoch, lanes)

        def own_part(first: int) -> Slice:
            positions = order.positions_of_rank(first, min(first + size, end), self._rank, self._world_size)
            return Slice(first, min(first + size, end), positions, *order.locate(positions))

        gathered = gather(self._reader, map(own_part, range(start, end, size)), self._num_workers)
        for index, (part, arrays) in enumerate(gathered):
            slots, num_rows = from_numpy(part.positions - part.start), part.stop - part.start
            yield RowBatch(arrays, from_numpy(part.rows), slots, num_rows, epoch, step + index)


def _check_sizes(num_rows: int, batch_size: int, rank: int, world_size: int, num_workers: int, drop_last: bool) -> None:
    def refuse(what: str, where: str, got: object, expected: str, remedy: str = "") -> None:
        raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)

    if world_size < 1 or not 0 <= rank < world_size:
        refuse("rank outside the world", "rank", f"rank {rank} of {world_size}", "0 <= rank < size")
    if num_workers < 0:
        refuse("size out of range", "num_workers", num_workers, "at least 0")
    if batch_size < 1 or batch_size % world_size:
        multiple = f"a positive multiple of the world size {world_size}"
        refuse("batch does not divide among ranks", "global_batch_size", batch_size, multiple)
    if drop_last and num_rows < batch_size:
        what, remedy = "the split has fewer rows than one global batch", "lower the batch size or extract more rows"
        refuse(what, "global_batch_size", f"{num_rows} rows", f"at least {batch_size}", remedy)
    if num_rows < 1:
        refuse("the split is empty", "split", "0 rows", "at least 1", "extract some rows for it")
