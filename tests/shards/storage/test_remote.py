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
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier, Event, Thread
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
from tests.shards.store_cases import (
    file_bytes,
    make_arrays,
    make_manifest,
    open_writer,
    write_store,
)


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


@pytest.fixture(params=["s3", "memory"])
def url(request: pytest.FixtureRequest, bucket: str) -> str:
    """A fresh folder at an S3 server, or in fsspec's memory."""
    name = f"{request.node.name}-{time.monotonic_ns()}".replace("[", "-").replace("]", "")
    return f"{bucket}/{name}" if request.param == "s3" else f"memory://{name}"


def remote_bytes(url: str) -> dict[str, bytes]:
    place = open_location(url)
    return {name: place.read(name) for name in place.sizes()}


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
    with pytest.raises(UsageError, match="leaves the store"):
        place.read("../a")


def test_the_bytes_are_those_of_a_local_store(url: str, tmp_path: Path) -> None:
    writer = write_store(url)
    write_store(tmp_path / "store")
    assert remote_bytes(url) == file_bytes(tmp_path / "store")
    assert writer.is_complete() and verify(url) == []


def test_it_is_read_and_streamed_as_a_local_store(url: str, tmp_path: Path) -> None:
    write_store(url)
    write_store(tmp_path / "store")
    here, there = (ShardStore.open(place) for place in (tmp_path / "store", url))
    for index in range(here.split("train").num_chunks):
        expected = here.split("train").read_chunk(index)
        found = there.split("train").read_chunk(index)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    streams = [
        ShardStream(store.split("train"), seed=1, global_batch_size=4, num_workers=1)
        for store in (here, there)
    ]
    for ours, theirs, _ in zip(*streams, range(10), strict=False):
        assert ours.row_ids.tolist() == theirs.row_ids.tolist()
        assert ours.arrays["tokens"].equal(theirs.arrays["tokens"])


CLAIM = "train-000000"


def plant(place: RemoteLocation, **fields: object) -> bytes:
    """A claim's object, of a process of another machine where nothing else is said."""
    elsewhere = {"host": "another.example", "pid": 1, "id": "x", "renewed": time.time()}
    data = json.dumps({**elsewhere, **fields}).encode()
    place.write(f".claims/{CLAIM}", data)
    return data


def can_take(place: Location) -> bool:
    with place.claim(CLAIM, wait=False) as mine:
        return mine


def test_a_claim_excludes_others_until_released(url: str) -> None:
    ours, theirs = open_location(url), open_location(url)
    with ours.claim(CLAIM, wait=False) as mine:
        assert mine and theirs.claims() == [CLAIM] and theirs.sizes() == {}
        assert not can_take(theirs)
    assert can_take(theirs) and ours.claims() == []


def test_a_claim_no_longer_renewed_is_void(url: str) -> None:
    place = RemoteLocation(url, lease_seconds=0.4)
    plant(place, renewed=time.time() + 3600)
    assert not can_take(place)
    plant(place, renewed=time.time() - 1)
    with place.claim(CLAIM, wait=True) as mine:
        assert mine
        renewals: set[bytes] = set()
        while len(renewals) < 3:
            time.sleep(0.02)
            renewals.add(place.read(f".claims/{CLAIM}"))
        assert not can_take(RemoteLocation(url))


