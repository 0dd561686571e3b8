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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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

    The temporary name is one that no other process has, on any machine that shares the folder: with
    a fixed one, two that wrote the same file would write into each other's. A killed process leaves
    it behind, ``.NAME.<32 hex digits>.tmp``: never read; see :func:`discard_leftovers`.
    """
    make_folders(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def open_itself(path: Path | str, flags: int) -> int:
    """A descriptor of the regular file at ``path``: what is there is neither followed nor emptied.

    A folder from elsewhere may hold a link under a file's name, or a pipe that nobody reads. An
    ``opener`` of :func:`open` too.

    Raises:
        OSError: For a link, or anything else that is no regular file.
    """
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, safe, 0o666)
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

    A folder of that name goes first: at any time ``final`` is the old one, absent, or whole.

    Libraries that write into it leave their files to the page cache, and safetensors its own to
    their owner alone: files get what the umask left of the folder's mode.
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
        """Read a record.

        Raises:
            KeyError: If a field is missing.
            UsageError: If one is no size, or no hash.
        """
        num_bytes = value["bytes"]
        if type(num_bytes) is not int or num_bytes < 0:
            raise UsageError("not a number of bytes", got=repr(num_bytes))
        return cls(num_bytes, sha256_hex(value["sha256"]))


def sha256_hex(value: object) -> str:
    """``value``, if it is a sha256 in hex.

    Raises:
        UsageError: If it is not: it may become a file's name.
    """
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value
    raise UsageError("not a sha256", got=repr(value)[:80])


# An output folder: one that can be written, and one run at a time in it.


LOCK_FILE = ".lock"
TRIES, PAUSE_SECONDS = 5, 0.02
"""Who only asks whether a folder is held (:func:`is_held`) holds it for an instant itself."""


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
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / LOCK_FILE, "a", opener=open_itself)  # noqa: SIM115 (closed below)
    except OSError as error:
        where, got = error.filename or directory, error.strerror
        remedy = "give another --out"
        raise UsageError("cannot write there", where=where, got=got, remedy=remedy) from error
    with lock as file:
        if not any(_locked(file, fcntl.LOCK_EX, attempt) for attempt in range(TRIES)):
            remedy = "wait for it, or give another --out"
            raise UsageError("another run is writing here", where=directory, remedy=remedy)
        yield


def is_held(directory: Path) -> bool | None:
    """Whether a process holds ``directory``; None where the file system cannot tell."""
    try:
        with open(directory / LOCK_FILE, opener=open_itself) as file:
            return not _locked(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _locked(file: IO[str], kind: int, attempt: int = 0) -> bool:
    """Whether the lock is ours now; it goes when the file is closed."""
    if attempt:
        time.sleep(PAUSE_SECONDS)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
