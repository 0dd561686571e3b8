"""The native shard reader gives zarr-python's bytes, or an error; never anything else."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import MemoryStore

from shards.store import layout
from shards.store.store import ShardStore
from tests.shards.store_cases import flipped

DTYPES = ["int32", "float32", "uint16", "float16", "uint8", "int8", "bool", "uint64", "float64"]
FIRST = "a/c/0/0/0"


class Made:
    """An array as stores have them, of zarr-python in memory; ``options`` change something."""

    def __init__(
        self,
        num_rows: int = 22,
        chunk: int = 3,
        per_shard: int = 3,
        tail: tuple[int, ...] = (5, 2),
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.memory = MemoryStore()
        usual = {"dtype": "float16", "compressors": [ZstdCodec(level=3), Crc32cCodec()]}
        usual |= {"fill_value": 0, "config": {"write_empty_chunks": True}}
        sizes = {"shape": num_rows, "chunks": chunk, "shards": chunk * per_shard}
        shapes = {name: (rows, *tail) for name, rows in sizes.items()}
        self.array = zarr.create_array(self.memory, name="a", **shapes, **(usual | options))
        dtype = self.array.dtype
        self.native = layout.NativeArray(dtype.newbyteorder("<"), tail, chunk, per_shard)
        draw = np.random.default_rng(seed).integers(0, 256, self.array.shape)
        self.array[:] = draw.astype(dtype)

    @property
    def content(self) -> dict[str, bytes]:
        return {name: data.to_bytes() for name, data in self.memory._store_dict.items()}

    def shards(
        self, content: Mapping[str, bytes] | None = None, tails: dict[int, str] | None = None
    ) -> layout.NativeShards:
        """Our reader of these files."""
        files = content or self.content
        assert self.native.fits(files["a/zarr.json"], self.array.shape[0])
        zeros = "/0" * (self.array.ndim - 1)
        return layout.NativeShards(
            self.native,
            lambda shard, start, length: files[f"a/c/{shard}{zeros}"][start : start + length],
            lambda shard: len(files[f"a/c/{shard}{zeros}"]),
            lambda shard: (tails or {}).get(shard),
        )

    def assert_reads_as_zarr(self, shards: layout.NativeShards) -> None:
        rows = self.array.chunks[0]
        for index in 2 * [*range(-(-self.array.shape[0] // rows))]:
            expected = np.asarray(self.array[index * rows : (index + 1) * rows])
            got = shards.read_chunk(index)
            assert got.dtype == expected.dtype and got.shape == self.array.chunks
            assert got[: len(expected)].tobytes() == expected.tobytes()
            got[:] = 0  # a caller's own, to write into


def read_all(shards: layout.NativeShards) -> list[bytes]:
    return [shards.read_chunk(index).tobytes() for index in range(8)]


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


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
def test_bytes_are_those_of_zarr(checksum: bool, **sizes: Any) -> None:
    made = Made(compressors=[ZstdCodec(level=3, checksum=checksum), Crc32cCodec()], **sizes)
    made.assert_reads_as_zarr(made.shards())


def test_any_change_of_the_metadata_is_refused(made: Made) -> None:
    native, text = made.native, made.content["a/zarr.json"].decode()
    metadata = json.loads(text)
    free = {"fill_value", "attributes", "dimension_names"}
    assert native.fits(json.dumps(metadata).encode(), 22)
    for key in metadata:
        changed = {**metadata, key: "other"}
        assert native.fits(json.dumps(changed).encode(), 22) == (key in free)
        without = {name: value for name, value in metadata.items() if name != key}
        assert native.fits(json.dumps(without).encode(), 22) == (key in free)
    assert not native.fits(json.dumps({**metadata, "new": 1}).encode(), 22)
    assert not native.fits(text.encode(), 23), "rows of the manifest"
    for other in (b"[]", b"{}", b"", b"\xff", b"[" * 10**5):
        assert not native.fits(other, 22)
    # zstd may be told how hard to try and nothing else
    assert '"level": 3' in text
    assert native.fits(text.replace('"level": 3', '"level": 9').encode(), 22)
    assert not native.fits(text.replace('"level": 3', '"dictionary": 3').encode(), 22)


def test_a_whole_chunk_of_another_place_is_refused() -> None:
    """Bytes that do not compress: all chunks take the same, so that every index is the same."""
    made = Made(18, dtype="uint8", tail=(50, 20))
    content = {name: made.native.with_tail(data) for name, data in sorted(made.content.items()) if "/c/" in name}
    data, tails = content[FIRST], {shard: made.native.tail_sha256(data) for shard, data in enumerate(content.values())}
    content |= {"a/zarr.json": made.content["a/zarr.json"]}
    assert len({content[f"a/c/{i}/0/0"][-made.native.index_bytes :] for i in range(2)}) == 1
    (start, length), (second, _) = made.native.parse_index(data[-52:])[:2].tolist()
    mixed = data[:start] + data[second : second + length] + data[start + length :]
    shards = made.shards({**content, FIRST: mixed}, tails)
    with pytest.raises(layout.DamagedShard, match="inner chunk 0 is another one"):
        shards.read_chunk(0)
    assert shards.read_chunk(1).tobytes() == made.shards(content).read_chunk(1).tobytes()


def test_every_flipped_bit_and_every_cut_is_noticed(made: Made) -> None:
    content, name = made.content, "a/c/1/0/0"
    data = content[name]
    flips = [flipped(data, bit) for bit in range(0, len(data) * 8, 3)]
    assert len(flips) > 500
    for damaged in [*flips, *(data[:length] for length in range(len(data)))]:
        with pytest.raises(layout.DamagedShard):
            read_all(made.shards({**content, name: damaged}))


def test_an_absent_chunk_is_an_error_and_no_fill_value() -> None:
    made = Made(config={"write_empty_chunks": False})
    made.array[:] = 1
    made.array[9:12] = 0  # equal to the fill value: zarr-python leaves the chunk out
    shards = made.shards()
    index = made.native.parse_index(made.content["a/c/1/0/0"][-52:])
    assert index[0].tolist() == [layout.ABSENT] * 2
    shards.read_chunk(4)
    with pytest.raises(layout.DamagedShard, match="absent"):
        shards.read_chunk(3)


def test_an_index_that_points_outside_is_an_error(made: Made) -> None:
    data = made.content[FIRST]
    index = np.frombuffer(data[-52:-4], "<u8").copy()
    index[0] = 10**6
    crc = google_crc32c.value(index.tobytes()).to_bytes(4, "little")
    with pytest.raises(layout.DamagedShard, match="outside"):
        read_all(made.shards({**made.content, FIRST: data[:-52] + index.tobytes() + crc}))


def test_what_is_kept_of_shards_is_bounded(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 2 * (64 + layout.INDEX_OVERHEAD_BYTES)
    monkeypatch.setattr(layout, "INDEX_MEMORY_BYTES", room)
    shards, reads = made.shards(), []
    read_range = shards._read_range
    monkeypatch.setattr(shards, "_read_range", lambda *a: reads.append(a) or read_range(*a))
    expected = read_all(made.shards())
    for _ in range(2):
        assert read_all(shards) == expected
        assert shards._tail.cache_info().currsize == 2
    assert len([length for *_, length in reads if length == 52]) == 6, "3 shards, met in turn"


def test_every_thread_has_a_decompressor_of_its_own(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shards, makers = zstandard.ZstdDecompressor, made.shards(), list[int]()
    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda: makers.append(get_ident()) or make())
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(read_all, shards).result()
    assert len(makers) == 2


def test_a_reader_remembers_little_of_each_shard(sound: Path) -> None:
    reader = ShardStore.open(sound).split("train")
    reader.read_rows(0, 28)
    assert len(reader._files) == 4
    # Six files with a size and two hashes each; whole records take more than twice as much.
    assert len(pickle.dumps(list(reader._files.values()))) / 4 < 800
