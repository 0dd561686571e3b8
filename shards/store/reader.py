"""Reading a split: inner chunks of rows, never a fill value, never an altered byte.

Before a shard is read, its ledger record must be there and sound and its files must exist with the
recorded size; the bytes themselves are covered by the crc32c of every inner chunk and of the
shard index, and a remote file's by its hash when it is copied into the cache. Shards stored as this
project stores them are decoded by :mod:`shards.store.native`; another codec chain goes through
zarr-python.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from shards.base import GdistillError, IntegrityError
from shards.storage import Location
from shards.store.known_files import KnownFiles
from shards.store.layout import ShardRange, shard_file, shard_files, shard_ranges
from shards.store.ledger import read_record, rewrite_remedy
from shards.store.manifest import Manifest
from shards.store.native import DamagedShard, NativeArray, NativeShards, read_file_range

MAX_PATHS = 4096
"""Local paths that are remembered of an array; working one out again is cheap."""


class _StrictStore(WrapperStore):  # type: ignore[type-arg]
    """A Zarr store in which an absent chunk is an error; Zarr itself would read fill values."""

    def __init__(self, store: Store, url: str = "") -> None:
        super().__init__(store)
        self._url = url

    def _with_store(self, store: Store) -> _StrictStore:
        return type(self)(store, self._url)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        value = await self._store.get(key, prototype, byte_range)
        if "/c/" in key and (value is None or len(value) == 0):
            raise IntegrityError(
                "a shard file is missing or empty",
                where=f"{self._url}/{key}",
                remedy=rewrite_remedy(self._url),
            )
        return value


class SplitReader:
    """The rows of one split; ``arrays`` narrows what is read (None reads every array).

    Attributes:
        split: Its name.
        num_rows: Rows in the split.
        rows_per_chunk: Rows of a chunk; the last chunk may be short.
        num_chunks: Chunks in the split.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        split: str,
        arrays: Collection[str] | None = None,
    ) -> None:
        self.location, self.manifest, self.split = location, manifest, split
        self.num_rows = manifest.splits[split]
        self.rows_per_chunk = manifest.rows_per_chunk
        self.num_chunks = -(-self.num_rows // self.rows_per_chunk)
        self._shards = shard_ranges(manifest, split)
        names = list(dict.fromkeys(arrays or manifest.all_arrays))
        self._known = KnownFiles(len(self._shards), names)
        store = _StrictStore(location.zarr_store(), location.url)
        self._arrays = {name: self._open(store, name) for name in names}

    @property
    def fingerprint(self) -> str:
        """Names the store's content and the split; what a data order belongs to."""
        return f"store {self.manifest.sha256[:16]}, split {self.split}"

    def _open(self, store: _StrictStore, name: str) -> NativeShards | zarr.Array:
        path = f"{self.split}/{name}"
        metadata = f"{path}/zarr.json"
        try:
            data = self.location.read(metadata)
        except FileNotFoundError as error:
            raise IntegrityError(
                "array metadata is missing", where=f"{self.location.url}/{metadata}"
            ) from error
        if not self.manifest.files[metadata].matches(data):
            raise IntegrityError(
                "array metadata was altered", where=f"{self.location.url}/{metadata}"
            )
        native = NativeArray.open(data)
        if native is None:
            return zarr.open_array(store, path=path, mode="r")
        return self._native(native, name)

    def _native(self, array: NativeArray, name: str) -> NativeShards:
        paths: dict[int, str] = {}

        def read_range(shard: int, start: int, length: int) -> bytes:
            num_bytes = self._known.num_bytes(shard, name)
            path = paths.get(shard)
            if path is not None:
                with suppress(FileNotFoundError):  # a cached copy, since evicted: fetched below
                    return read_file_range(path, start, length, num_bytes)
            file = shard_file(self.manifest, self.split, name, shard)
            path = str(self.location.local_file(file, self._known.record(shard, name)))
            if len(paths) >= MAX_PATHS:
                paths.clear()
            paths[shard] = path
            return read_file_range(path, start, length, num_bytes)

        return NativeShards(array, read_range, lambda shard: self._known.num_bytes(shard, name))

    def read_chunk(self, index: int) -> dict[str, np.ndarray]:
        """The rows of one inner chunk: array name -> [rows, L, *trailing].

        Raises:
            IntegrityError: If the chunk's shard is unfinished, missing, truncated or altered.
        """
        if not 0 <= index < self.num_chunks:
            raise IndexError(f"chunk {index} of {self.num_chunks}")
        start = index * self.rows_per_chunk
        stop = min(start + self.rows_per_chunk, self.num_rows)
        shard = self.shard_of(start)
        self._know(shard)
        return {name: self._read(shard, name, start, stop) for name in self._arrays}

    def read_rows(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Rows start..stop-1, whatever chunks they lie in."""
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.num_rows}")
        if start == stop:
            return {name: self._no_rows(name) for name in self._arrays}
        first = start // self.rows_per_chunk
        chunks = range(first, -(-stop // self.rows_per_chunk))
        parts = [self.read_chunk(index) for index in chunks]
        offset = first * self.rows_per_chunk
        window = slice(start - offset, stop - offset)
        return {name: np.concatenate([part[name] for part in parts])[window] for name in parts[0]}

    def _no_rows(self, name: str) -> np.ndarray:
        spec = self.manifest.all_arrays[name]
        return np.empty((0, self.manifest.row_length, *spec.trailing_shape), dtype=spec.dtype)

    def shard_of(self, row: int) -> ShardRange:
        """The shard that holds a row."""
        return self._shards[row // self.manifest.rows_per_shard]

    def _know(self, shard: ShardRange) -> None:
        """Read a shard's ledger record, once; refuses a shard that is unfinished."""
        if shard.index in self._known:
            return
        record = read_record(self.location, self.manifest, shard)
        if record is None:
            raise IntegrityError(
                "the shard is not finished",
                where=f"{self.location.url}: {shard}",
                remedy="run the command that wrote the store again: it finishes it",
            )
        names = shard_files(self.manifest, shard)
        self._known.add(shard.index, {name: record.files[file] for name, file in names.items()})

    def _check_size(self, shard: ShardRange, name: str) -> None:
        """Refuse a file that is missing or of another size than the ledger says."""
        file = shard_file(self.manifest, self.split, name, shard.index)
        expected = self._known.num_bytes(shard.index, name)
        size = self.location.size(file)
        if size != expected:
            raise IntegrityError(
                "a shard file is missing" if size is None else "a shard file is truncated",
                where=f"{self.location.url}/{file}: {shard}",
                got="no file" if size is None else f"{size} bytes",
                expected=f"{expected} bytes",
                remedy=rewrite_remedy(self.location.url),
            )

    def _read_native(self, array: NativeShards, name: str, start: int) -> np.ndarray:
        """A chunk; where a disk has spoilt the copy of a remote file, from a new copy."""
        index = start // self.rows_per_chunk
        try:
            return array.read_chunk(index)
        except DamagedShard:
            record = self._known.record(self.shard_of(start).index, name)
            if not self.location.discard_altered_copy(record):
                raise
            return array.read_chunk(index)

    def _read(self, shard: ShardRange, name: str, start: int, stop: int) -> np.ndarray:
        array = self._arrays[name]
        try:
            if isinstance(array, NativeShards):
                return self._read_native(array, name, start)[: stop - start]
            self._check_size(shard, name)
            return np.asarray(array[start:stop])
        except GdistillError:
            raise
        except Exception as error:  # each Zarr codec raises a type of its own
            self._check_size(shard, name)
            file = shard_file(self.manifest, self.split, name, shard.index)
            raise IntegrityError(
                "a shard file was altered",
                where=f"{self.location.url}/{file}: {shard}",
                got=error,
                remedy=rewrite_remedy(self.location.url),
            ) from error
