"""A store in a folder: listings beside writers, claims and forks, what is synced and when."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from shards.atomic import discard_leftovers, file_claim, write_bytes_atomic
from shards.errors import GdistillError
from shards.store.location import LocalLocation
from tests.shards.store_cases import write_store


@pytest.fixture
def place(tmp_path: Path) -> LocalLocation:
    place = LocalLocation(tmp_path)
    for name in ("train/a", "train/b", "train/c/d"):
        place.write(name, b"xyz")
    return place


def test_a_listing_beside_a_writer_misses_what_is_gone_and_nothing_else(
    place: LocalLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    lstat = Path.lstat

    def renamed_meanwhile(path: Path) -> os.stat_result:
        if path.name == "b":
            raise FileNotFoundError(path)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", renamed_meanwhile)
    assert place.sizes() == {"train/a": 3, "train/c/d": 3}
    assert place.sizes("nowhere") == {}


def test_what_cannot_be_listed_does_not_look_empty(place: LocalLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuses(path: str):
        if str(path).endswith("/c"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuses)
    with pytest.raises(GdistillError, match="cannot list"):
        place.sizes()


def test_a_forked_child_does_not_keep_its_parents_claim(tmp_path: Path) -> None:
    """The child outlives the holder: what it inherited must not hold the claim."""
    held, let_go = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        with file_claim(tmp_path / "claims/one", wait=False):
            if os.fork() == 0:  # a data loader's worker, say
                os.write(held[1], b"x")
                os.read(let_go[0], 1)
                os._exit(0)
            os.read(os.dup(held[0]), 0)
            os._exit(9)  # dies without release
    os.waitpid(holder, 0)
    assert os.read(held[0], 1) == b"x"
    try:
        with file_claim(tmp_path / "claims/one", wait=False) as mine:
            assert mine
    finally:
        os.write(let_go[1], b"x")


def test_a_forked_child_that_leaves_the_claim_does_not_release_it(tmp_path: Path) -> None:
    path = tmp_path / "claims/one"
    with ExitStack() as stack:
        assert stack.enter_context(file_claim(path, wait=False))
        child = os.fork()
        if child == 0:
            with file_claim(path, wait=False) as also_mine:
                try:
                    stack.close()
                finally:
                    os._exit(3 if also_mine else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert path.exists()
        with file_claim(path, wait=False) as other:
            assert not other
    assert not path.exists()


def test_a_lock_on_a_file_that_was_removed_is_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder removes it on release, when who waits has a descriptor of it already."""
    path, flock, removed = tmp_path / "claims/one", fcntl.flock, list[Path]()

    def removed_meanwhile(descriptor: int, kind: int) -> None:
        if not removed:
            removed.append(path)
            path.unlink()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with file_claim(path, wait=True) as mine, file_claim(path, wait=False) as other:
        assert mine and not other
    assert removed and not path.parent.exists()


def test_a_peek_is_bytes_or_nothing(place: LocalLocation) -> None:
    place.write("a", b"0123456789")
    assert place.peek("a", 7, 3) == b"789" and place.peek("a", -5, 3) == b"012"
    assert place.peek("b", 0, 3) == b""


def test_contents_are_on_disk_before_their_name_and_names_before_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int, int, str]] = []
    """Syncs and renames, with what each file was then: what, inode, size, its new name."""
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        status = os.fstat(descriptor)
        events.append(("sync", status.st_ino, status.st_size, ""))
        fsync(descriptor)

    def renamed(source: str, target: str) -> None:
        status = os.stat(source)
        events.append(("rename", status.st_ino, status.st_size, str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_store(tmp_path / "store")
    renames = [index for index, event in enumerate(events) if event[0] == "rename"]
    assert len(renames) > 30
    for index in renames:
        _, inode, size, target = events[index]
        before = [event[:3] for event in events[:index]]
        assert ("sync", inode, size) in before, f"{target} was named before its bytes were safe"
        folder = os.stat(Path(target).parent).st_ino
        later = [event[:2] for event in events[index + 1 :]]
        assert ("sync", folder) in later, f"{target}'s name was never made safe"
        between = later[: later.index(("sync", folder))]
        assert "rename" not in [what for what, _ in between], "the next file came first"


def test_leftovers_of_one_file_and_of_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a[1]"
    ours = tmp_path / f".a[1].{'0' * 32}.tmp"
    names = (f".a1.{'0' * 32}.tmp", f".b.{'0' * 32}.tmp", ".a[1].notes.tmp", "a[1].tmp")
    others = [tmp_path / name for name in names]
    for left in (ours, *others):
        left.write_bytes(b"half")
    write_bytes_atomic(path, b"whole")
    discard_leftovers(path)
    assert not ours.exists() and path.read_bytes() == b"whole"
    assert all(other.exists() for other in others)
