"""Rows gathered from chunks: a chunk is read once, ahead of its first row, and kept to its last.

Chunks are read and batches put together on a pool of threads, first in first out, so that a batch
waits only for reads that were started before it. Batches come out in the order asked for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from shards.stream.order import Order

Indices = Int64[np.ndarray, "n"]
ChunkFuture = Future[dict[str, np.ndarray]]
LOCATE_POSITIONS = 4096
"""Positions whose rows are worked out together; a matter of speed only."""


@runtime_checkable
class ChunkReader(Protocol):
    """What a stream needs of a split of a store."""

    @property
    def fingerprint(self) -> str:
        """Names the rows and their content; another store or split has another one."""
        ...

    @property
    def num_rows(self) -> int: ...

    @property
    def rows_per_chunk(self) -> int: ...

    @property
    def chunk_bytes(self) -> int:
        """Decoded bytes of a whole chunk, with every array that the store has.

        Also where only some are read: what is read must not change the order of the rows.
        """
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


@dataclass(frozen=True)
class Gathered:
    """A slice with its rows' arrays, [b, L, ...]."""

    slice: Slice
    arrays: dict[str, Tensor]


def locate_slices(
    bounds: Iterable[tuple[int, int]], order: Order, rank: int, world_size: int
) -> Iterator[Slice]:
    """The rows of this rank for each global batch given by its (start, stop)."""
    bounds = iter(bounds)
    while first := next(bounds, None):
        size = max(1, first[1] - first[0])
        group = [first, *islice(bounds, LOCATE_POSITIONS // size)]
        parts = [order.positions_of_rank(*bound, rank, world_size) for bound in group]
        rows, last_needs = order.locate(np.concatenate(parts))
        cuts = np.cumsum([len(part) for part in parts])[:-1]
        pieces = zip(parts, np.split(rows, cuts), np.split(last_needs, cuts), strict=True)
        for (start, stop), piece in zip(group, pieces, strict=True):
            yield Slice(start, stop, *piece)


def gather(reader: ChunkReader, slices: Iterator[Slice], num_workers: int) -> Iterator[Gathered]:
    """Read the slices' rows, ``num_workers`` threads ahead of the consumer (0: on demand)."""
    window = _ChunkWindow(reader)
    pending: deque[Future[Gathered]] = deque()
    rows_ahead = 0
    with _executor(num_workers) as executor:
        for part in slices:
            pending.append(window.submit(executor, part))
            rows_ahead += len(part.rows)
            # Enough rows ahead to keep every thread at a chunk, and one batch besides.
            while len(pending) > 1 and rows_ahead > 2 * num_workers * reader.rows_per_chunk:
                result = pending.popleft().result()
                rows_ahead -= len(result.slice.rows)
                yield result
            if num_workers == 0:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


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
    places = list(
        zip(
            (part.rows // rows_per_chunk).tolist(),
            (part.rows % rows_per_chunk).tolist(),
            strict=True,
        )
    )
    arrays = {}
    for name, like in next(iter(chunks.values()), {}).items():
        target = np.empty((len(places), *like.shape[1:]), dtype=like.dtype)
        for index, (chunk, row) in enumerate(places):
            target[index] = chunks[chunk][name][row]
        arrays[name] = torch.from_numpy(target)
    return Gathered(part, arrays)


class _InlineExecutor(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def _executor(num_workers: int) -> Iterator[Executor]:
    """The pool; reads not yet started are dropped when the consumer leaves early."""
    if num_workers == 0:
        yield _InlineExecutor()
        return
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="shard-reader")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
