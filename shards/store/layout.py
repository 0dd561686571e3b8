"""The Zarr v3 side of a store: names, metadata and shard bytes, all made by zarr-python in memory.

    <store>/zarr.json                       root group
            manifest.json                   identity, hashes of all files written once
            resources/<name>/...            arrays kept once per store
            tokenizer/*, corpus/*           side files
            <split>/<array>/zarr.json       [N, L, *trailing], sharding codec
            <split>/<array>/c/<i>/0/...     shard i: rows [i * rows_per_shard, ...)
            ledger/<split>/<i>.json         one record per finished shard

Inner chunks are bytes(little) -> zstd -> crc32c; the bytes of a shard: :mod:`shards.store.native`.
Encoding in memory first lets the writer hash and store exactly the bytes it meant, on any kind of
storage, in one atomic put per file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore

from shards.codec import ArraySpec
from shards.store.manifest import MANIFEST_FILE, Manifest
from shards.store.native import MAX_RESOURCE_CHUNK_BYTES, NativeArray

RESOURCES = "resources"
ZSTD_LEVEL = 1


@dataclass(frozen=True)
class ShardRange:
    """Rows start..stop-1 of a split: what one process writes at once."""

    split: str
    index: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.split} shard {self.index} (rows {self.start} to {self.stop - 1})"


def shard_ranges(manifest: Manifest, split: str) -> list[ShardRange]:
    """All shards of a split in order; the last one may be short."""
    return [shard_range(manifest, split, index) for index in range(num_shards(manifest, split))]


def shard_range(manifest: Manifest, split: str, index: int) -> ShardRange:
    """One shard of a split."""
    start = index * manifest.rows_per_shard
    return ShardRange(
        split, index, start, min(start + manifest.rows_per_shard, manifest.splits[split])
    )


def num_shards(manifest: Manifest, split: str) -> int:
    """Shards of a split, the last of which may be short."""
    return -(-manifest.splits[split] // manifest.rows_per_shard)


def native_array(manifest: Manifest, array: str) -> NativeArray:
    """How an array of the store is kept, as its manifest has it."""
    spec = manifest.all_arrays[array]
    return NativeArray(
        np.dtype(spec.dtype).newbyteorder("<"),
        (manifest.row_length, *spec.trailing_shape),
        manifest.rows_per_chunk,
        manifest.rows_per_shard // manifest.rows_per_chunk,
    )


def shard_file(manifest: Manifest, split: str, array: str, index: int) -> str:
    """The name of one shard's file."""
    zeros = 1 + len(manifest.all_arrays[array].trailing_shape)
    return "/".join([split, array, "c", str(index), *["0"] * zeros])


def shard_files(manifest: Manifest, shard: ShardRange) -> dict[str, str]:
    """array name -> file name, for every array of a shard."""
    return {
        name: shard_file(manifest, shard.split, name, shard.index) for name in manifest.all_arrays
    }


def static_files(manifest: Manifest, resources: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Every file that is written once: group and array metadata, and the resources."""
    store = MemoryStore()
    note = {
        "format": "gdistill",
        "format_version": manifest.format_version,
        "manifest": MANIFEST_FILE,
    }
    root = zarr.create_group(store, attributes={"gdistill": note})
    for split in manifest.splits:
        group = root.create_group(split)
        for name, spec in manifest.all_arrays.items():
            _create_sharded(group, manifest, split, name, spec)
    group = root.create_group(RESOURCES)
    for name, value in resources.items():
        _create_resource(group, name, value)
    return _contents(store)


def encode_shard(
    manifest: Manifest, shard: ShardRange, arrays: Mapping[str, np.ndarray]
) -> dict[str, bytes]:
    """file name -> bytes for every array of one whole shard."""
    store = MemoryStore()
    group = zarr.create_group(store).create_group(shard.split)
    for name, spec in manifest.all_arrays.items():
        target = _create_sharded(group, manifest, shard.split, name, spec)
        target[shard.start : shard.stop] = arrays[name]
    content = _contents(store)
    return {
        file: native_array(manifest, name).with_tail(content[file])
        for name, file in shard_files(manifest, shard).items()
    }


def shard_tails(
    manifest: Manifest, shard: ShardRange, encoded: Mapping[str, bytes]
) -> dict[str, str]:
    """file name -> hash of its tail, from the bytes of :func:`encode_shard`."""
    return {
        file: native_array(manifest, name).tail_sha256(encoded[file])
        for name, file in shard_files(manifest, shard).items()
    }


def _create_sharded(
    group: zarr.Group, manifest: Manifest, split: str, name: str, spec: ArraySpec
) -> zarr.Array[Any]:
    inner = (manifest.row_length, *spec.trailing_shape)
    return group.create_array(
        name,
        shape=(manifest.splits[split], *inner),
        chunks=(manifest.rows_per_chunk, *inner),
        shards=(manifest.rows_per_shard, *inner),
        dtype=spec.dtype,
        compressors=[ZstdCodec(level=ZSTD_LEVEL), Crc32cCodec()],
        fill_value=0,
        dimension_names=("row", "position", *[None] * len(spec.trailing_shape)),
        config={"write_empty_chunks": True},
    )


def _create_resource(group: zarr.Group, name: str, value: np.ndarray) -> None:
    row_bytes = max(1, value.nbytes // max(1, len(value)))
    rows = max(1, min(len(value), MAX_RESOURCE_CHUNK_BYTES // row_bytes))
    group.create_array(
        name,
        data=np.ascontiguousarray(value),
        chunks=(rows, *value.shape[1:]),
        compressors=[ZstdCodec(level=ZSTD_LEVEL), Crc32cCodec()],
        fill_value=0,
        config={"write_empty_chunks": True},
    )


def _contents(store: MemoryStore) -> dict[str, bytes]:
    return {name: store._store_dict[name].to_bytes() for name in sorted(store._store_dict)}
