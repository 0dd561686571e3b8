"""The Zarr v3 side of a store: names, metadata and shard bytes, all made by zarr-python in memory.

    <store>/zarr.json                       root group
            manifest.json                   identity, hashes of all files written once
            resources/<name>/...            arrays kept once per store
            tokenizer/*, corpus/*           side files
            <split>/<array>/zarr.json       [N, L, *trailing], sharding codec
            <split>/<array>/c/<i>/0/...     shard i: rows [i * rows_per_shard, ...)
            ledger/<split>/<i>.json         one record per finished shard

Inner chunks are bytes(little) -> zstd -> crc32c; the bytes of a shard: :mod:`shards.store.layout`. Encoding in memory
first lets the writer hash and store exactly the bytes it meant, on any kind of storage, in one atomic put per file.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import google_crc32c
import numpy as np
import zarr
import zstandard
from jaxtyping import UInt64
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore

from shards.codec.protocol import ArraySpec
from shards.errors import GdistillError, UsageError
from shards.store.manifest import MANIFEST_FILE, Manifest, ShardRange

RESOURCES = "resources"
WRITTEN_AS: dict[str, Any] = {
    "compressors": [ZstdCodec(level=1), Crc32cCodec()],
    "fill_value": 0,
    "config": {"write_empty_chunks": True},
}


def native_array(manifest: Manifest, array: str) -> NativeArray:
    """How an array of the store is kept, as its manifest has it."""
    spec = manifest.all_arrays[array]
    return NativeArray(
        np.dtype(spec.dtype).newbyteorder("<"),
        (manifest.row_length, *spec.trailing_shape),
        manifest.rows_per_chunk,
        manifest.rows_per_shard // manifest.rows_per_chunk,
    )


def static_files(manifest: Manifest, resources: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Every file that is written once: group and array metadata, and the resources."""
    store = MemoryStore()
    note = {"format": "gdistill", "format_version": manifest.format_version}
    root = zarr.create_group(store, attributes={"gdistill": {**note, "manifest": MANIFEST_FILE}})
    for split in manifest.splits:
        group = root.create_group(split)
        for name, spec in manifest.all_arrays.items():
            _create_sharded(group, manifest, split, name, spec)
    group = root.create_group(RESOURCES)
    for name, value in resources.items():
        rows = max(1, min(len(value), MAX_RESOURCE_CHUNK_BYTES // value[0].nbytes))
        chunks, data = (rows, *value.shape[1:]), np.ascontiguousarray(value)
        group.create_array(name, data=data, chunks=chunks, **WRITTEN_AS)
    return _contents(store)


def encode_shard(manifest: Manifest, shard: ShardRange, arrays: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """file name -> bytes for every array of one whole shard."""
    store = MemoryStore()
    group = zarr.create_group(store).create_group(shard.split)
    for name, spec in manifest.all_arrays.items():
        target = _create_sharded(group, manifest, shard.split, name, spec)
        target[shard.start : shard.stop] = arrays[name]
    content = _contents(store)
    return {
        file: native_array(manifest, name).with_tail(content[file])
        for name, file in manifest.shard_files(shard).items()
    }


def _create_sharded(group: zarr.Group, manifest: Manifest, split: str, name: str, spec: ArraySpec) -> zarr.Array[Any]:
    inner = (manifest.row_length, *spec.trailing_shape)
    return group.create_array(
        name,
        shape=(manifest.splits[split], *inner),
        chunks=(manifest.rows_per_chunk, *inner),
        shards=(manifest.rows_per_shard, *inner),
        dtype=spec.dtype,
        dimension_names=("row", "position", *[None] * len(spec.trailing_shape)),
        **WRITTEN_AS,
    )


def _contents(store: MemoryStore) -> dict[str, bytes]:
    return {name: store._store_dict[name].to_bytes() for name in sorted(store._store_dict)}


# The reader of the one kind of Zarr shard that this project writes.
#
# A shard file holds its inner chunks in any order, then their checksums once more, then the index:
#
#     chunk | chunk | ... | crc32c (uint32 LE) x chunks | offset, length (uint64 LE) x chunks
#           | crc32c of the index (uint32 LE)
#
# and an inner chunk is a zstd frame of the rows' bytes (C order, little endian), then the crc32c of
# the frame. All behind the chunks is the shard's **tail**, whose hash the ledger has: one look at it
# tells the file that the ledger names from any other of equal size, and each chunk from any other.
# Zarr readers look for chunks where the index says and pass over the rest. Stores written before
# tails have the index only. Absent chunks, which Zarr reads as fill values, are errors.


ABSENT = 2**64 - 1
"""Offset and length, in the index, of a chunk that was never written."""
CRC_BYTES = 4
INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
INDEX_MEMORY_BYTES, INDEX_OVERHEAD_BYTES = 8 << 20, 512
"""Of all indices kept of an array (5,000 of 64 chunks each), and of one beside its numbers."""
MAX_RESOURCE_CHUNK_BYTES = 64 << 20
ODD_METADATA = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)
INDIFFERENT = ("fill_value", "attributes", "dimension_names")
"""Metadata that say nothing of a chunk's bytes."""

_of_thread = threading.local()


class DamagedShard(Exception):
    """Bytes that are not the shard they should be; the caller knows which shard it is."""


@dataclass(frozen=True)
class NativeArray:
    """How to find and decode the inner chunks of one array, of a little-endian dtype.

    The array's last chunk is stored padded; chunks of a shard are in the index even if they lie past the end.
    """

    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    rows_per_chunk: int
    chunks_per_shard: int

    def fits(self, metadata: bytes, num_rows: int) -> bool:
        """Whether a ``zarr.json`` is that of this array; what says nothing of bytes is free."""
        try:
            value = json.loads(metadata)
            zstd = value["codecs"][0]["configuration"]["codecs"][1]["configuration"]
            sharding = {
                "chunk_shape": [self.rows_per_chunk, *self.row_shape],
                "codecs": _chain(self.dtype, zstd),
                "index_codecs": INDEX_CODECS,
                "index_location": "end",
            }
            shape = [num_rows, *self.row_shape]
            shard_shape = [self.rows_per_chunk * self.chunks_per_shard, *self.row_shape]
            codecs = [{"name": "sharding_indexed", "configuration": sharding}]
            return _array_metadata(value, self.dtype, shape, shard_shape, codecs) == value
        except ODD_METADATA:
            return False

    @property
    def index_bytes(self) -> int:
        """Bytes of the index at the end of a shard, its checksum included."""
        return 16 * self.chunks_per_shard + CRC_BYTES

    @property
    def tail_bytes(self) -> int:
        """Bytes of all behind the chunks: their checksums, the index."""
        return CRC_BYTES * self.chunks_per_shard + self.index_bytes

    def parse_index(self, data: bytes) -> UInt64[np.ndarray, "chunks 2"]:
        """Offset and length of every chunk, from the last :attr:`index_bytes` of a shard."""
        body = _checked(data, self.index_bytes, "the shard index")
        return np.frombuffer(body, dtype="<u8").reshape(-1, 2)

    def with_tail(self, data: bytes) -> bytes:
        """A shard as zarr-python makes it, with the chunks' checksums put before the index."""
        end = len(data) - self.index_bytes
        checksums = bytearray()
        for offset, length in self.parse_index(data[end:]).tolist():
            there = length != ABSENT
            checksums += data[offset : offset + length][-CRC_BYTES:] if there else bytes(CRC_BYTES)
        return data[:end] + bytes(checksums) + data[end:]

    def tail_sha256(self, data: bytes) -> str:
        """What the ledger keeps of a shard's tail, from the file or its end."""
        return hashlib.sha256(data[-self.tail_bytes :]).hexdigest()


def decode_chunk(data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """The array in a zstd frame that its crc32c follows; DamagedShard if the bytes are not exactly that."""
    frame = _checked(data, len(data), "an inner chunk")
    rows = np.empty(shape, dtype=dtype)
    try:
        with _decompressor().stream_reader(frame) as reader:
            num_bytes = reader.readinto(rows.reshape(-1).view(np.uint8))
            more = reader.read(1)
    except zstandard.ZstdError as error:
        raise DamagedShard(f"an inner chunk does not decompress: {error}") from error
    if num_bytes != rows.nbytes or more:
        got = f"more than {num_bytes}" if more else num_bytes
        raise DamagedShard(f"an inner chunk holds {got} bytes, expected {rows.nbytes}")
    return rows


def read_array(
    metadata: bytes, read_chunk: Callable[[str], bytes], expected_shape: tuple[int, ...] | None, stored_bytes: int
) -> np.ndarray:
    """An unsharded array cut along its first axis, as resources are kept.

    Args:
        metadata: Its ``zarr.json``.
        read_chunk: A chunk's key, ``3/0`` say -> its bytes.
        expected_shape: None if nobody knows.
        stored_bytes: Of its chunks' files; a large array that is nearly nothing is refused.
    """
    try:
        value = json.loads(metadata)
        shape = tuple(value["shape"])
        chunk = tuple(value["chunk_grid"]["configuration"]["chunk_shape"])
        dtype = np.dtype(value["data_type"]).newbyteorder("<")
        codecs = _chain(dtype, value["codecs"][1]["configuration"])
        known = _array_metadata(value, dtype, [*shape], [*chunk], codecs) == value
        known &= all(type(size) is int and size > 0 for size in (*shape, *chunk))
        known &= bool(shape) and shape[1:] == chunk[1:] and dtype.kind in "biuf"
    except ODD_METADATA:
        known = False
    if not known:
        raise DamagedShard("not an array as this project writes them")
    if expected_shape not in (None, shape):
        raise DamagedShard(f"shape {shape}, expected {expected_shape}")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > MAX_RESOURCE_CHUNK_BYTES + 100 * stored_bytes:
        raise DamagedShard(f"{num_bytes} bytes from files of {stored_bytes}")
    if math.prod(chunk) * dtype.itemsize > MAX_RESOURCE_CHUNK_BYTES:
        raise DamagedShard(f"a chunk of {chunk}: more than {MAX_RESOURCE_CHUNK_BYTES} bytes")
    zeros = "/0" * (len(shape) - 1)
    keys = (f"{index}{zeros}" for index in range(-(-shape[0] // chunk[0])))
    parts = [decode_chunk(read_chunk(key), dtype, chunk) for key in keys]
    return np.concatenate(parts)[: shape[0]]


def _chain(dtype: np.dtype[Any], zstd: Any) -> list[dict[str, Any]]:
    """Metadata of the codecs of a chunk; how hard zstd tried is free."""
    if not {*zstd} <= {"level", "checksum"}:
        raise ValueError("unknown settings of zstd")
    order = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    inner = [{"name": "bytes", **order}, {"name": "zstd", "configuration": zstd}]
    return [*inner, {"name": "crc32c"}]


def _array_metadata(
    value: dict[str, Any], dtype: np.dtype[Any], shape: list[int], chunk_shape: list[int], codecs: list[dict[str, Any]]
) -> dict[str, Any]:
    """What ``zarr.json`` says of an array; fields that do not concern bytes are as given."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype.newbyteorder("=").name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": codecs,
        "storage_transformers": [],
        **{key: value[key] for key in INDIFFERENT if key in value},
    }


class NativeShards:
    """The shards of one array behind a function that reads ranges; safe to use from threads.

    Args:
        array: How the array is stored.
        read_range: (shard index, start, length) -> bytes of that shard's file; fewer at its end.
        num_bytes: Shard index -> the size its file has.
        tail_sha256: Shard index -> hash of its tail; None if it was written before tails.
    """

    def __init__(
        self,
        array: NativeArray,
        read_range: Callable[[int, int, int], bytes],
        num_bytes: Callable[[int], int],
        tail_sha256: Callable[[int], str | None],
    ) -> None:
        self.array, self._read_range, self._num_bytes, self._tail_sha256 = array, read_range, num_bytes, tail_sha256
        kept = INDEX_MEMORY_BYTES // (array.tail_bytes + INDEX_OVERHEAD_BYTES)
        # An epoch meets every shard in random order: what is kept must not grow with the corpus.
        self._tail = lru_cache(max(1, kept))(self._read_tail)

    def read_chunk(self, index: int) -> np.ndarray:
        """All stored rows of an inner chunk (counted over the whole array), padding included.

        DamagedShard if bytes are missing, altered, or another shard's; OSError if the file cannot be read.
        """
        shard, chunk = divmod(index, self.array.chunks_per_shard)
        places, checksums = self._tail(shard)
        offset, length = places[chunk].tolist()
        if offset == length == ABSENT:
            raise DamagedShard(f"inner chunk {chunk} is absent")
        if offset + length > self._num_bytes(shard) - self.array.index_bytes:
            raise DamagedShard(f"inner chunk {chunk} lies outside the file")
        data = self._read_range(shard, offset, length)
        own = slice(CRC_BYTES * chunk, CRC_BYTES * (chunk + 1))
        if checksums is not None and data[-CRC_BYTES:] != checksums[own]:
            raise DamagedShard(f"inner chunk {chunk} is another one than the tail names")
        shape = (self.array.rows_per_chunk, *self.array.row_shape)
        return decode_chunk(data, self.array.dtype, shape)

    def _read_tail(self, shard: int) -> tuple[UInt64[np.ndarray, "chunks 2"], bytes | None]:
        """Offset and length of each chunk, and the checksums if the ledger knows them."""
        array, expected = self.array, self._tail_sha256(shard)
        size = array.index_bytes if expected is None else array.tail_bytes
        start = self._num_bytes(shard) - size
        if start < 0:
            raise DamagedShard("the file is too short for an index")
        data = self._read_range(shard, start, size)
        if expected is None:
            return array.parse_index(data), None
        if array.tail_sha256(data) != expected:
            raise DamagedShard("the file is another one than the ledger names")
        split = size - array.index_bytes
        return array.parse_index(data[split:]), data[:split]


def _checked(data: bytes, expected: int, what: str) -> bytes:
    """``data`` without its crc32c, which has been checked."""
    if len(data) != expected:
        raise DamagedShard(f"{len(data)} bytes of {what}, expected {expected}")
    body = data[:-CRC_BYTES]
    if google_crc32c.value(body) != int.from_bytes(data[-CRC_BYTES:], "little"):
        raise DamagedShard(f"the crc32c of {what} does not match")
    return body


def _decompressor() -> zstandard.ZstdDecompressor:
    """One per thread: a decompressor must not be shared.

    Not numcodecs, through which zarr-python compresses: into a buffer it takes a frame that ends
    early for a whole one, and without a buffer it allocates whatever a frame claims.
    """
    if not hasattr(_of_thread, "decompressor"):
        _of_thread.decompressor = zstandard.ZstdDecompressor()
    return _of_thread.decompressor


# What may be written into a shard: arrays that fit the manifest, values that can be right.


TOO_LARGE = (
    "if the teacher's logits are finite, the value is too large for the array's dtype: extract with"
    " another codec, or another dtype of this one"
)


def check_arrays(manifest: Manifest, shard: ShardRange, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse arrays [rows, L, *trailing] that do not fit the manifest, or values that cannot be."""
    specs = manifest.all_arrays
    if set(arrays) != set(specs):
        raise UsageError("wrong arrays", where=shard, got=sorted(arrays), expected=sorted(specs))
    for name, spec in specs.items():
        shape, found = (shard.num_rows, manifest.row_length, *spec.trailing_shape), arrays[name]
        if found.shape != shape or found.dtype != np.dtype(spec.dtype):
            what, where = "an array does not fit the manifest", f"{shard}: {name}"
            got, expected = f"{found.dtype} {found.shape}", f"{spec.dtype} {shape}"
            raise UsageError(what, where=where, got=got, expected=expected)
    check_values(manifest, shard, arrays)


def check_values(manifest: Manifest, rows: ShardRange, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse tokens that are none of V, numbers that are not finite, probabilities above 1, by row and position."""
    for name, values in arrays.items():
        remedy = ""
        if name == "tokens":
            bad = (values < 0) | (values >= manifest.vocab_size)
        elif values.dtype.kind != "f":
            continue
        else:
            bad = ~np.isfinite(values)
            if name == "token_log_probs":
                # A rounding above 0 is a probability of 1; anything more is none.
                bad |= values > 1e-3
                bad[:, 0] |= values[:, 0] != 0
            else:
                remedy = TOO_LARGE
        if bad.any():
            place = tuple(np.argwhere(bad)[0])
            where = f"{rows.split} row {rows.start + int(place[0])}, position {int(place[1])}"
            what = f"{name} out of range"
            raise GdistillError(what, where=where, got=values[place], remedy=remedy)
