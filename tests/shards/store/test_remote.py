"""Stores at URLs: a real S3 server on loopback, claims, the local cache, clear errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer

from shards.atomic import FileRecord
from shards.errors import GdistillError, IntegrityError, UsageError
from shards.store.location import Location, open_location
from shards.store.manifest import ShardRange
from shards.store.remote import FileCache, RemoteLocation, this_process
from shards.store.store import ShardStore
from shards.store.verification import verify
from shards.stream.stream import ShardStream
from tests.shards import store_cases as cases
from tests.shards.store.fault_trials import flipped

Rows = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an empty bucket of an S3 server that lives as long as this module's tests."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("GDISTILL_CACHE", str(tmp_path_factory.mktemp("cache")))
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture
def memory() -> str:
    """A fresh folder in fsspec's memory."""
    return f"memory://{time.monotonic_ns()}"


@pytest.fixture(params=["s3", "memory"])
def url(request: pytest.FixtureRequest, bucket: str, memory: str) -> str:
    """A fresh folder at an S3 server, or in fsspec's memory."""
    return memory if request.param == "memory" else memory.replace("memory:/", bucket)


@pytest.fixture(scope="module")
def rows(sound: Path) -> Rows:
    """All of the small store's train split."""
    return ShardStore.open(sound).split("train").read_rows(0, 28)


def assert_rows(location: str | Location, expected: Rows) -> None:
    found = ShardStore.open(location).split("train").read_rows(0, 28)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_it_is_a_location(url: str) -> None:
    place = open_location(url)
    assert isinstance(place, RemoteLocation)
    assert place.sizes() == {} and place.size("a/b") is None and place.claims() == []
    place.write("a/b", b"one")
    place.write("a/b", b"other")
    assert place.read("a/b") == b"other" and place.size("a/b") == 5
    assert place.sizes("a") == {"a/b": 5}
    assert abs(place.written_at("a")["a/b"] - time.time()) < 3600  # UTC or not, in seconds or not
    place.delete("a/b")
    place.delete("a/b")
    with pytest.raises(FileNotFoundError):
        place.read("a/b")


def test_every_client_has_a_word_of_its_own_for_the_time_of_writing(memory: str) -> None:
    place = RemoteLocation(memory)
    when = datetime.fromtimestamp(7, UTC)
    words = {"LastModified": when, "last_modified": when, "updated": "1970-01-01T00:00:07Z"}
    told = [{word: value} for word, value in {**words, "mtime": 7, "created": 7.0}.items()]
    listed = {f"{place._root}/{i}": info for i, info in enumerate([*told, {}])}
    place._files = SimpleNamespace(invalidate_cache=lambda: None, find=lambda *_, **__: listed)
    assert place.written_at("") == dict.fromkeys("01234", 7.0)


def test_a_store_is_written_read_and_streamed_as_a_local_one(url: str, sound: Path, rows: Rows) -> None:
    writer, place = cases.write_store(url), open_location(url)
    assert {name: place.read(name) for name in place.sizes()} == cases.file_bytes(sound)
    assert writer.is_complete() and verify(url) == []
    assert_rows(url, rows)
    streams = [
        ShardStream(store.split("train"), seed=1, global_batch_size=4, num_workers=1)
        for store in (ShardStore.open(sound), ShardStore.open(url))
    ]
    for ours, theirs, _ in zip(*streams, range(10), strict=False):
        assert ours.row_ids.tolist() == theirs.row_ids.tolist()
        assert ours.arrays["tokens"].equal(theirs.arrays["tokens"])


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_at_the_url_is_never_read(url: str, tmp_path: Path, damage: str) -> None:
    cases.write_store(url)
    place, name = open_location(url), "train/entry_gumbels/c/1/0/0"
    data = place.read(name)
    if damage == "missing":
        place.delete(name)
    else:
        place.write(name, flipped(data, 4 * len(data)) if damage == "flipped" else data[:-1])
    cached = RemoteLocation(url, cache=FileCache(tmp_path))
    reader = ShardStore.open(cached).split("train")
    reader.read_rows(0, 8)
    with pytest.raises(IntegrityError, match=r"train shard 1 \(rows 8 to 15\)"):
        reader.read_rows(8, 16)
    assert [problem.file for problem in verify(url)] == [name]
    writer = cases.open_writer(url)
    shard = ShardRange("train", 1, 8, 16)
    writer.location.delete("ledger/train/000001.json")  # what a re-run does for a bad shard
    writer.write(shard, cases.make_arrays(cases.make_manifest(), shard))
    assert verify(url) == [] and reader.read_rows(8, 16)["tokens"].shape == (8, 6)


