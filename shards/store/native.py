"""A reader of the one kind of Zarr shard that this project writes, without zarr-python's overhead.

A shard file holds its inner chunks in any order, then the index:

    chunk | chunk | ... | offset, length (uint64 LE) x chunks | crc32c of the index (uint32 LE)

and an inner chunk is a zstd frame of the rows' bytes (C order, little endian), then the crc32c of
the frame. zarr-python stays the judge of the format: an array whose metadata differ in anything
from the chain named here is not read here (:meth:`NativeArray.open` gives None), and the tests
compare the two readers byte for byte. Absent chunks, which Zarr reads as fill values, are errors:
a store holds every chunk.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import google_crc32c
import numpy as np
import zstandard
from jaxtyping import UInt64

ABSENT = 2**64 - 1
"""Offset and length, in the index, of a chunk that was never written."""
CRC_BYTES = 4
INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
INDEX_MEMORY_BYTES, INDEX_OVERHEAD_BYTES = 8 << 20, 512
"""Of all indices kept of an array (5,000 of 64 chunks each), and of one beside its numbers."""
INDIFFERENT = ("fill_value", "attributes", "dimension_names")
"""Metadata that say nothing of a chunk's bytes."""

_of_thread = threading.local()


class DamagedShard(Exception):
    """Bytes that are not the shard they should be; the caller knows which shard it is."""


@dataclass(frozen=True)
class NativeArray:
    """How to find and decode the inner chunks of one array.

    Attributes:
        dtype: Little-endian numpy dtype.
        row_shape: Shape of one row.
        rows_per_chunk: Rows of an inner chunk; the last one of the array is stored padded.
        chunks_per_shard: Inner chunks of a shard, all in the index even if they lie past the end.
    """

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    rows_per_chunk: int
    chunks_per_shard: int

    @classmethod
    def open(cls, metadata: bytes) -> NativeArray | None:
        """The array of a ``zarr.json``; None if it is of any other kind than the one known here."""
        value = json.loads(metadata)
        try:
            array = cls._of_sizes(value)
            known = array._metadata(value) == value
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):
            return None
        return array if known else None

    @classmethod
    def _of_sizes(cls, value: dict[str, Any]) -> NativeArray:
        shard_shape = value["chunk_grid"]["configuration"]["chunk_shape"]
        chunk_shape = value["codecs"][0]["configuration"]["chunk_shape"]
        dtype = np.dtype(value["data_type"]).newbyteorder("<")
        if dtype.kind not in "biuf" or dtype.hasobject:
            raise TypeError(value["data_type"])
        row_shape = tuple(int(size) for size in value["shape"][1:])
        return cls(dtype, row_shape, int(chunk_shape[0]), int(shard_shape[0]) // chunk_shape[0])

    def _metadata(self, value: dict[str, Any]) -> dict[str, Any]:
        """What ``zarr.json`` says of this array; fields that do not concern bytes are as given."""
        zstd = value["codecs"][0]["configuration"]["codecs"][1]["configuration"]
        order = {"configuration": {"endian": "little"}} if self.dtype.itemsize > 1 else {}
        inner = [{"name": "bytes", **order}, {"name": "zstd", "configuration": zstd}]
        sharding = {
            "chunk_shape": [self.rows_per_chunk, *self.row_shape],
            "codecs": [*inner, {"name": "crc32c"}],
            "index_codecs": INDEX_CODECS,
            "index_location": "end",
        }
        shard_shape = [self.rows_per_chunk * self.chunks_per_shard, *self.row_shape]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [value["shape"][0], *self.row_shape],
            "data_type": self.dtype.newbyteorder("=").name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "storage_transformers": [],
            **{key: value[key] for key in INDIFFERENT if key in value},
        }

    @property
    def index_bytes(self) -> int:
        """Bytes of the index at the end of a shard, its checksum included."""
        return 16 * self.chunks_per_shard + CRC_BYTES

    def parse_index(self, data: bytes) -> UInt64[np.ndarray, "chunks 2"]:
        """Offset and length of every chunk, from the last :attr:`index_bytes` of a shard."""
        body = _checked(data, self.index_bytes, "the shard index")
        return np.frombuffer(body, dtype="<u8").reshape(-1, 2)

    def decode_chunk(self, data: bytes) -> np.ndarray:
        """The rows of one inner chunk, [rows_per_chunk, *row_shape], from its bytes."""
        frame = _checked(data, len(data), "an inner chunk")
        rows = np.empty((self.rows_per_chunk, *self.row_shape), dtype=self.dtype)
        try:
            with _decompressor().stream_reader(frame) as reader:
                num_bytes = reader.readinto(rows.reshape(-1).view(np.uint8))
                more = reader.read(1)
        except zstandard.ZstdError as error:
            raise DamagedShard(f"an inner chunk does not decompress: {error}") from error
        if num_bytes != rows.nbytes or more:
            raise DamagedShard(f"an inner chunk holds {num_bytes} bytes, expected {rows.nbytes}")
        return rows


