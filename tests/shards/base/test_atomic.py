"""Atomic files and durable folders: nothing half written, nothing shared, nothing left unsynced."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Barrier, Thread

import pytest

from shards.atomic import (
    append_line,
    exclusive,
    is_held,
    make_folders,
    publish_folder,
    write_bytes_atomic,
    write_json_atomic,
)
from shards.errors import UsageError
from shards.store.location import LocalLocation


def test_writers_of_one_process_id_do_not_meet(tmp_path: Path) -> None:
    # Two containers that share a folder may have the same process id.
    path, start, errors = tmp_path / "config.json", Barrier(2), list[Exception]()

    def write() -> None:
        start.wait()
        for _ in range(100):
            try:
                write_json_atomic(path, {"x": 1})
            except OSError as error:
                errors.append(error)

    threads = [Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [found.name for found in tmp_path.iterdir()] == ["config.json"]


def test_what_a_killed_writer_left_is_no_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # killed: nothing is tidied
        with pytest.raises(KeyboardInterrupt):
            write_bytes_atomic(path, b"half")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".results.json.") and left.suffix == ".tmp"
    assert not path.exists() and not list(tmp_path.glob("*.json"))
    write_bytes_atomic(path, b"whole")
    assert path.read_bytes() == b"whole" and left.read_bytes() == b"half"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Everything that was synced, in order."""
    paths: list[Path] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return paths


def test_every_created_folder_is_synced_into_its_parent(tmp_path: Path, synced: list[Path]) -> None:
    root = tmp_path / "new" / "store"
    place = LocalLocation(root)
    place.write("train/ids/c/3/0/0", b"x")
    folders = [path for path in (tmp_path / "new").rglob("*") if path.is_dir()]
    assert len(folders) == 6
    assert {folder.parent for folder in folders} <= set(synced)
    assert tmp_path in synced and root / "train/ids/c/3/0" in synced
    synced.clear()
    place.write("train/ids/c/4/0/0", b"x")
    assert root / "train/ids/c" in synced and root / "train/ids" not in synced


def test_other_files_have_durable_folders_too(tmp_path: Path, synced: list[Path]) -> None:
    write_bytes_atomic(tmp_path / "a/b/file", b"x")
    assert {tmp_path, tmp_path / "a", tmp_path / "a/b"} <= set(synced)


def test_a_published_folder_is_on_disk_before_its_name_and_its_name_too(
    tmp_path: Path, synced: list[Path]
) -> None:
    work, final = tmp_path / ".work", tmp_path / "model"
    (work / "sub").mkdir(parents=True)
    (work / "sub/weights").write_bytes(b"x")
    publish_folder(work, final)
    assert {work, work / "sub", work / "sub/weights"} <= set(synced[:-1])
    assert synced[-1] == tmp_path and (final / "sub/weights").read_bytes() == b"x"
    work.mkdir()
    publish_folder(work, final)
    assert not list(final.iterdir())


def test_a_deleted_file_stays_deleted(tmp_path: Path, synced: list[Path]) -> None:
    place = LocalLocation(tmp_path)
    place.write("ledger/train/000000.json", b"x")
    synced.clear()
    place.delete("ledger/train/000000.json")
    place.delete("ledger/train/000000.json")
    place.delete("nothing/here")
    assert synced == [tmp_path / "ledger/train"]


@pytest.mark.parametrize("is_dangling", [False, True])
def test_no_link_is_followed_or_emptied(tmp_path: Path, is_dangling: bool) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    run.mkdir()
    if not is_dangling:
        precious.write_text("mine")
    for name in (".lock", "lines.jsonl"):
        (run / name).symlink_to(precious)
    with pytest.raises(UsageError, match="cannot write there"), exclusive(run):
        pass
    assert is_held(run) is None
    with pytest.raises(OSError):
        append_line(run / "lines.jsonl", "x")
    assert precious.exists() is not is_dangling
    assert is_dangling or precious.read_text() == "mine"


def test_a_lock_is_no_reason_to_empty_a_file(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine")
    with exclusive(tmp_path):
        assert is_held(tmp_path)
    assert (tmp_path / ".lock").read_text() == "mine" and not is_held(tmp_path)


def test_a_file_in_a_folders_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        make_folders(tmp_path / "a" / "b")
