"""Stores at URLs: a real S3 server on loopback, claims, the local cache, clear errors."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer

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
    assert isinstance(place, Location)
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


def test_an_interrupted_write_is_resumed(url: str, tmp_path: Path) -> None:
    writer = open_writer(url)
    first, second = writer.pending("train")[:2]
    writer.write(first, make_arrays(writer.manifest, first))
    assert second in writer.pending("train") and first not in writer.pending("train")
    with pytest.raises(IntegrityError, match="not complete"):
        ShardStore.open(url)
    write_store(url)
    write_store(tmp_path / "store")
    assert remote_bytes(url) == file_bytes(tmp_path / "store")
    with pytest.raises(UsageError, match="seed"):
        open_writer(url, seed=8)


def test_a_claim_excludes_others_until_released(url: str) -> None:
    ours, theirs = open_location(url), open_location(url)
    with ours.claim("train-000000", wait=False) as mine:
        assert mine and theirs.claims() == ["train-000000"] and theirs.sizes() == {}
        with theirs.claim("train-000000", wait=False) as also_mine:
            assert not also_mine
    with theirs.claim("train-000000", wait=False) as mine:
        assert mine
    assert ours.claims() == []


def test_a_claim_no_longer_renewed_is_void(url: str) -> None:
    place = RemoteLocation(url, lease_seconds=0.4)
    elsewhere = {"host": "another.example", "pid": 1, "id": "x", "renewed": time.time() + 3600}
    place.write(".claims/train-000000", json.dumps(elsewhere).encode())
    with place.claim("train-000000", wait=False) as mine:
        assert not mine
    elsewhere["renewed"] = time.time() - 1
    place.write(".claims/train-000000", json.dumps(elsewhere).encode())
    with place.claim("train-000000", wait=True) as mine:
        assert mine
        renewals = {_renewed(place)}
        while len(renewals) < 3:
            time.sleep(0.02)
            renewals.add(_renewed(place))
        with RemoteLocation(url).claim("train-000000", wait=False) as also_mine:
            assert not also_mine


def _renewed(place: RemoteLocation) -> float:
    return json.loads(place.read(".claims/train-000000"))["renewed"]


def _count_holders(place: RemoteLocation, together: Barrier, holders: list[int]) -> None:
    together.wait()
    with place.claim("train-000000", wait=False) as mine:
        if mine:
            holders.append(1)
        together.wait()  # nobody lets go before all have tried


def test_one_process_takes_over_a_void_claim(url: str) -> None:
    elsewhere = {"host": "another.example", "pid": 1, "renewed": time.time() - 1e6}
    for round_ in range(5):
        place = RemoteLocation(url)
        place.write(".claims/train-000000", json.dumps({**elsewhere, "id": str(round_)}).encode())
        together, holders = Barrier(6), list[int]()
        threads = [
            Thread(target=_count_holders, args=(RemoteLocation(url), together, holders))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert holders == [1]
        assert place.claims() == [] and place.sizes(".claims") == {}


def test_a_claim_let_go_of_in_between_is_not_overwritten(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, other = RemoteLocation(url), RemoteLocation(url)
    with other.claim("train-000000", wait=False):
        monkeypatch.setattr(
            place._leases, "_held", lambda _: None
        )  # gone when looked at, then retaken
        with place.claim("train-000000", wait=False) as mine:
            assert not mine
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
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert holders == [1]
    assert open_location("memory://look-then-write").claims() == []


def test_a_takeover_cut_short_does_not_block(url: str) -> None:
    place = RemoteLocation(url)
    void = {"host": "another.example", "pid": 1, "id": "x", "renewed": time.time() - 1e6}
    place.write(".claims/train-000000", json.dumps(void).encode())
    place.write(".claims/train-000000~x", json.dumps({**void, "id": "y"}).encode())
    with place.claim("train-000000", wait=False) as mine:
        assert mine and place.claims() == ["train-000000"]
    assert place.claims() == []


def test_who_was_too_slow_leaves_the_claim_to_its_new_holder(url: str) -> None:
    place = RemoteLocation(url)
    other = {"host": "another.example", "pid": 1, "id": "x", "renewed": time.time()}
    with place.claim("train-000000", wait=False) as mine:
        assert mine
        place.write(".claims/train-000000", json.dumps(other).encode())
    assert place.claims() == ["train-000000"]


class Once(Event):
    """An event that is waited for in vain once, and has come then."""

    waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return self.waits > 1


def test_a_renewal_leaves_the_claim_of_another_as_it_is() -> None:
    place = RemoteLocation(f"memory://renewal-{time.monotonic_ns()}")
    for owner, renewed in (("other", False), ("ours", True)):
        claim = json.dumps({"id": owner, "renewed": 1.0}).encode()
        place.write(".claims/one", claim)
        place._leases._renew(".claims/one", {"id": "ours"}, Once())
        assert (place.read(".claims/one") != claim) == renewed
        assert json.loads(place.read(".claims/one"))["id"] == owner


def test_a_claim_taken_over_meanwhile_is_not_taken_over_again() -> None:
    place = RemoteLocation(f"memory://takeover-{time.monotonic_ns()}")
    void = {"host": "another.example", "pid": 1, "id": "x", "renewed": 1.0}
    theirs = json.dumps({"id": "theirs", "renewed": time.time()}).encode()
    place.write(".claims/one", theirs)  # since we looked and found ``void``
    owner = {**this_process(), "id": "ours"}
    assert not place._leases._take_over(".claims/one", void, owner)
    assert place.read(".claims/one") == theirs and place.claims() == ["one"]


def _hold(url: str, held: str) -> None:
    with open_location(url).claim("train-000001", wait=False):
        Path(held).touch()
        time.sleep(60)


def test_the_claim_of_a_killed_process_is_void(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/killed"
    process = get_context("spawn").Process(target=_hold, args=(url, str(tmp_path / "held")))
    process.start()
    while not (tmp_path / "held").exists():
        assert process.is_alive()
        time.sleep(0.05)
    with open_location(url).claim("train-000001", wait=False) as mine:
        assert not mine
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with open_location(url).claim("train-000001", wait=False) as mine:
        assert mine


def test_the_claim_of_another_container_of_this_host_name_is_not_void(url: str) -> None:
    ended = get_context("spawn").Process()
    ended.start()
    ended.join()
    elsewhere = {**this_process(), "pid": ended.pid, "id": "x", "renewed": time.time()}
    place = RemoteLocation(url)
    for space in ("another boot pid:[1]", None):
        claim = {**elsewhere, "pid_space": space}
        place.write(".claims/train-000000", json.dumps(claim).encode())
        with place.claim("train-000000", wait=False) as mine:
            assert not mine


def test_a_process_id_given_anew_holds_no_claim(url: str) -> None:
    place = RemoteLocation(url)
    before = {**this_process(), "id": "x", "renewed": time.time()}
    place.write(".claims/train-000000", json.dumps(before).encode())
    with place.claim("train-000000", wait=False) as mine:
        assert not mine
    place.write(".claims/train-000000", json.dumps({**before, "started": "1"}).encode())
    with place.claim("train-000000", wait=False) as mine:
        assert mine


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
