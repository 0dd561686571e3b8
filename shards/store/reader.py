"""Reading a split: inner chunks of rows, never a fill value, never an altered byte.

Before a shard is read, its ledger record must be there and sound. Its files must have the recorded
size and the recorded tail, which names every chunk by its checksum: a whole file of another shard,
or of an older run, is refused when it is first met. (Shards of versions before tails are hashed
whole then.) Every inner chunk has its crc32c, and a remote file is hashed when it is copied into
the cache. What a chunk says must be possible: tokens below V, finite numbers, ids below V.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from shards.atomic import FileRecord
from shards.errors import GdistillError, IntegrityError
from shards.store.layout import (
    DamagedShard,
    NativeShards,
    ShardRange,
    check_values,
    native_array,
    read_file_range,
    shard_file,
    shard_files,
    shard_range,
)
from shards.store.layout import num_shards as count_shards
from shards.store.ledger import ShardRecord, read_record, rewrite_remedy
from shards.store.location import Location
from shards.store.manifest import Manifest


class SplitReader:
    """The rows of one split; ``arrays`` narrows what is read (None reads every array).

    Attributes:
        split: Its name.
        num_rows: Rows in the split.
        rows_per_chunk: Rows of a chunk; the last chunk may be short.
        num_chunks: Chunks in the split.

    Raises:
        IntegrityError: If an array's metadata are missing, altered, or of another kind than this
            project writes.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        split: str,
        arrays: Collection[str] | None = None,
        check_ids: Callable[[Mapping[str, np.ndarray], int], str] = lambda *_: "",
    ) -> None:
        self.location, self.manifest, self.split = location, manifest, split
        self._check_ids = check_ids
        self.num_rows = manifest.splits[split]
        self.rows_per_chunk = manifest.rows_per_chunk
        self.num_chunks = -(-self.num_rows // self.rows_per_chunk)
        names = list(dict.fromkeys(manifest.all_arrays if arrays is None else arrays))
        self._known = _KnownFiles(count_shards(manifest, split), names)
        self._arrays = {name: self._open(name) for name in names}

    @property
    def fingerprint(self) -> str:
        """Names the store's content and the split; what a data order belongs to."""
        return f"store {self.manifest.sha256[:16]}, split {self.split}"

    @property
    def chunk_bytes(self) -> int:
        """Decoded bytes of a whole chunk of the store's arrays, whether they are read or not."""
        tokens = self.rows_per_chunk * self.manifest.row_length
        specs = self.manifest.all_arrays.values()
        return tokens * sum(
            math.prod(spec.trailing_shape) * np.dtype(spec.dtype).itemsize for spec in specs
        )

    def _open(self, name: str) -> NativeShards:
        metadata = f"{self.split}/{name}/zarr.json"
        where = f"{self.location.url}/{metadata}"
        try:
            data = self.location.read(metadata)
        except FileNotFoundError as error:
            raise IntegrityError("array metadata is missing", where=where) from error
        expected = self.manifest.files.get(metadata)
        if expected is None or not expected.matches(data):
            raise IntegrityError("array metadata was altered", where=where)
        array = native_array(self.manifest, name)
        if not array.fits(data, self.num_rows):
            raise IntegrityError(
                "array metadata of another kind",
                where=where,
                expected="what the manifest says, cut and coded as this project does it",
            )

        def read_range(shard: int, start: int, length: int) -> bytes:
            record = self._known.record(shard, name)
            file = shard_file(self.manifest, self.split, name, shard)
            descriptor = self.location.open_file(file, record)
            try:
                return read_file_range(descriptor, start, length, record.num_bytes)
            finally:
                os.close(descriptor)

        return NativeShards(
            array,
            read_range,
            lambda shard: self._known.record(shard, name).num_bytes,
            lambda shard: self._known.tail_sha256(shard, name),
        )

    def read_chunk(self, index: int) -> dict[str, np.ndarray]:
        """The rows of one inner chunk: array name -> [rows, L, *trailing].

        Raises:
            IntegrityError: If the chunk's shard is unfinished, missing, truncated, altered or
                another one.
        """
        if not 0 <= index < self.num_chunks:
            raise IndexError(f"chunk {index} of {self.num_chunks}")
        start = index * self.rows_per_chunk
        num_rows = min(self.rows_per_chunk, self.num_rows - start)
        shard = self.shard_of(start)
        self._know(shard)
        rows = {name: self._read(shard, name, index)[:num_rows] for name in self._arrays}
        place = ShardRange(self.split, shard.index, start, start + num_rows)
        try:
            check_values(self.manifest, place, rows)
            problem: object = self._check_ids(rows, self.manifest.vocab_size)
        except GdistillError as error:
            problem = error
        if problem:
            raise IntegrityError(
                "the store holds what no teacher said",
                where=f"{self.location.url}: {shard}",
                got=problem,
                remedy="write the store again, or get it from its source",
            )
        return rows

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
        return shard_range(self.manifest, self.split, row // self.manifest.rows_per_shard)

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
        files = shard_files(self.manifest, shard)
        self._known.add(record, files)
        if not record.tails:  # of a version before them: nothing else tells one file from another
            for name in self._arrays:
                self._require_whole(shard, name, record.files[files[name]])

    def _require_whole(self, shard: ShardRange, name: str, record: FileRecord) -> None:
        try:
            file = shard_file(self.manifest, self.split, name, shard.index)
            with os.fdopen(self.location.open_file(file, record), "rb") as whole:
                if not record.matches(whole.read()):
                    raise DamagedShard("the file is another one than the ledger names")
        except (DamagedShard, OSError, ValueError) as error:
            raise self._explained(shard, name, error) from error

    def _read(self, shard: ShardRange, name: str, index: int) -> np.ndarray:
        try:
            return self._read_or_fetch_again(shard, name, index)
        except GdistillError:
            raise
        except (DamagedShard, OSError, ValueError) as error:
            raise self._explained(shard, name, error) from error

    def _read_or_fetch_again(self, shard: ShardRange, name: str, index: int) -> np.ndarray:
        """A chunk; where a disk has spoilt the copy of a remote file, from a new copy."""
        try:
            return self._arrays[name].read_chunk(index)
        except DamagedShard:
            if not self.location.discard_altered_copy(self._known.record(shard.index, name)):
                raise
            return self._arrays[name].read_chunk(index)

    def _explained(self, shard: ShardRange, name: str, error: Exception) -> IntegrityError:
        """What is wrong with a shard's file, told by its size first."""
        file = shard_file(self.manifest, self.split, name, shard.index)
        expected = self._known.record(shard.index, name).num_bytes
        size = self.location.size(file)
        what, got = "a shard file was altered", str(error)
        if size is None:
            what, got = "a shard file is missing", "no file"
        elif size != expected:
            what, got = "a shard file is truncated", f"{size} bytes"
        return IntegrityError(
            what,
            where=f"{self.location.url}/{file}: {shard}",
            got=got,
            expected="" if size == expected else f"{expected} bytes",
            remedy=rewrite_remedy(self.location.url),
        )


class _KnownFiles:
    """Size, hash and tail of the files of shards met so far: 72 bytes a file, whatever the corpus.

    Threads may add the same shard at once, as they add the same values.
    """

    def __init__(self, num_shards: int, arrays: Sequence[str]) -> None:
        self._columns = {name: column for column, name in enumerate(arrays)}
        shape = (num_shards, len(self._columns))
        self._num_bytes = np.zeros(shape, np.int64)
        self._sha256 = np.zeros((*shape, 32), np.uint8)
        self._tails = np.zeros((*shape, 32), np.uint8)
        self._is_known = np.zeros(num_shards, np.bool_)

    def __contains__(self, shard: int) -> bool:
        return bool(self._is_known[shard])

    def add(self, record: ShardRecord, names: Mapping[str, str]) -> None:
        """Remember a shard's files; ``names`` gives them by array."""
        shard = record.shard.index
        for array, column in self._columns.items():
            file = record.files[names[array]]
            self._num_bytes[shard, column] = file.num_bytes
            self._sha256[shard, column] = _digest(file.sha256)
            if record.tails:
                self._tails[shard, column] = _digest(record.tails[names[array]])
        self._is_known[shard] = True  # last: other threads look here first

    def record(self, shard: int, array: str) -> FileRecord:
        """Size and hash of a known shard's file."""
        place = shard, self._columns[array]
        return FileRecord(int(self._num_bytes[place]), self._sha256[place].tobytes().hex())

    def tail_sha256(self, shard: int, array: str) -> str | None:
        """Hash of the tail of a known shard's file; None if the ledger has none."""
        tail = self._tails[shard, self._columns[array]]
        return tail.tobytes().hex() if tail.any() else None


def _digest(sha256: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(sha256), np.uint8)
