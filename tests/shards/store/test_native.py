"""The native shard reader gives zarr-python's bytes, or an error; never anything else."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from shards.store.layout import (
    ABSENT,
    INDEX_OVERHEAD_BYTES,
    DamagedShard,
    NativeArray,
    NativeShards,
    decode_chunk,
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


def native_of(array: zarr.Array[Any]) -> NativeArray:
    """What our reader takes the array for."""
    assert array.shards is not None
    return NativeArray(
        array.dtype.newbyteorder("<"),
        array.shape[1:],
        array.chunks[0],
        array.shards[0] // array.chunks[0],
    )


def decode(array: zarr.Array[Any], data: bytes) -> np.ndarray:
    return decode_chunk(data, array.dtype.newbyteorder("<"), (array.chunks[0], *array.shape[1:]))


def shards_of(
    content: dict[str, bytes], array: zarr.Array[Any], tails: dict[int, str] | None = None
) -> NativeShards:
    native = native_of(array)
    assert native.fits(content["a/zarr.json"], array.shape[0])
    names = ["/".join(["a/c", str(i), *["0"] * (array.ndim - 1)]) for i in range(99)]
    return NativeShards(
        native,
        lambda shard, start, length: content[names[shard]][start : start + length],
        lambda shard: len(content[names[shard]]),
        lambda shard: (tails or {}).get(shard),
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


def test_any_change_of_the_metadata_is_refused() -> None:
    store, array = create()
    native = native_of(array)
    metadata = json.loads(files(store)["a/zarr.json"])
    free = {"fill_value", "attributes", "dimension_names"}
    assert native.fits(json.dumps(metadata).encode(), 22)
    for key in metadata:
        changed = {**metadata, key: "other"}
        assert native.fits(json.dumps(changed).encode(), 22) == (key in free)
        without = {name: value for name, value in metadata.items() if name != key}
        assert native.fits(json.dumps(without).encode(), 22) == (key in free)
    assert not native.fits(json.dumps({**metadata, "new": 1}).encode(), 22)
    assert not native.fits(json.dumps(metadata).encode(), 23), "rows of the manifest"
    for other in (b"[]", b"{}", b"", b"\xff", b"[" * 10**5):
        assert not native.fits(other, 22)


def test_zstd_may_be_told_how_hard_to_try_and_nothing_else() -> None:
    store, array = create()
    text = files(store)["a/zarr.json"].decode()
    assert '"level": 3' in text
    assert native_of(array).fits(text.replace('"level": 3', '"level": 9').encode(), 22)
    assert not native_of(array).fits(text.replace('"level": 3', '"dictionary": 3').encode(), 22)


def with_tails(
    content: dict[str, bytes], array: zarr.Array[Any]
) -> tuple[dict[str, bytes], dict[int, str]]:
    """The files as the writer keeps them, and what the ledger says of their tails."""
    native = native_of(array)
    names = {f"a/c/{shard}/0/0": shard for shard in range(3)}
    kept = {name: native.with_tail(content[name]) for name in names}
    tails = {shard: native.tail_sha256(kept[name]) for name, shard in names.items()}
    return {**content, **kept}, tails


def test_tails_are_nothing_to_zarr_and_the_rows_stay_the_same(sound) -> None:
    content, array = sound
    kept, tails = with_tails(content, array)
    assert all(len(kept[f"a/c/{i}/0/0"]) == len(content[f"a/c/{i}/0/0"]) + 12 for i in range(3))
    memory = MemoryStore()
    for name, data in kept.items():
        memory._store_dict[name] = cpu.Buffer.from_bytes(data)
    judge = zarr.open_array(memory, path="a", mode="r")
    np.testing.assert_array_equal(np.asarray(judge[:]), np.asarray(array[:]))
    shards = shards_of(kept, array, tails)
    for index in range(8):
        expected = np.asarray(array[index * 3 : index * 3 + 3])
        assert shards.read_chunk(index)[: len(expected)].tobytes() == expected.tobytes()


def incompressible(seed: int) -> tuple[dict[str, bytes], zarr.Array[Any], dict[int, str]]:
    """An array whose chunks all take the same bytes, so that every index is the same."""
    store, array = create(18, dtype="uint8", tail=(50, 20))
    array[:] = np.random.default_rng(seed).integers(0, 256, array.shape).astype("uint8")
    content = files(store)
    native = native_of(array)
    indices = {content[f"a/c/{i}/0/0"][-native.index_bytes :] for i in range(2)}
    assert len(indices) == 1
    kept = {f"a/c/{i}/0/0": native.with_tail(content[f"a/c/{i}/0/0"]) for i in range(2)}
    tails = {i: native.tail_sha256(kept[f"a/c/{i}/0/0"]) for i in range(2)}
    return {**content, **kept}, array, tails


def test_a_whole_chunk_of_another_place_is_refused() -> None:
    content, array, tails = incompressible(0)
    data = content["a/c/0/0/0"]
    (start, length), (second, _) = native_of(array).parse_index(data[-52:])[:2].tolist()
    chunk = data[second : second + length]
    mixed = {**content, "a/c/0/0/0": data[:start] + chunk + data[start + length :]}
    shards = shards_of(mixed, array, tails)
    with pytest.raises(DamagedShard, match="inner chunk 0 is another one"):
        shards.read_chunk(0)
    assert shards.read_chunk(1).tobytes() == shards_of(content, array).read_chunk(1).tobytes()


@pytest.mark.parametrize("num_bytes", [0, 1, 59, 1 << 24])
def test_a_chunk_of_another_size_is_refused_and_never_filled_up(sound, num_bytes: int) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(num_bytes))
    frame += google_crc32c.value(frame).to_bytes(4, "little")
    told = f"holds {num_bytes if num_bytes < 60 else 'more than 60'} bytes, expected 60"
    with pytest.raises(DamagedShard, match=told):
        decode(sound[1], frame)


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


def test_what_is_kept_of_shards_is_bounded(sound, monkeypatch: pytest.MonkeyPatch) -> None:
    content, array = sound
    monkeypatch.setattr("shards.store.layout.INDEX_MEMORY_BYTES", 2 * (64 + INDEX_OVERHEAD_BYTES))
    shards = shards_of(content, array)
    reads = []
    read_range = shards._read_range
    monkeypatch.setattr(shards, "_read_range", lambda *a: reads.append(a) or read_range(*a))
    expected = read_all(content, array)
    for _ in range(2):
        assert [shards.read_chunk(index).tobytes() for index in range(8)] == expected
        assert shards._tail.cache_info().currsize == 2
    assert len([length for *_, length in reads if length == 52]) == 6, "3 shards, met in turn"


@pytest.mark.slow
def test_a_reader_remembers_little_of_each_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.store.layout.INDEX_MEMORY_BYTES", 0)
    write_store(tmp_path / "store", splits={"train": 800}, rows_per_shard=4, rows_per_chunk=4)
    reader = ShardStore.open(tmp_path / "store").split("train")
    reader.read_chunk(0)
    gc.collect()
    tracemalloc.start()
    for index in range(reader.num_chunks):
        reader.read_chunk(index)
    gc.collect()
    # Not all that is traced: threads that other tests have left behind allocate as well.
    ours = [tracemalloc.Filter(True, place) for place in ("*/shards/*", "*/json/*")]
    snapshot = tracemalloc.take_snapshot().filter_traces(ours)
    tracemalloc.stop()
    kept = sum(trace.size for trace in snapshot.traces)
    # A ledger record takes some 600 bytes a file, and an index as many: 5 files are 6,000.
    assert kept / reader.num_chunks < 500
