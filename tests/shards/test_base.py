"""Files, folders, progress, versions and processes: what every package stands on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread

import pytest

from shards import provenance
from shards.atomic import (
    append_line,
    exclusive,
    is_held,
    make_folders,
    publish_folder,
    write_bytes_atomic,
    write_json_atomic,
)
from shards.console import progress_bar, use_log_format
from shards.errors import UsageError
from shards.provenance import code_version as stamp
from shards.store import remote as process_identity
from shards.store.location import LocalLocation
from shards.store.remote import has_ended, this_process


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


@pytest.fixture(autouse=True)
def plain_again() -> Iterator[None]:
    yield
    use_log_format("plain")


def test_progress_for_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr("shards.console.time.monotonic", lambda: now)
    use_log_format("json")
    with progress_bar("train mdlm", 12_000, done=2_000) as bar:
        bar.note("loss 3.5", loss=3.5, step=7)
        now += 59
        bar.advance(500)
        assert capsys.readouterr().err == ""
        now += 1
        bar.advance(500)
        (line,) = capsys.readouterr().err.splitlines()
        assert json.loads(line) == {
            "stage": "train mdlm",
            "done": 3_000,
            "total": 12_000,
            "unit": "tok",
            "rate": pytest.approx(1_000 / 60, rel=1e-3),
            "eta_seconds": 540.0,
            "seconds": 60.0,
            "finished": False,
            "note": "loss 3.5",
            "loss": 3.5,
            "step": 7,
        }
        bar.advance(9_000)
        assert capsys.readouterr().err == ""
    last = json.loads(capsys.readouterr().err)
    assert last["finished"] and last["done"] == 12_000 and last["eta_seconds"] is None


def test_a_total_nobody_knows_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    use_log_format("json")
    with progress_bar("tokenize", None):
        pass
    line = json.loads(capsys.readouterr().err)
    assert line["total"] is None and line["eta_seconds"] is None and line["note"] == ""


def test_a_folder_is_held_while_a_run_lasts_and_free_after_it(tmp_path: Path) -> None:
    assert is_held(tmp_path / "nowhere") is False
    with exclusive(tmp_path):
        assert is_held(tmp_path) is True
        with pytest.raises(UsageError, match="another run"), exclusive(tmp_path):
            pass
        assert is_held(tmp_path) is True
    assert is_held(tmp_path) is False


def test_who_asks_keeps_no_run_from_beginning(tmp_path: Path) -> None:
    with exclusive(tmp_path):
        pass
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            is_held(tmp_path)

    watcher = threading.Thread(target=ask)
    watcher.start()
    try:
        for _ in range(50):
            with exclusive(tmp_path):
                pass
    finally:
        done.set()
        watcher.join()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    stamp.cache_clear()
    yield tmp_path
    stamp.cache_clear()


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", folder, *named, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_is_that_of_this_checkout() -> None:
    assert (provenance.ROOT / "shards" / "provenance.py").samefile(provenance.__file__)


def test_an_installed_package_tells_its_release_alone(checkout: Path) -> None:
    assert "+" not in stamp() and stamp()


def test_a_checkout_tells_its_commit_and_whether_it_was_changed(checkout: Path) -> None:
    git(checkout, "init", "-q")
    (checkout / "a").write_text("1")
    git(checkout, "add", "a")
    git(checkout, "commit", "-qm", "one")
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    (checkout / "untracked").write_text("")
    assert stamp().endswith(f"+g{commit}")
    stamp.cache_clear()
    (checkout / "a").write_text("2")
    assert stamp().endswith(f"+g{commit}.dirty")


@pytest.fixture(scope="module")
def ended() -> dict[str, object]:
    """A process that has ended and been reaped, as it named itself."""
    code = "import json; from shards.store.remote import *; print(json.dumps(this_process()))"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    return json.loads(text)


def test_an_ended_process_has_ended(ended: dict[str, object]) -> None:
    assert has_ended(ended) and not has_ended(this_process())
    assert has_ended({**this_process(), "started": "1"}), "an id given to another process"
    assert not has_ended({name: ended[name] for name in ("host", "pid")}), "in doubt"


def test_a_process_not_yet_reaped_has_ended() -> None:
    told, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(told[1], json.dumps(this_process()).encode())
        os.read(go[0], 1)
        os._exit(0)
    note = json.loads(os.read(told[0], 4096))
    assert note["pid"] == child and not has_ended(note)
    os.write(go[1], b"x")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert has_ended(note)
    os.waitpid(child, 0)


UNSURE = [{"pid_space": p} for p in (None, "another boot pid:[4026531836]")] + [{"started": None}]
UNSURE += [{"pid": pid} for pid in ("x", 0, 10**30, None)]


def test_what_is_not_certain_is_not_concluded(ended: dict[str, object]) -> None:
    for change in UNSURE:
        assert not has_ended({**ended, **change}), change


def test_a_system_that_tells_nothing_is_in_doubt(
    ended: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_identity, "BOOT_ID", Path("/proc/no such file"))
    assert this_process()["pid_space"] is None and not has_ended(ended)
