"""The native shard reader gives zarr-python's bytes, or an error; never anything else."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import (
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)
from zarr.storage import MemoryStore

from shards.store.native import (
    ABSENT,
    INDEX_OVERHEAD_BYTES,
    DamagedShard,
    NativeArray,
    NativeShards,
)
from shards.store.store import ShardStore
from tests.shards.store_cases import write_store

DTYPES = ["int32", "float32", "uint16", "float16", "uint8", "int8", "bool", "uint64", "float64"]


def create(
    num_rows: int = 22,
    chunk: int = 3,
    per_shard: int = 3,
    tail: tuple[int, ...] = (5, 2),
    **options,
) -> tuple[MemoryStore, zarr.Array[Any]]:
    """An array as stores have them; ``options`` change something about it."""
    store = MemoryStore()
    settings_ = {
        "shape": (num_rows, *tail),
        "chunks": (chunk, *tail),
        "shards": (chunk * per_shard, *tail),
        "dtype": "float16",
        "compressors": [ZstdCodec(level=3), Crc32cCodec()],
        "fill_value": 0,
        "config": {"write_empty_chunks": True},
    }
    return store, zarr.create_array(store, name="a", **{**settings_, **options})


def files(store: MemoryStore) -> dict[str, bytes]:
    return {name: buffer.to_bytes() for name, buffer in store._store_dict.items()}


def shards_of(content: dict[str, bytes], array: zarr.Array[Any]) -> NativeShards:
    native = NativeArray.open(content["a/zarr.json"])
    assert native is not None
    names = ["/".join(["a/c", str(i), *["0"] * (array.ndim - 1)]) for i in range(99)]
    return NativeShards(
        native,
        lambda shard, start, length: content[names[shard]][start : start + length],
        lambda shard: len(content[names[shard]]),
    )


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    chunk=st.integers(1, 6),
    per_shard=st.integers(1, 5),
    tail=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    checksum=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bytes_are_those_of_zarr(
    num_rows: int, chunk: int, per_shard: int, tail: tuple, dtype: str, checksum: bool, seed: int
) -> None:
    codecs = [ZstdCodec(level=3, checksum=checksum), Crc32cCodec()]
    store, array = create(num_rows, chunk, per_shard, tail, dtype=dtype, compressors=codecs)
    rng = np.random.default_rng(seed)
    array[:] = rng.integers(0, 100, array.shape).astype(dtype)
    shards = shards_of(files(store), array)
    for index in range(-(-num_rows // chunk)):
        expected = np.asarray(array[index * chunk : (index + 1) * chunk])
        got = shards.read_chunk(index)
        assert got.dtype == expected.dtype and got.shape == (chunk, *tail)
        assert got[: len(expected)].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"compressors": [GzipCodec(), Crc32cCodec()]},
        {"compressors": [ZstdCodec()]},
        {"compressors": [ZstdCodec(), Crc32cCodec(), Crc32cCodec()]},
        {"shards": None},
        {"chunks": (3, 1, 2), "shards": (9, 5, 2)},
        {"dtype": "complex64"},
        {"dtype": "datetime64[s]"},
        {"dtype": ">f4", "serializer": BytesCodec(endian="big")},
        {"filters": [TransposeCodec(order=(0, 2, 1))]},
        {
            "shards": None,
            "chunks": (9, 5, 2),
            "compressors": None,
            "serializer": ShardingCodec(
                chunk_shape=(3, 5, 2),
                codecs=[BytesCodec(), ZstdCodec(), Crc32cCodec()],
                index_location="start",
            ),
        },
    ],
    ids=str,
)
def test_any_other_array_is_left_to_zarr(options: dict) -> None:
    store, _ = create(**options)
    assert NativeArray.open(files(store)["a/zarr.json"]) is None


def test_any_change_of_the_metadata_is_left_to_zarr() -> None:
    store, _ = create()
    metadata = json.loads(files(store)["a/zarr.json"])
    free = {"fill_value", "attributes", "dimension_names", "shape"}
    assert NativeArray.open(json.dumps(metadata).encode()) is not None
    for key in metadata:
        if key not in free:
            without = {name: value for name, value in metadata.items() if name != key}
            assert NativeArray.open(json.dumps(without).encode()) is None
            changed = {**metadata, key: "other"}
            assert NativeArray.open(json.dumps(changed).encode()) is None
    assert NativeArray.open(json.dumps({**metadata, "new": 1}).encode()) is None


@pytest.fixture()
def sound() -> tuple[dict[str, bytes], zarr.Array[Any]]:
    store, array = create()
    array[:] = np.random.default_rng(0).normal(size=array.shape).astype("float16")
    return files(store), array


def read_all(content: dict[str, bytes], array: zarr.Array[Any]) -> list[bytes]:
    shards = shards_of(content, array)
    return [shards.read_chunk(index).tobytes() for index in range(8)]


def test_every_flipped_bit_and_every_cut_is_noticed(sound) -> None:
    content, array = sound
    name = "a/c/1/0/0"
    data = content[name]
    refused = 0
    for bit in range(0, len(data) * 8, 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedShard):
            read_all({**content, name: bytes(flipped)}, array)
        refused += 1
    for length in range(len(data)):
        with pytest.raises(DamagedShard):
            read_all({**content, name: data[:length]}, array)
    assert refused > 500


def test_an_absent_chunk_is_an_error_and_no_fill_value() -> None:
    store, array = create(config={"write_empty_chunks": False})
    array[:] = 1
    array[9:12] = 0  # equal to the fill value: zarr-python leaves the chunk out
    shards = shards_of(files(store), array)
    assert shards.array.parse_index(files(store)["a/c/1/0/0"][-52:])[0].tolist() == [ABSENT] * 2
    shards.read_chunk(4)
    with pytest.raises(DamagedShard, match="absent"):
        shards.read_chunk(3)


def test_an_index_that_points_outside_is_an_error(sound) -> None:
    import google_crc32c

    content, array = sound
    data = content["a/c/0/0/0"]
    index = np.frombuffer(data[-52:-4], "<u8").copy()
    index[0] = 10**6
    crc = google_crc32c.value(index.tobytes()).to_bytes(4, "little")
    broken = {**content, "a/c/0/0/0": data[:-52] + index.tobytes() + crc}
    with pytest.raises(DamagedShard, match="outside"):
        read_all(broken, array)


def test_rows_are_writable_and_independent(sound) -> None:
    content, array = sound
    shards = shards_of(content, array)
    first = shards.read_chunk(0)
    first[:] = 7
    assert not np.array_equal(shards.read_chunk(0), first)


def test_sizes_come_from_the_metadata(tmp_path: Path, sound) -> None:
    content, _ = sound
    native = NativeArray.open(content["a/zarr.json"])
    assert native == NativeArray(np.dtype("float16"), (5, 2), 3, 3) and native.index_bytes == 52


def test_stores_are_read_natively_and_as_zarr_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path / "store")
    split = ShardStore.open(tmp_path / "store").split("train")
    assert all(isinstance(array, NativeShards) for array in split._arrays.values())
    monkeypatch.setattr(NativeArray, "open", lambda metadata: None)
    judge = ShardStore.open(tmp_path / "store").split("train")
    assert all(isinstance(array, zarr.Array) for array in judge._arrays.values())
    for index in range(split.num_chunks):
        mine, theirs = split.read_chunk(index), judge.read_chunk(index)
        assert mine.keys() == theirs.keys()
        for name, rows in mine.items():
            assert rows.dtype == theirs[name].dtype and rows.shape == theirs[name].shape
            assert rows.tobytes() == theirs[name].tobytes()


def test_what_is_kept_of_shards_is_bounded(sound, monkeypatch: pytest.MonkeyPatch) -> None:
    content, array = sound
    monkeypatch.setattr("shards.store.native.INDEX_MEMORY_BYTES", 2 * (52 + INDEX_OVERHEAD_BYTES))
    shards = shards_of(content, array)
    reads = []
    read_range = shards._read_range
    monkeypatch.setattr(shards, "_read_range", lambda *a: reads.append(a) or read_range(*a))
    expected = read_all(content, array)
    for _ in range(2):
        assert [shards.read_chunk(index).tobytes() for index in range(8)] == expected
        assert shards._index.cache_info().currsize == 2
    assert len([length for *_, length in reads if length == 52]) == 6, "3 shards, met in turn"


def test_a_few_thousand_indices_are_kept() -> None:
    array = NativeArray(np.dtype("uint8"), (1024, 64), 4, 64)
    shards = NativeShards(array, lambda *_: b"", lambda _: 0)
    assert 4000 < (shards._index.cache_info().maxsize or 0) < 10_000


def test_a_reader_remembers_little_of_each_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.store.reader.MAX_PATHS", 1)
    monkeypatch.setattr("shards.store.native.INDEX_MEMORY_BYTES", 0)
    write_store(tmp_path / "store", splits={"train": 800}, rows_per_shard=4, rows_per_chunk=4)
    reader = ShardStore.open(tmp_path / "store").split("train")
    reader.read_chunk(0)
    gc.collect()
    tracemalloc.start()
    for index in range(reader.num_chunks):
        reader.read_chunk(index)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A ledger record takes some 600 bytes a file, and an index as many: 5 files are 6,000.
    assert kept / reader.num_chunks < 500
