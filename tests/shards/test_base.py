"""Files, folders, claims, progress, versions and processes: what every package stands on."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shards import atomic, settings
from shards.atomic import discard_leftovers, exclusive, file_claim, is_held, whole_lines, write_bytes_atomic
from shards.console import progress_bar
from shards.errors import GdistillError, Stopped, StopRequest, UsageError, first_line
from shards.settings import code_version as stamp
from shards.store.location import LocalLocation


def num_open() -> int:
    """Files that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def test_a_json_file_is_whole_sorted_and_holds_no_nan(tmp_path: Path) -> None:
    """Also of writers with one process id, as two containers that share a folder may be."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: atomic.write_json_atomic(tmp_path / "config.json", {"x": 1, "a": 2}), range(200)))
    for write in (atomic.canonical_json, lambda value: atomic.write_json_atomic(tmp_path / "none.json", value)):
        with pytest.raises(ValueError):  # NaN is no JSON
            write({"x": float("nan")})
    assert [found.name for found in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == '{\n  "a": 2,\n  "x": 1\n}\n'


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Everything that was synced, in order."""
    paths: list[Path] = []

    def record(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size, "a file is synced when its content has left the process"
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", record)
    return paths


def test_a_line_that_a_kill_cut_short_is_cut_off(tmp_path: Path) -> None:
    """From what is read and from the file, so that the next line does not go on behind it."""
    log = tmp_path / "log"
    for data, lines in ((b"", []), (b"a", []), (b"a\nbc\n", [b"a", b"bc"]), (b"a\nbc\nd", [b"a", b"bc"])):
        log.write_bytes(data)
        assert whole_lines(log) == lines
        assert log.read_bytes() == b"".join(line + b"\n" for line in lines)
    assert whole_lines(tmp_path / "none") == []


def test_every_created_folder_is_synced_into_its_parent(
    tmp_path: Path, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another process makes it at once, and but for a parent that nobody may read."""
    root, mkdir, os_open = tmp_path / "new" / "store", Path.mkdir, os.open
    monkeypatch.setattr(Path, "mkdir", lambda *path, **options: (mkdir(*path), mkdir(*path, **options)))
    place = LocalLocation(root)
    place.write("train/ids/c/3/0/0", b"x")
    folders = [path for path in (tmp_path / "new").rglob("*") if path.is_dir()]
    assert len(folders) == 6
    assert {folder.parent for folder in folders} <= set(synced)
    assert tmp_path in synced and root / "train/ids/c/3/0" in synced
    synced.clear()
    place.write("train/ids/c/4/0/0", b"x")
    assert root / "train/ids/c" in synced and root / "train/ids" not in synced
    synced.clear()
    place.delete("train/ids/c/4/0/0")
    place.delete("train/ids/c/4/0/0")
    place.delete("nothing/here")
    assert synced == [root / "train/ids/c/4/0"], "a deleted file stays deleted"

    def unreadable(path: Path, *flags: int) -> int:
        if path == tmp_path:
            raise PermissionError(13, "Permission denied", path)
        return os_open(path, *flags)

    monkeypatch.setattr(os, "open", unreadable)
    LocalLocation(tmp_path / "other").write("a", b"x")
    assert synced[-1] == tmp_path / "other" and tmp_path not in synced


def test_a_published_folder_is_on_disk_before_its_name_and_its_name_too(tmp_path: Path, synced: list[Path]) -> None:
    work, final = tmp_path / ".work", tmp_path / "model"
    (work / "sub").mkdir(parents=True)
    (work / "sub/weights").write_bytes(b"x")
    (tmp_path / "mine").write_bytes(b"x")
    (work / "link").symlink_to(tmp_path / "mine")
    for private in (tmp_path / "mine", work / "sub/weights"):
        private.chmod(0o600)  # as safetensors leaves it
    atomic.publish_folder(work, final)
    assert (final / "sub/weights").stat().st_mode & 0o777 == final.stat().st_mode & 0o666
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600
    assert [path for path in synced[:-1] if path.is_relative_to(work)] == [work / "sub/weights", work / "sub", work]
    assert synced[-1] == tmp_path and (final / "sub/weights").read_bytes() == b"x"
    work.mkdir()
    atomic.publish_folder(work, final)
    assert not list(final.iterdir())


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_no_link_is_followed_or_emptied_and_no_pipe_waited_for(tmp_path: Path, kind: str) -> None:
    precious, run, held = tmp_path / "precious", tmp_path / "run", num_open()
    run.mkdir()
    if kind == "link":
        precious.write_text("mine")
    for name in (".lock", "lines.jsonl"):
        os.mkfifo(run / name) if kind == "pipe" else (run / name).symlink_to(precious)
    with pytest.raises(UsageError, match="cannot write there"), exclusive(run):
        pass
    assert is_held(run) is None
    with pytest.raises(OSError):
        atomic.append_line(run / "lines.jsonl", "x")
    assert precious.exists() == (kind == "link")
    assert kind != "link" or precious.read_text() == "mine"
    assert num_open() <= held, "every file is closed"


def test_a_folder_is_held_while_a_run_lasts_and_free_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_held(tmp_path / "nowhere") is False
    (tmp_path / ".lock").touch()  # as a killed run leaves it
    (tmp_path / "content").touch()
    held = num_open()
    for _ in range(2):
        assert is_held(tmp_path) is False
        with exclusive(tmp_path):
            assert is_held(tmp_path) is True
            with pytest.raises(UsageError, match="another run"), exclusive(tmp_path):
                pass
            assert is_held(tmp_path) is True
    with open(tmp_path / "content") as content:  # under the number that a lock had
        assert num_open() <= held + 1
        if (child := os.fork()) == 0:
            os._exit(0 if os.path.exists(f"/proc/self/fd/{content.fileno()}") else 1)
        assert os.waitpid(child, 0)[1] == 0, "a forked child keeps the files that are no locks"
    # Who asks holds the folder for an instant: it keeps no run from beginning, and is no run.
    (tmp_path / ".lock").touch()
    with open(tmp_path / ".lock") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert is_held(tmp_path) is False
        monkeypatch.setattr("shards.atomic.time.sleep", lambda _: asking.close())
        with exclusive(tmp_path):
            assert asking.closed


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets seconds pass for progress bars."""
    now = [1000.0]
    monkeypatch.setattr("shards.console.time.monotonic", lambda: sum(now))
    return now.append


def test_progress_where_there_is_no_terminal(
    later: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("verify", 12_000_000, unit="B", done=2_000_000) as bar:
        later(60)
        bar.advance(1_500_000)
        told = "verify: 3.5M/12.0M B, 25.0k B/s, 0:05:40 left"
        assert capsys.readouterr().err == f"{told}\n"
        bar.note("shard 3")
    assert capsys.readouterr().err == f"{told}, shard 3\n"
    with progress_bar("all", 4, unit="%") as bar:
        later(5)
        bar.advance(2)
        later(5)
        bar.advance(2)
    assert capsys.readouterr().err == "all: 100%, 0:00:10 so far\n"
    with progress_bar("tokenize", None) as bar:
        later(5)
        bar.advance(1000)
    assert capsys.readouterr().err == "tokenize: 1.0k tok, 200 tok/s, 0:00:05 so far\n"
    with progress_bar("train", 10, main_process=False) as bar:
        later(60)
        bar.advance(5)
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal(later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120)
    monkeypatch.setattr("shards.console.stderr", screen)
    with progress_bar("verify", 4000, unit="B", done=1000) as bar:
        later(10)
        bar.advance(1000)
        bar.note("[shard 3]")
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "2.0k/4.0k B, 100 B/s" in shown and "[shard 3]" in shown


def test_another_librarys_error_takes_one_line_or_its_name() -> None:
    compiler = RuntimeError("backend\n")
    compiler.inner_exception = ValueError("\n no such\tregister \n at 3")  # type: ignore[attr-defined]
    assert (first_line(compiler), first_line(ValueError())) == ("no such\tregister ", "ValueError")
    assert str(GdistillError("a\n b", got="c\x1b")) == "a b; got c\\x1b"


def test_a_checkout_tells_its_commit_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package tells its release alone, also below another checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def told() -> str:
        stamp.cache_clear()
        return stamp()

    assert (settings.ROOT / "shards" / "settings.py").samefile(settings.__file__)
    try:
        git("init", "-q")
        monkeypatch.setattr(settings, "ROOT", tmp_path)
        assert "+" not in told() and told(), "no commit to tell"
        (tmp_path / "site-packages").mkdir()
        (tmp_path / "a").write_text("1")
        git("add", "a")
        git("commit", "-qm", "one")
        commit = git("rev-parse", "--short=12", "HEAD")
        monkeypatch.setattr(settings, "ROOT", tmp_path / "site-packages")
        assert "+" not in told() and told()
        monkeypatch.setattr(settings, "ROOT", tmp_path)
        (tmp_path / "untracked").write_text("")
        assert told().endswith(f"+g{commit}")
        (tmp_path / "a").write_text("2")
        assert told().endswith(f"+g{commit}.dirty")
    finally:
        stamp.cache_clear()


def test_ctrl_c_interrupts_at_once_who_was_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, numbers = StopRequest(signal.SIGINT, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)
    before = [*map(signal.getsignal, numbers)]
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    for attend in (stop.check, lambda: stop.pause(0.0)):
        with pytest.raises(Stopped, match="SIGTERM") as caught:
            attend()
        assert caught.value.exit_code == 143
    later, slept = StopRequest(signal.SIGTERM), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("shards.errors.time.sleep", sleep)
    with later.listening(), pytest.raises(Stopped):
        later.pause(5.0)
    assert len(slept) == 3 and max(slept) <= 0.2, "a pause ends soon after the signal"
    assert [*map(signal.getsignal, numbers)] == before
    with ThreadPoolExecutor(1) as pool:  # where no signal can be caught
        assert pool.submit(stop.listening().__enter__).result() is stop


@pytest.fixture
def place(tmp_path: Path) -> LocalLocation:
    place = LocalLocation(tmp_path)
    for name in ("train/a", "train/b", "train/c/d", ".claims/f"):
        place.write(name, b"xyz")
    return place


def test_a_listing_misses_what_is_gone_and_nothing_else(place: LocalLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be listed does not look empty."""
    stat, scandir = Path.stat, os.scandir

    def renamed_meanwhile(path: Path, **options: bool) -> os.stat_result:
        if path.name == "b":
            raise FileNotFoundError(path)
        return stat(path, **options)

    def refuses(path: str):
        if str(path).endswith("/c"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(Path, "stat", renamed_meanwhile)
    (place.root / "train/e").symlink_to("nowhere")
    place.write("train/.claims/f", b"x")
    assert place.sizes() == {"train/a": 3, "train/c/d": 3, "train/e": 7, "train/.claims/f": 1}
    assert place.sizes("nowhere") == {} == place.sizes("train/a")
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


def test_a_claims_file_goes_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(gone: Path, **_: bool) -> None:
        with open(gone) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(gone)

    monkeypatch.setattr(Path, "unlink", watched)
    with file_claim(tmp_path / "claims/one", wait=False):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_file_that_was_removed_is_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder removes it on release, when who waits has a descriptor of it already."""
    path, flock, removed = tmp_path / "claims/one", fcntl.flock, list[Path]()
    opens, gone, held = atomic.open_itself, [FileNotFoundError, FileExistsError], num_open()

    def folder_removed_meanwhile(*arguments: Any) -> int:
        if gone:
            raise gone.pop()
        return opens(*arguments)

    def removed_meanwhile(descriptor: int, kind: int) -> None:
        if not removed:
            removed.append(path)
            path.unlink()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    monkeypatch.setattr(atomic, "open_itself", folder_removed_meanwhile)
    with file_claim(path, wait=True) as mine, file_claim(path, wait=False) as other:
        assert mine and not other
    assert removed and not path.parent.exists() and num_open() <= held
    path.parent.write_text("a file")
    with pytest.raises(FileExistsError), file_claim(path, wait=True):
        pass


def test_a_peek_is_bytes_or_nothing(place: LocalLocation) -> None:
    place.write("a", b"0123456789")
    assert place.peek("a", 7, 3) == b"789" and place.peek("a", -5, 3) == b"012"
    held = num_open()
    assert place.peek("b", 0, 3) == b"" == place.peek("train", 0, 3) and place.peek("a", 0, 1) == b"0"
    assert num_open() <= held, "every file is closed"
    assert place.size("a/b") is None, "below a file there is none"
    with pytest.raises(GdistillError, match="cannot delete"):
        place.delete("a/b")
    for error in (lambda: place.read("a/b"), lambda: place.read("b")):
        with pytest.raises(FileNotFoundError, match="b"), place.claim("one", wait=False):
            error()


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
