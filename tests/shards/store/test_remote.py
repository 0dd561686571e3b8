"""Stores at URLs: a real S3 server on loopback, claims, the local cache, clear errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from shards.store.remote import FileCache, RemoteLocation
from shards.store.store import ShardStore
from shards.store.verification import verify
from shards.stream.stream import ShardStream
from tests.shards import store_cases as cases
from tests.shards.store_cases import flipped

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
    place = open_location(f"{url}/")
    assert isinstance(place, RemoteLocation) and place.url == url
    assert place.sizes() == {} and place.size("a/b") is None and place.claims() == []
    place.write("a/b", b"one")
    place.write("a/b", b"other")
    assert place.read("a/b") == b"other" and place.size("a/b") == 5
    assert place.sizes("a") == {"a/b": 5}
    RemoteLocation(url, storage_options={"skip_instance_cache": True}).write("a/b", b"from elsewhere")
    assert place.size("a/b") == 14 and place.sizes() == {"a/b": 14}
    place.delete("a/b")
    place.delete("a/b")
    with pytest.raises(FileNotFoundError):
        place.read("a/b")


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
    what = {"flipped": "was altered"}.get(damage, f"is {damage}")
    with pytest.raises(IntegrityError, match=rf"{what} .*{name}: train shard 1 \(rows 8 to 15\)"):
        reader.read_rows(8, 16)
    words = {"flipped": "altered", "truncated": f"{len(data) - 1} bytes, expected {len(data)};", "missing": "missing;"}
    (problem,) = verify(url)
    assert problem.file == name and f"train shard 1 (rows 8 to 15): {words[damage]}" in str(problem)
    writer = cases.open_writer(url)
    shard = ShardRange("train", 1, 8, 16)
    assert (shard in writer.pending("train")) == (damage != "flipped")
    writer.location.delete("ledger/train/000001.json")  # what a re-run does for a bad shard
    writer.write(shard, cases.make_arrays(cases.make_manifest(), shard))
    assert verify(url) == [] and reader.read_rows(8, 16)["tokens"].shape == (8, 6)


def test_mistakes_are_named(bucket: str) -> None:
    with pytest.raises(UsageError, match="no store there"):
        ShardStore.open(f"{bucket}/nothing")
    fsspec.register_implementation("absent", "nosuchpackage.FileSystem")
    with pytest.raises(UsageError, match=r"absent:// need another package.*pip install"):
        open_location("absent://store")
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
    """A claim's object, of another process."""
    data = json.dumps({"id": "x", "renewed": time.time(), **fields}).encode()
    place.write(CLAIM_FILE, data)
    return data


def can_take(place: Location) -> bool:
    with place.claim(CLAIM, wait=False) as mine:
        return mine


