"""Files that are either absent or whole: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.errors import UsageError


def fsync_path(path: Path) -> None:
    """Make a file's content, or the renames inside a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Create a folder and those above it that are missing; each survives a power cut.

    A folder's name lies in its parent, so it is the parent of each created one that is synced.
    """
    if folder.is_dir():
        return
    make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    with suppress(PermissionError):  # a parent that may be written to but not read
        fsync_path(folder.parent)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` never holds a part of it, whatever kills the process.

    A killed process leaves ``.NAME.<32 hex digits>.tmp`` behind, a name of its own: see :func:`discard_leftovers`.
    """
    make_folders(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # of a full disk there was none
        raise
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def open_itself(path: Path | str, flags: int) -> int:
    """A descriptor of the regular file at ``path``, an ``opener`` of :func:`open`: no link is followed.

    OSError for all else: a folder from elsewhere may hold a link under a file's name, or a pipe that nobody reads.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a file", str(path))


def append_line(path: Path, line: str) -> None:
    """Add a line to a file that only grows."""
    make_folders(path.parent)
    with open(path, "a", encoding="utf-8", opener=open_itself) as file:
        file.write(line + "\n")


def publish_folder(work: Path, final: Path) -> None:
    """Rename a finished folder, with everything in it on disk before its name is.

    A folder of that name goes first: at any time ``final`` is the old one, absent, or whole. Files get what
    the umask left of the folder's mode, as safetensors leaves its own to their owner alone.
    """
    readable = work.stat().st_mode & 0o666
    for path in sorted(work.rglob("*"), reverse=True):  # files before the folders that name them
        if path.is_file() and not path.is_symlink():
            path.chmod(readable)
        fsync_path(path)
    fsync_path(work)
    if final.exists():
        shutil.rmtree(final)
    os.replace(work, final)
    fsync_path(final.parent)


def discard_leftovers(path: Path) -> None:
    """Remove what killed writers left of ``path``; only for who alone may write it now."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}.tmp"):
        left.unlink(missing_ok=True)


def canonical_json(value: Any) -> bytes:
    """The one byte string for a JSON value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON with sorted keys, atomically."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    write_bytes_atomic(path, text.encode() + b"\n")


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that is appended to; none without one. A torn last line is cut off."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        write_bytes_atomic(path, whole)
    return whole.splitlines()


def sha256_file(path: Path) -> str:
    """The hex sha256 of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of one file of a store."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> FileRecord:
        """The record of a file holding ``data``."""
        return cls(len(data), hashlib.sha256(data).hexdigest())

    def matches(self, data: bytes) -> bool:
        """Whether ``data`` is the file's content."""
        return FileRecord.of(data) == self

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.num_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileRecord:
        """Read a record; KeyError or UsageError for what is none."""
        num_bytes = value["bytes"]
        if type(num_bytes) is not int or num_bytes < 0:
            raise UsageError("not a number of bytes", got=repr(num_bytes))
        return cls(num_bytes, sha256_hex(value["sha256"]))


def sha256_hex(value: object) -> str:
    """``value``, if it is a sha256 in hex; else UsageError, as it may become a file's name."""
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value
    raise UsageError("not a sha256", got=repr(value)[:80])


# A file or folder held by one process: the kernel drops a lock when its process ends, so no claim is stale. Its file
# goes on release or, after a kill, with the next holder's.


LOCK_FILE = ".lock"
_held: set[int] = set()
"""Descriptors of the locks of this process. A lock lasts until every copy of its descriptor is
closed, so a forked child must not keep one: its parent's death would not release it."""


def _close_inherited() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_inherited)


def _lock(path: Path, wait: bool) -> int | None:
    """The descriptor of the locked file at ``path``, None if another process holds it."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = open_itself(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # another release removed the folder in between
            continue
        except FileExistsError:  # ... or between mkdir's refusal and its look at what is there
            if any(place.is_file() or (place.is_symlink() and not place.is_dir()) for place in path.parents):
                raise
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        # The previous holder may have removed the file while we waited: then our lock is on
        # a file that nobody else can find, and worth nothing.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                _held.add(descriptor)
                return descriptor
        os.close(descriptor)


@contextmanager
def file_claim(path: Path, wait: bool) -> Iterator[bool]:
    """Hold ``path`` while the context lasts; gives False if it is taken and ``wait`` is off."""
    descriptor = _lock(path, wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor in _held:  # a child that was forked meanwhile holds nothing
            try:
                path.unlink(missing_ok=True)  # while still holding it
                with suppress(OSError):  # other claims are still there
                    path.parent.rmdir()
            finally:
                _held.discard(descriptor)
                os.close(descriptor)


def require_writable(directory: Path) -> None:
    """Make ``directory``, or refuse it, before the work whose results it is for.

    Raises:
        UsageError: When it is no folder, or nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        got, remedy = error.strerror or error, "give another --out"
        raise UsageError("cannot write there", where=directory, got=got, remedy=remedy) from error


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold ``directory`` for one run.

    Raises:
        UsageError: When another process holds it, or nothing can be written there.
    """
    with ExitStack() as stack:
        try:
            mine = stack.enter_context(file_claim(directory / LOCK_FILE, wait=False))
            if not mine:  # who only asks whether it is held (is_held) holds it for an instant
                time.sleep(0.1)
                mine = stack.enter_context(file_claim(directory / LOCK_FILE, wait=False))
        except OSError as error:
            where, got, remedy = error.filename or directory, error.strerror, "give another --out"
            raise UsageError("cannot write there", where=where, got=got, remedy=remedy) from error
        if not mine:
            remedy = "wait for it, or give another --out"
            raise UsageError("another run is writing here", where=directory, remedy=remedy)
        yield


def is_held(directory: Path) -> bool | None:
    """Whether a process holds ``directory``; None where the file system cannot tell."""
    try:
        with open(directory / LOCK_FILE, opener=open_itself) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