def run_all(threads: list[Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _count_holders(place: RemoteLocation, together: Barrier, holders: list[int]) -> None:
    together.wait()
    with place.claim(CLAIM, wait=False) as mine:
        if mine:
            holders.append(1)
        together.wait()  # nobody lets go before all have tried


def test_one_process_takes_over_a_void_claim(url: str) -> None:
    for round_ in range(5):
        place = RemoteLocation(url)
        plant(place, id=str(round_), renewed=time.time() - 1e6)
        together, holders = Barrier(6), list[int]()
        threads = [
            Thread(target=_count_holders, args=(RemoteLocation(url), together, holders))
            for _ in range(6)
        ]
        run_all(threads)
        assert holders == [1]
        assert place.claims() == [] and place.sizes(".claims") == {}


def test_a_claim_let_go_of_in_between_is_not_overwritten(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = RemoteLocation(url), RemoteLocation(url)
    with other.claim(CLAIM, wait=False):
        # Gone when looked at, then retaken.
        monkeypatch.setattr(place._leases, "_held", lambda _: None)
        assert not can_take(place)
    assert other.claims() == []


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_processes = 4
    LookThenWrite.looked = Barrier(num_processes)
    monkeypatch.setattr("shards.store.remote.SETTLE_SECONDS", 0.3)
    start, holders, threads = Barrier(num_processes), list[int](), list[Thread]()
    for _ in range(num_processes):
        place = RemoteLocation("memory://look-then-write")
        place._files = LookThenWrite()
        threads.append(Thread(target=_count_holders, args=(place, start, holders)))
    run_all(threads)
    assert holders == [1]
    assert open_location("memory://look-then-write").claims() == []


def test_a_takeover_cut_short_does_not_block(url: str) -> None:
    place = RemoteLocation(url)
    void = plant(place, renewed=time.time() - 1e6)
    place.write(f".claims/{CLAIM}~x", void.replace(b'"x"', b'"y"'))
    with place.claim(CLAIM, wait=False) as mine:
        assert mine and place.claims() == [CLAIM]
    assert place.claims() == []


def test_who_was_too_slow_leaves_the_claim_to_its_new_holder(url: str) -> None:
    place = RemoteLocation(url)
    with place.claim(CLAIM, wait=False) as mine:
        assert mine
        plant(place)
    assert place.claims() == [CLAIM]


class Once(Event):
    """An event that is waited for in vain once, and has come then."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return self.waits > 1


def test_a_renewal_leaves_the_claim_of_another_as_it_is() -> None:
    place = RemoteLocation(f"memory://renewal-{time.monotonic_ns()}")
    for owner, renewed in (("other", False), ("ours", True)):
        claim = plant(place, id=owner, renewed=1.0)
        place._leases._renew(f".claims/{CLAIM}", {"id": "ours"}, Once())
        found = place.read(f".claims/{CLAIM}")
        assert (found != claim) == renewed and json.loads(found)["id"] == owner


def test_a_claim_taken_over_meanwhile_is_not_taken_over_again() -> None:
    place = RemoteLocation(f"memory://takeover-{time.monotonic_ns()}")
    void = json.loads(plant(place, renewed=1.0))
    theirs = plant(place, id="theirs")  # since we looked and found ``void``
    owner = {**this_process(), "id": "ours"}
    assert not place._leases._take_over(f".claims/{CLAIM}", void, owner)
    assert place.read(f".claims/{CLAIM}") == theirs and place.claims() == [CLAIM]


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


def test_a_claim_is_void_only_where_it_is_certain_that_its_process_has_ended(url: str) -> None:
    ended = get_context("spawn").Process()
    ended.start()
    ended.join()
    place = RemoteLocation(url)
    for fields, is_void in (
        ({"pid": ended.pid, "pid_space": "another boot pid:[1]"}, False),
        ({"pid": ended.pid, "pid_space": None}, False),
        ({}, False),
        ({"started": "1"}, True),  # an id given anew
    ):
        plant(place, **{**this_process(), **fields})
        assert can_take(place) == is_void, fields


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_at_the_url_is_never_read(url: str, damage: str) -> None:
    write_store(url)
    place = open_location(url)
    name = "train/entry_gumbels/c/1/0/0"
    data = bytearray(place.read(name))
    data[len(data) // 2] ^= 1
    if damage == "missing":
        place.delete(name)
    else:
        place.write(name, bytes(data) if damage == "flipped" else bytes(data[:-1]))
    cache = FileCache(Path(os.environ["GDISTILL_CACHE"]) / f"{time.monotonic_ns()}")
    reader = ShardStore.open(RemoteLocation(url, cache=cache)).split("train")
    reader.read_rows(0, 8)
    with pytest.raises(IntegrityError, match=r"train shard 1 \(rows 8 to 15\)"):
        reader.read_rows(8, 16)
    assert [problem.file for problem in verify(url)] == [name]
    writer = open_writer(url)
    shard = ShardRange("train", 1, 8, 16)
    writer.location.delete("ledger/train/000001.json")  # what a re-run does for a bad shard
    writer.write(shard, make_arrays(make_manifest(), shard))
    assert verify(url) == [] and reader.read_rows(8, 16)["tokens"].shape == (8, 6)


def test_mistakes_are_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no store there"):
        ShardStore.open(f"{bucket}/nothing")
    for act in (open_writer, ShardStore.open, verify):
        with pytest.raises(GdistillError, match=r"cannot \w+ the remote store.*check bucket"):
            act("s3://no-such-bucket/store")
    with pytest.raises(UsageError, match="unknown kind"):
        open_location("nonsense://store")
    # A client of its own, or fsspec would hand out the one that knows the server.
    closed = {
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": {"retries": {"max_attempts": 1}},
    }
    with pytest.raises(GdistillError, match="cannot read the remote store"):
        RemoteLocation("s3://bucket/store", storage_options=closed).read("manifest.json")


def test_a_claim_outlives_a_renewal_that_fails() -> None:
    """Between two renewals less than half of a lease passes: one may fail."""
    pauses: list[float] = []

    class Released(Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return True

    place = RemoteLocation("memory://renewals", lease_seconds=80.0)
    place._leases._renew("mine", this_process(), Released())
    assert pauses and max(pauses) < 40.0


@pytest.fixture
def memory() -> str:
    """A fresh folder in fsspec's memory."""
    return f"memory://cache-{time.monotonic_ns()}"


def content(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


def test_the_cache_serves_what_it_has(memory: str, tmp_path: Path) -> None:
    write_store(memory)
    place = RemoteLocation(memory, cache=FileCache(tmp_path / "cache"))
    before = ShardStore.open(place).split("train").read_rows(0, 28)
    for name in place.sizes("train"):
        if "/c/" in name:
            place.delete(name)
    after = ShardStore.open(place).split("train").read_rows(0, 28)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_spoilt_copy_is_fetched_again(memory: str, tmp_path: Path) -> None:
    write_store(memory)
    reader = ShardStore.open(RemoteLocation(memory, cache=FileCache(tmp_path))).split("train")
    expected = reader.read_rows(0, 28)
    for copy in tmp_path.iterdir():
        data = bytearray(copy.read_bytes())
        data[len(data) // 3] ^= 1
        copy.write_bytes(data)
    again = ShardStore.open(RemoteLocation(memory, cache=FileCache(tmp_path))).split("train")
    found = again.read_rows(0, 28)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_eviction_keeps_to_its_size_and_to_its_own_copies(memory: str, tmp_path: Path) -> None:
    write_store(memory)
    before = open_location(memory).sizes()
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "the only copy.txt").write_text("of something else")
    place = RemoteLocation(memory, cache=FileCache(folder, max_bytes=400))
    rows = ShardStore.open(place).split("train").read_rows(0, 28)
    write_store(tmp_path / "store")
    expected = ShardStore.open(tmp_path / "store").split("train").read_rows(0, 28)
    assert all(np.array_equal(rows[name], expected[name]) for name in expected)
    copies = [path for path in folder.iterdir() if path.suffix != ".txt"]
    assert 0 < sum(path.stat().st_size for path in copies) <= 400
    assert (folder / "the only copy.txt").read_text() == "of something else"
    assert open_location(memory).sizes() == before


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
from shards.atomic import FileRecord
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
    memory: str, tmp_path: Path
) -> None:
    write_store(memory)
    expected = ShardStore.open(memory).split("train").read_rows(0, 28)
    wrong = []

    def read(seed: int) -> None:
        reader = ShardStore.open(place).split("train")
        for index in np.random.default_rng(seed).permutation(14) % reader.num_chunks:
            for name, rows in reader.read_chunk(int(index)).items():
                if not np.array_equal(rows, expected[name][4 * index : 4 * index + 4]):
                    wrong.append((index, name))

    place = RemoteLocation(memory, cache=FileCache(tmp_path, max_bytes=300))
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
