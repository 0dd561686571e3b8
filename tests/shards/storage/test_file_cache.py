"""The local cache of remote files: checked copies, evicted by age, nothing else touched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from shards.atomic import FileRecord
from shards.errors import UsageError
from shards.store.location import open_location
from shards.store.remote import FileCache, RemoteLocation
from shards.store.store import ShardStore
from tests.shards.store_cases import write_store


@pytest.fixture
def url() -> str:
    """A fresh folder in fsspec's memory."""
    return f"memory://cache-{time.monotonic_ns()}"


def content(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


def test_the_cache_serves_what_it_has(url: str, tmp_path: Path) -> None:
    write_store(url)
    place = RemoteLocation(url, cache=FileCache(tmp_path / "cache"))
    before = ShardStore.open(place).split("train").read_rows(0, 28)
    for name in place.sizes("train"):
        if "/c/" in name:
            place.delete(name)
    after = ShardStore.open(place).split("train").read_rows(0, 28)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_spoilt_copy_is_fetched_again(url: str, tmp_path: Path) -> None:
    write_store(url)
    reader = ShardStore.open(RemoteLocation(url, cache=FileCache(tmp_path))).split("train")
    expected = reader.read_rows(0, 28)
    for copy in tmp_path.iterdir():
        data = bytearray(copy.read_bytes())
        data[len(data) // 3] ^= 1
        copy.write_bytes(data)
    again = ShardStore.open(RemoteLocation(url, cache=FileCache(tmp_path))).split("train")
    found = again.read_rows(0, 28)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_eviction_keeps_to_its_size_and_to_its_own_copies(url: str, tmp_path: Path) -> None:
    write_store(url)
    before = open_location(url).sizes()
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "the only copy.txt").write_text("of something else")
    place = RemoteLocation(url, cache=FileCache(folder, max_bytes=400))
    rows = ShardStore.open(place).split("train").read_rows(0, 28)
    write_store(tmp_path / "store")
    expected = ShardStore.open(tmp_path / "store").split("train").read_rows(0, 28)
    assert all(np.array_equal(rows[name], expected[name]) for name in expected)
    copies = [path for path in folder.iterdir() if path.suffix != ".txt"]
    assert 0 < sum(path.stat().st_size for path in copies) <= 400
    assert (folder / "the only copy.txt").read_text() == "of something else"
    assert open_location(url).sizes() == before


def test_the_cache_refuses_another_content(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    with pytest.raises(ValueError, match="another hash"):
        cache.open(FileRecord.of(b"right"), lambda: b"wrong")
    assert list(tmp_path.iterdir()) == []
    assert content(cache.open(FileRecord.of(b"right"), lambda: b"right")) == b"right"


def test_the_cache_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GDISTILL_CACHE", str(tmp_path))
    monkeypatch.setenv("GDISTILL_CACHE_BYTES", "1000")
    assert FileCache.default() == FileCache(tmp_path, 1000)
    for wrong in ("1 GB", "\N{SUPERSCRIPT TWO}", "-1", "", "9" * 5000):
        monkeypatch.setenv("GDISTILL_CACHE_BYTES", wrong)
        with pytest.raises(UsageError, match="GDISTILL_CACHE_BYTES"):
            FileCache.default()


def test_what_a_killed_download_left_is_removed_when_old(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, max_bytes=100)
    died, running, strange = (
        tmp_path / f".{'0' * 64}.{'1' * 32}.tmp",
        tmp_path / f".{'2' * 64}.{'3' * 32}.tmp",
        tmp_path / "notes.tmp",
    )
    for path in (died, running, strange):
        path.write_bytes(bytes(90))
    for path in (died, strange):
        os.utime(path, (0, 0))
    assert content(cache.open(FileRecord.of(b"first"), lambda: b"first")) == b"first"
    first = tmp_path / FileRecord.of(b"first").sha256
    assert set(tmp_path.iterdir()) == {running, strange, first}


def test_a_download_killed_on_the_way_is_never_taken_for_a_copy(tmp_path: Path) -> None:
    record = FileRecord.of(b"content")
    code = f"""
import os
from pathlib import Path
from shards.store.remote import FileCache
from shards.store.location import FileRecord
os.replace = lambda *_: os.kill(os.getpid(), 9)
FileCache(Path({str(tmp_path)!r})).open(FileRecord.of(b"content"), lambda: b"content")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    cache = FileCache(tmp_path, max_bytes=10)
    assert content(cache.open(record, lambda: b"content")) == b"content"
    assert list(tmp_path.iterdir()) == [tmp_path / record.sha256]


def put(cache: FileCache, data: bytes) -> bool:
    """Ask for a copy; whether it had to be downloaded."""
    downloads = []

    def download() -> bytes:
        downloads.append(data)
        return data

    assert content(cache.open(FileRecord.of(data), download)) == data
    return bool(downloads)


def age(cache: FileCache, data: bytes, seconds: float) -> None:
    when = time.time() - seconds
    os.utime(cache.folder / FileRecord.of(data).sha256, (when, when))


def test_the_copy_unused_for_longest_goes_first(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, max_bytes=15)
    one, two, three, four = b"one..", b"two..", b"three", b"four."
    for seconds, data in ((300, one), (200, two), (100, three)):
        assert put(cache, data)
        age(cache, data, seconds)
    assert not put(cache, one), "used now"
    assert put(cache, four), "in the place of two"
    assert [put(cache, data) for data in (one, three, four)] == [False] * 3
    assert put(cache, two)


def test_a_copy_in_use_may_be_evicted(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, max_bytes=5)
    first = cache.open(FileRecord.of(b"first"), lambda: b"first")
    assert put(cache, b"other") and not (tmp_path / FileRecord.of(b"first").sha256).exists()
    assert content(first) == b"first"


def test_threads_read_the_truth_through_a_cache_that_holds_almost_nothing(
    url: str, tmp_path: Path
) -> None:
    write_store(url)
    expected = ShardStore.open(url).split("train").read_rows(0, 28)
    wrong = []

    def read(seed: int) -> None:
        reader = ShardStore.open(place).split("train")
        for index in np.random.default_rng(seed).permutation(14) % reader.num_chunks:
            for name, rows in reader.read_chunk(int(index)).items():
                if not np.array_equal(rows, expected[name][4 * index : 4 * index + 4]):
                    wrong.append((index, name))

    place = RemoteLocation(url, cache=FileCache(tmp_path, max_bytes=300))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert wrong == []


def test_a_disk_nearly_full_is_kept_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FileCache(tmp_path)
    for seconds, data in ((200, b"older"), (100, b"newer")):
        put(cache, data)
        age(cache, data, seconds)
    # A twentieth of 1,000 bytes is to stay free: of 52, five more would leave 47.
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1000, free=52))
    assert put(cache, b"third")
    assert not put(cache, b"newer") and put(cache, b"older")


def test_another_users_copy_is_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FileCache(tmp_path)
    assert put(cache, b"shared")

    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuses)
    assert not put(cache, b"shared")


def test_a_copy_of_another_size_is_none(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    (tmp_path / FileRecord.of(b"whole").sha256).write_bytes(b"who")
    assert put(cache, b"whole") and not put(cache, b"whole")