def test_mistakes_are_named(bucket: str) -> None:
    with pytest.raises(UsageError, match="no store there"):
        ShardStore.open(f"{bucket}/nothing")
    for act in (cases.open_writer, ShardStore.open, verify):
        with pytest.raises(GdistillError, match=r"cannot \w+ the remote store.*check bucket"):
            act("s3://no-such-bucket/store")
    # A client of its own, or fsspec would hand out the one that knows the server.
    closed = {"endpoint_url": "http://127.0.0.1:9"}
    closed |= {"config_kwargs": {"retries": {"max_attempts": 1}}}
    with pytest.raises(GdistillError, match="cannot read the remote store"):
        RemoteLocation("s3://bucket/store", storage_options=closed).read("manifest.json")


CLAIM = "train-000000"
CLAIM_FILE = f".claims/{CLAIM}"


def plant(place: RemoteLocation, **fields: object) -> bytes:
    """A claim's object, of a process of another machine where nothing else is said."""
    elsewhere = {"host": "another.example", "pid": 1, "id": "x", "renewed": time.time()}
    data = json.dumps({**elsewhere, **fields}).encode()
    place.write(CLAIM_FILE, data)
    return data


def can_take(place: Location) -> bool:
    with place.claim(CLAIM, wait=False) as mine:
        return mine


def test_a_claim_excludes_others_until_released(url: str) -> None:
    ours, theirs = RemoteLocation(url), open_location(url)
    with ours.claim(CLAIM, wait=False) as mine:
        assert mine and theirs.claims() == [CLAIM] and theirs.sizes() == {}
        assert not can_take(theirs)
    assert can_take(theirs) and ours.claims() == []
    with ours.claim(CLAIM, wait=False):
        plant(ours)  # we were too slow
    assert theirs.claims() == [CLAIM], "it is left to its new holder"


def test_a_claim_no_longer_renewed_is_void(url: str) -> None:
    place = RemoteLocation(url, lease_seconds=0.4)
    plant(place, renewed=time.time() + 3600)
    assert not can_take(place)
    for ago, is_void in ((60, False), (300, True)):
        plant(place, renewed=time.time() - ago)
        assert can_take(open_location(url)) == is_void, "two minutes, unless told"
    for odd in (b"", b"[]", b'{"renewed": "now"}'):
        place.write(CLAIM_FILE, odd)
        assert can_take(place), "no claim that any version of ours wrote"
    plant(place, renewed=time.time() - 1)
    with place.claim(CLAIM, wait=True) as mine:
        assert mine
        renewals: set[bytes] = set()
        while len(renewals) < 3:
            time.sleep(0.02)
            renewals.add(place.read(CLAIM_FILE))
        assert not can_take(RemoteLocation(url))


def num_holders(places: list[RemoteLocation]) -> int:
    """How many get the claim of those that try at once and let go when all have tried."""
    together = Barrier(len(places))

    def try_to_hold(place: RemoteLocation) -> bool:
        together.wait()
        with place.claim(CLAIM, wait=False) as mine:
            together.wait()
            return mine

    with ThreadPoolExecutor(len(places)) as pool:
        return sum(pool.map(try_to_hold, places))


def test_one_process_takes_over_a_void_claim(url: str) -> None:
    place = RemoteLocation(url)
    for round_ in range(5):
        plant(place, id=str(round_), renewed=time.time() - 1e6)
        assert num_holders([RemoteLocation(url) for _ in range(6)]) == 1
        assert place.claims() == [] and open_location(f"{url}/.claims").sizes() == {}
    void = plant(place, renewed=time.time() - 1e6)
    place.write(f"{CLAIM_FILE}~x", void.replace(b'"x"', b'"y"'))  # a takeover that was cut short
    with place.claim(CLAIM, wait=False) as mine:
        assert mine and place.claims() == [CLAIM]
    assert place.claims() == []