def test_a_claim_excludes_others_until_released(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = RemoteLocation(url), open_location(url)
    with ours.claim(CLAIM, wait=False) as mine:
        assert mine and theirs.claims() == [CLAIM] and theirs.sizes() == {}
        assert not can_take(theirs)
    assert can_take(theirs) and ours.claims() == []
    with ours.claim(CLAIM, wait=False):
        plant(ours)  # we were too slow
    assert theirs.claims() == [CLAIM], "it is left to its new holder"
    ours.delete(CLAIM_FILE)
    with ExitStack() as held:
        held.enter_context(ours.claim(CLAIM, wait=False))
        monkeypatch.setattr("shards.store.remote.time.sleep", lambda _: held.close())
        with theirs.claim(CLAIM, wait=True) as mine:
            assert mine, "who waits gets it in the end"


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


def test_a_void_claim_is_taken_over(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, pauses = RemoteLocation(url), list[float]()

    def overwritten_meanwhile(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            plant(place, id="theirs")

    monkeypatch.setattr("shards.store.remote.time.sleep", overwritten_meanwhile)
    for mine in (False, True):
        plant(place, renewed=time.time() - 1e6)
        assert can_take(place) == mine, "who was overwritten has lost it"
    assert pauses == [1.0, 1.0] and place.claims() == []


class LookThenWrite(MemoryFileSystem):
    """A client that can only look whether a file is there, and write then, as webhdfs and ftp."""

    protocol = "lookthenwrite"
    looked: ClassVar[Barrier]

    def pipe_file(self, path, value, mode="overwrite", **kwargs) -> None:
        if mode == "create":
            assert self.isdir(self._parent(path)), "a folder is made first"
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
    together, places = Barrier(4), [RemoteLocation(memory) for _ in range(4)]

    def holds(place: RemoteLocation) -> bool:
        """All try at once, and let go when all have tried."""
        place._files = LookThenWrite()
        together.wait()
        with place.claim(CLAIM, wait=False) as mine:
            together.wait()
            return mine

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(holds, places)) == 1
    assert open_location(memory).claims() == []


def test_a_claim_let_go_of_in_between_is_not_overwritten(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, other = RemoteLocation(url), RemoteLocation(url)
    with other.claim(CLAIM, wait=False):
        monkeypatch.setattr(place, "_held", lambda _: None)  # gone when looked at, then retaken
        assert not can_take(place)
    assert other.claims() == []


def test_a_renewal_leaves_the_claim_of_another_as_it_is(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And between two less than half of a lease passes: one may fail."""
    place = RemoteLocation(memory, lease_seconds=80.0)
    for owner, renewed in (("other", False), ("ours", True)):
        claim, pauses, answers = plant(place, id=owner, renewed=1.0), list[float](), iter([None, owner])
        monkeypatch.setattr(place, "_holder", lambda _, answers=answers: next(answers) or place.read("nothing"))
        released = Event()
        monkeypatch.setattr(released, "wait", lambda pause, pauses=pauses: pauses.append(pause) or len(pauses) == 3)
        place._renew(CLAIM_FILE, "ours", released)
        found = place.read(CLAIM_FILE)
        assert (found != claim) == renewed and json.loads(found)["id"] == owner
        assert max(pauses) < 40.0


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


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many bytes of the disk's 1,000 are free, of which a twentieth is to stay so."""
    return lambda num: monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1000, free=num))


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


def test_the_cache_refuses_other_contents_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's copy, whose time cannot be set, is as good as ours."""
    cache = FileCache(tmp_path)
    with pytest.raises(ValueError, match="another hash"):
        cache.open(FileRecord.of(b"right"), lambda: b"wrong")
    assert list(tmp_path.iterdir()) == []
    copy_of(cache, b"right").write_bytes(b"rig")
    held = set(os.listdir("/proc/self/fd"))
    assert put(cache, b"right")
    monkeypatch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    assert not put(cache, b"right")
    assert set(os.listdir("/proc/self/fd")) <= held, "every file is closed"


def test_a_disk_nearly_full_is_kept_free_of_what_was_unused_for_longest(
    tmp_path: Path, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for another user's copy that a folder protects; who has a copy open can read on."""
    cache, unlink, hers = FileCache(tmp_path), Path.unlink, copy_of(FileCache(tmp_path), b"hers.")
    put_earlier(cache, b"hers.", b"one..", b"two..", b"three")
    assert not put(cache, b"one.."), "used now"
    opened = cache.open(FileRecord.of(b"two.."), lambda: b"never")
    os.utime(copy_of(cache, b"two.."), (0, 1))

    def protected(path: Path, **options: bool) -> None:
        if path == hers:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", protected)
    free(55)
    assert put(cache, b"four."), "there is room"
    free(50)  # five more would leave 45
    os.utime(hers, (0, 0))
    assert put(cache, b"five.") and not copy_of(cache, b"two..").exists(), "in the place of two"
    assert content(opened) == b"two.."
    assert [put(cache, data) for data in (b"hers.", b"one..", b"three", b"four.")] == [False] * 4


def test_only_old_leftovers_of_downloads_are_removed(tmp_path: Path, free: Callable[[int], None]) -> None:
    names = (f".{'0' * 64}.{'1' * 32}.tmp", f".{'2' * 64}.{'3' * 32}.tmp", "notes.tmp")
    died, running, strange = (tmp_path / name for name in names)
    for path, age in ((died, 25), (running, 23), (strange, 25)):  # hours
        path.write_bytes(bytes(90))
        os.utime(path, (time.time() - 3600 * age,) * 2)
    free(0)
    put(FileCache(tmp_path), b"first")
    assert set(tmp_path.iterdir()) == {running, strange, copy_of(FileCache(tmp_path), b"first")}


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
    assert len(list(tmp_path.iterdir())) == 1 and put(FileCache(tmp_path), b"content")


def test_the_cache_lies_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GDISTILL_CACHE", "~/cache")
    assert FileCache.default().folder == tmp_path / "cache"
    monkeypatch.delenv("GDISTILL_CACHE")
    assert FileCache.default().folder == tmp_path / ".cache/gdistill"
