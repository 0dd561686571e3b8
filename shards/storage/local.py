"""A store in a folder, and claims by flock: the kernel drops one when its process ends.

However that ends, so no claim can be stale. The claim's file is removed on release and, after a
kill, by the next process that takes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shards.base import (
    GdistillError,
    discard_leftovers,
    fsync_path,
    path_inside,
    safe_name,
    write_bytes_atomic,
)
from shards.storage.file_record import FileRecord

CLAIMS = ".claims"


class LocalLocation:
    """A folder on a file system with atomic rename and flock; see ``location.Location``."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().resolve()

    @property
    def url(self) -> str:
        return str(self.root)

    def read(self, name: str) -> bytes:
        with self._explained(name, "read"), open(self._open(name), "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        with self._explained(name, "write"):
            write_bytes_atomic(path_inside(self.root, name), data)

    def discard_leftovers(self, name: str) -> None:
        with self._explained(name, "tidy"):
            discard_leftovers(path_inside(self.root, name))

    def delete(self, name: str) -> None:
        path = path_inside(self.root, name)
        with self._explained(name, "delete"), suppress(FileNotFoundError):
            path.unlink()
            fsync_path(path.parent)  # or a power cut could bring a dropped ledger record back

    def size(self, name: str) -> int | None:
        with self._explained(name, "look at"):
            try:
                return (self.root / safe_name(name)).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {name: found.st_size for name, found in self._listing(prefix).items()}

    def written_at(self, prefix: str) -> dict[str, float]:
        return {name: found.st_mtime for name, found in self._listing(prefix).items()}

    def _listing(self, prefix: str) -> dict[str, os.stat_result]:
        top = self.root / safe_name(prefix) if prefix else self.root
        found = {}
        with self._explained(prefix, "list"):
            for folder, folders, names in os.walk(top, onerror=_raise_unless_gone):
                if Path(folder) == self.root and CLAIMS in folders:
                    folders.remove(CLAIMS)
                for name in names:
                    path = Path(folder, name)
                    with suppress(FileNotFoundError):  # renamed since, by who wrote it
                        found[path.relative_to(self.root).as_posix()] = path.lstat()
        return found

    def open_file(self, name: str, record: FileRecord) -> int:
        return self._open(name)  # checked by its reader, chunk by chunk

    def peek(self, name: str, start: int, length: int) -> bytes | None:
        try:
            descriptor = self._open(name)
        except OSError:
            return b""
        try:
            return os.pread(descriptor, length, max(0, start))
        finally:
            os.close(descriptor)

    def discard_altered_copy(self, record: FileRecord) -> bool:
        return False  # the file itself is no copy

    def _open(self, name: str) -> int:
        """A descriptor of a file; links are followed, as caches of downloads are made of them."""
        # Not blocking: a pipe in a file's place would be waited for without end.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.root / safe_name(name), flags)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file")

    @contextmanager
    def claim(self, name: str, *, wait: bool) -> Iterator[bool]:
        with ExitStack() as stack:
            with self._explained(f"{CLAIMS}/{name}", "lock"):
                mine = stack.enter_context(
                    file_claim(path_inside(self.root, f"{CLAIMS}/{name}"), wait)
                )
            yield mine

    def claims(self) -> list[str]:
        return sorted(path.name for path in (self.root / CLAIMS).glob("*"))

    @contextmanager
    def _explained(self, name: str, verb: str) -> Iterator[None]:
        """An OSError as one line; absence stays a FileNotFoundError for the caller to judge."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            if verb == "read":
                raise FileNotFoundError(name) from error
            raise GdistillError(f"cannot {verb} the store", where=self.root, got=error) from error
        except OSError as error:
            raise GdistillError(
                f"cannot {verb} a file of the store",
                where=self.root / name,
                got=error.strerror or error,
                remedy="free space or fix permissions, then run again: finished shards are kept",
            ) from error


_held: set[int] = set()
"""Descriptors of the locks of this process. A lock lasts until every copy of its descriptor is
closed, so a forked child must not keep one: its parent's death would not release it."""


def _close_inherited() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_inherited)


def _raise_unless_gone(error: OSError) -> None:
    """What cannot be listed must not look empty; what is gone is no longer there."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _lock(path: Path, wait: bool) -> int | None:
    """The descriptor of the locked file at ``path``, None if another process holds it."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # another release removed the folder in between
            continue
        except FileExistsError:  # ... or between mkdir's refusal and its look at what is there
            if path.parent.is_file():
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


def _unlock(path: Path, descriptor: int) -> None:
    """Remove the file while still holding it, then let go."""
    if descriptor not in _held:  # a child that was forked meanwhile holds nothing
        return
    try:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # other claims are still there
            path.parent.rmdir()
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


@contextmanager
def file_claim(path: Path, wait: bool) -> Iterator[bool]:
    """Hold ``path`` while the context lasts; gives False if it is taken and ``wait`` is off."""
    descriptor = _lock(path, wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            _unlock(path, descriptor)