class LookThenWrite(MemoryFileSystem):
    """A client that can only look whether a file is there, and write then, as webhdfs and ftp."""

    protocol = "lookthenwrite"
    looked: ClassVar[Barrier]

    def pipe_file(self, path, value, mode="overwrite", **kwargs) -> None:
        if mode == "create":
            there = self.exists(path)
            self.looked.wait()
            if there:
                raise FileExistsError(path)
        super().pipe_file(path, value)


def test_one_process_gets_a_claim_even_where_creation_is_not_exclusive(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.store.remote.SETTLE_SECONDS", 0.3)
    LookThenWrite.looked = Barrier(4)
    places = [RemoteLocation(memory) for _ in range(4)]
    for place in places:
        place._files = LookThenWrite()
    assert num_holders(places) == 1
    assert open_location(memory).claims() == []


def test_a_claim_let_go_of_in_between_is_not_overwritten(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, other = RemoteLocation(url), RemoteLocation(url)
    with other.claim(CLAIM, wait=False):
        # Gone when looked at, then retaken.
        monkeypatch.setattr(place._leases, "_held", lambda _: None)
        assert not can_take(place)
    assert other.claims() == []


def test_a_claim_taken_over_meanwhile_is_not_taken_over_again(memory: str) -> None:
    place = RemoteLocation(memory)
    void = json.loads(plant(place, renewed=1.0))
    theirs = plant(place, id="theirs")  # since we looked and found ``void``
    assert not place._leases._take_over(CLAIM_FILE, void, {**this_process(), "id": "ours"})
    assert place.read(CLAIM_FILE) == theirs and place.claims() == [CLAIM]


class Released(Event):
    """An event that has come when it is waited for the ``after``-th time."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.pauses = after, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return len(self.pauses) >= self.after


def test_a_renewal_leaves_the_claim_of_another_as_it_is(memory: str) -> None:
    """And between two less than half of a lease passes: one may fail."""
    place = RemoteLocation(memory, lease_seconds=80.0)
    for owner, renewed in (("other", False), ("ours", True)):
        claim, released = plant(place, id=owner, renewed=1.0), Released(2)
        place._leases._renew(CLAIM_FILE, {"id": "ours"}, released)
        found = place.read(CLAIM_FILE)
        assert (found != claim) == renewed and json.loads(found)["id"] == owner
        assert max(released.pauses) < 40.0


def _hold(url: str, held: str) -> None:
    with open_location(url).claim(CLAIM, wait=False):
        Path(held).touch()
        time.sleep(60)


def test_the_claim_of_a_killed_process_is_void(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/killed"
    process = get_context("spawn").Process(target=_hold, args=(url, str(tmp_path / "held")))
    process.start()
    while not (tmp_path / "held").exists():
        assert process.is_alive()
        time.sleep(0.05)
    assert not can_take(open_location(url))
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert can_take(open_location(url))


def test_the_cache_serves_what_it_has_and_fetches_a_spoilt_copy_again(memory: str, tmp_path: Path, rows: Rows) -> None:
    cases.write_store(memory)
    place = RemoteLocation(memory, cache=FileCache(tmp_path))
    assert_rows(place, rows)
    for copy in tmp_path.iterdir():
        copy.write_bytes(flipped(copy.read_bytes(), copy.stat().st_size // 3 * 8))
    assert_rows(place, rows)
    for name in place.sizes("train"):
        if "/c/" in name:
            place.delete(name)
    assert_rows(place, rows)


def test_eviction_keeps_to_its_size_and_to_its_own_copies(memory: str, tmp_path: Path, rows: Rows) -> None:
    cases.write_store(memory)
    before = open_location(memory).sizes()
    (tmp_path / "the only copy.txt").write_text("of something else")
    assert_rows(RemoteLocation(memory, cache=FileCache(tmp_path, max_bytes=400)), rows)
    copies = [path for path in tmp_path.iterdir() if path.suffix != ".txt"]
    assert 0 < sum(path.stat().st_size for path in copies) <= 400
    assert (tmp_path / "the only copy.txt").read_text() == "of something else"
    assert open_location(memory).sizes() == before


def test_the_cache_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GDISTILL_CACHE", "~/cache")
    monkeypatch.setenv("GDISTILL_CACHE_BYTES", "1000")
    assert FileCache.default() == FileCache(tmp_path / "cache", 1000)
    monkeypatch.setenv("GDISTILL_CACHE_BYTES", "0")
    assert FileCache.default() == FileCache(tmp_path / "cache", 0)
    for wrong in ("1 GB", "\N{SUPERSCRIPT TWO}", "-1", "", "9" * 5000):
        monkeypatch.setenv("GDISTILL_CACHE_BYTES", wrong)
        with pytest.raises(UsageError, match="GDISTILL_CACHE_BYTES"):
            FileCache.default()


def content(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


def put(cache: FileCache, data: bytes) -> bool:
    """Ask for a copy; whether it had to be downloaded."""
    downloads = []

    def download() -> bytes:
        downloads.append(data)
        return data

    assert content(cache.open(FileRecord.of(data), download)) == data
    return bool(downloads)


def copy_of(cache: FileCache, data: bytes) -> Path:
    return cache.folder / FileRecord.of(data).sha256


def put_earlier(cache: FileCache, *contents: bytes) -> None:
    """One after the other, all of them before now."""
    for ago, data in zip(range(900, 0, -100), contents, strict=False):
        assert put(cache, data)
        os.utime(copy_of(cache, data), (time.time() - ago, time.time() - ago))


def test_the_cache_refuses_another_content_and_a_copy_of_another_size(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    with pytest.raises(ValueError, match="another hash"):
        cache.open(FileRecord.of(b"right"), lambda: b"wrong")
    assert list(tmp_path.iterdir()) == []
    copy_of(cache, b"right").write_bytes(b"rig")
    assert put(cache, b"right") and not put(cache, b"right")


def test_what_a_killed_download_left_is_removed_when_old(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, max_bytes=100)
    names = (f".{'0' * 64}.{'1' * 32}.tmp", f".{'2' * 64}.{'3' * 32}.tmp", "notes.tmp")
    died, running, strange = (tmp_path / name for name in names)
    for path in (died, running, strange):
        path.write_bytes(bytes(90))
    for path, age in ((died, 25), (strange, 25), (running, 23)):  # hours
        os.utime(path, (time.time() - 3600 * age,) * 2)
    put(cache, b"first")
    assert set(tmp_path.iterdir()) == {running, strange, copy_of(cache, b"first")}


def test_a_download_killed_on_the_way_is_never_taken_for_a_copy(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from shards.store.remote import FileCache
from shards.atomic import FileRecord
os.replace = lambda *_: os.kill(os.getpid(), 9)
FileCache(Path({str(tmp_path)!r})).open(FileRecord.of(b"content"), lambda: b"content")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    cache = FileCache(tmp_path, max_bytes=10)
    assert put(cache, b"content")
    assert list(tmp_path.iterdir()) == [copy_of(cache, b"content")]


def test_the_copy_unused_for_longest_goes_first(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, max_bytes=15)
    one, two, three, four = b"one..", b"two..", b"three", b"four."
    put_earlier(cache, one, two, three)
    assert not put(cache, one), "used now"
    assert put(cache, four), "in the place of two"
    assert [put(cache, data) for data in (one, three, four)] == [False] * 3
    assert put(cache, two)


def test_a_copy_in_use_may_be_evicted(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, max_bytes=0)
    first = cache.open(FileRecord.of(b"first"), lambda: b"first")
    assert put(cache, b"other") and not copy_of(cache, b"first").exists()
    assert content(first) == b"first"


@pytest.mark.parametrize("max_bytes", [None, 100])
def test_a_disk_nearly_full_is_kept_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int | None
) -> None:
    cache = FileCache(tmp_path, max_bytes)
    put_earlier(cache, b"older", b"newer")
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