class NativeShards:
    """The shards of one array behind a function that reads ranges; safe to use from threads.

    Args:
        array: How the array is stored.
        read_range: (shard index, start, length) -> bytes of that shard's file; fewer at its end.
        num_bytes: Shard index -> the size its file has.
    """

    def __init__(
        self,
        array: NativeArray,
        read_range: Callable[[int, int, int], bytes],
        num_bytes: Callable[[int], int],
    ) -> None:
        self.array, self._read_range, self._num_bytes = array, read_range, num_bytes
        kept = INDEX_MEMORY_BYTES // (array.index_bytes + INDEX_OVERHEAD_BYTES)
        # An epoch meets every shard in random order: what is kept must not grow with the corpus.
        self._index = lru_cache(max(1, kept))(self._read_index)

    def read_chunk(self, index: int) -> np.ndarray:
        """All stored rows of an inner chunk (counted over the whole array), padding included.

        Raises:
            DamagedShard: If bytes are missing or were altered.
            OSError: If the file cannot be read.
        """
        shard, chunk = divmod(index, self.array.chunks_per_shard)
        offset, length = self._find(shard, chunk)
        data = self._read_range(shard, offset, length)
        if len(data) != length:
            raise DamagedShard(f"{len(data)} bytes of an inner chunk, expected {length}")
        return self.array.decode_chunk(data)

    def _find(self, shard: int, chunk: int) -> tuple[int, int]:
        """Where a chunk lies: offset and length in bytes."""
        offset, length = self._index(shard)[chunk].tolist()
        if offset == length == ABSENT:
            raise DamagedShard(f"inner chunk {chunk} is absent")
        if offset + length > self._num_bytes(shard) - self.array.index_bytes:
            raise DamagedShard(f"inner chunk {chunk} lies outside the file")
        return offset, length

    def _read_index(self, shard: int) -> UInt64[np.ndarray, "chunks 2"]:
        end = self._num_bytes(shard) - self.array.index_bytes
        if end < 0:
            raise DamagedShard("the file is too short for an index")
        return self.array.parse_index(self._read_range(shard, end, self.array.index_bytes))


def read_file_range(path: str, start: int, length: int, expected_size: int) -> bytes:
    """Bytes start..start+length-1 of a file that has ``expected_size`` bytes.

    Raises:
        DamagedShard: If the file has another size.
        OSError: If it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size != expected_size:
            raise DamagedShard(f"{size} bytes, expected {expected_size}")
        return os.pread(descriptor, length, start)
    finally:
        os.close(descriptor)


def _checked(data: bytes, expected: int, what: str) -> bytes:
    """``data`` without its crc32c, which has been checked."""
    if len(data) != expected or len(data) < CRC_BYTES:
        raise DamagedShard(f"{len(data)} bytes of {what}, expected {expected}")
    body = data[:-CRC_BYTES]
    if google_crc32c.value(body) != int.from_bytes(data[-CRC_BYTES:], "little"):
        raise DamagedShard(f"the crc32c of {what} does not match")
    return body


def _decompressor() -> zstandard.ZstdDecompressor:
    """One per thread: a decompressor must not be shared."""
    if not hasattr(_of_thread, "decompressor"):
        _of_thread.decompressor = zstandard.ZstdDecompressor()
    return _of_thread.decompressor
