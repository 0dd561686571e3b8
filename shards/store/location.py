"""Where a store lives: a local folder or an fsspec URL, seen as names -> bytes.

A name is a relative path with forward slashes. Writes are atomic: a name holds its old content or
all of the new one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Union

from shards.atomic import FileRecord, discard_leftovers, fsync_path, open_itself, write_bytes_atomic
from shards.errors import GdistillError, UsageError, path_inside, safe_name

if TYPE_CHECKING:
    import shards.store.remote


def open_location(location: str | Path) -> Location:
    """The location of a path, a ``file://`` URL or any fsspec URL (``s3://``, ``memory://``).

    Raises:
        UsageError: If the scheme is unknown or its package is not installed.
    """
    text = str(location)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalLocation(Path(text))
    if scheme in ("file", "local"):
        return LocalLocation(Path(rest))
    from shards.store.remote import RemoteLocation  # fsspec's clients are slow to import

    return RemoteLocation(text)


def as_location(location: str | Path | Location) -> Location:
    """``location`` itself, or :func:`open_location` of a path or URL."""
    return open_location(location) if isinstance(location, str | Path) else location


# A store in a folder, and claims by flock: the kernel drops one when its process ends.
#
# However that ends, so no claim can be stale. The claim's file is removed on release and, after a
# kill, by the next process that takes it.


CLAIMS = ".claims"


class LocalLocation:
    """A folder on a file system with atomic rename and flock."""

    def __init__(self, root: Path) -> None:
        try:
            self.root = root.expanduser().resolve()
        except (RuntimeError, OSError) as error:  # a link to itself; no such user
            raise UsageError("no place for a store", where=root, got=error) from error

    @property
    def url(self) -> str:
        """How to name the place in messages."""
        return str(self.root)

    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""
        with self._explained(name, "read"), open(self._open(name), "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Replace the file atomically and durably."""
        with self._explained(name, "write"):
            write_bytes_atomic(path_inside(self.root, name), data)

    def discard_leftovers(self, name: str) -> None:
        """Remove what killed writers left of a file; only for who holds its claim."""
        with self._explained(name, "tidy"):
            discard_leftovers(path_inside(self.root, name))

    def delete(self, name: str) -> None:
        """Remove the file, durably, if it is there."""
        path = path_inside(self.root, name)
        with self._explained(name, "delete"), suppress(FileNotFoundError):
            path.unlink()
            fsync_path(path.parent)  # or a power cut could bring a dropped ledger record back

    def size(self, name: str) -> int | None:
        """Bytes of the file, None if there is none."""
        with self._explained(name, "look at"):
            try:
                return (self.root / safe_name(name)).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Every file below ``prefix`` (a folder; "" for all) with its size; claims left out."""
        return {name: found.st_size for name, found in self._listing(prefix).items()}

    def written_at(self, prefix: str) -> dict[str, float]:
        """Unix time of the last write of every file below ``prefix``, where the place tells it."""
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
        """A descriptor of a local file that ``record`` describes: the file itself, or a copy.

        A copy has been hashed; the file itself is checked by its reader, chunk by chunk. The caller
        closes it.
        """
        return self._open(name)

    def peek(self, name: str, start: int, length: int) -> bytes | None:
        """Some bytes of a file, none if it is not there; None where looking is not cheap."""
        try:
            descriptor = self._open(name)
        except OSError:
            return b""
        try:
            return os.pread(descriptor, length, max(0, start))
        finally:
            os.close(descriptor)

    def discard_altered_copy(self, record: FileRecord) -> bool:
        """Drop the local copy of a file if it is not what ``record`` says; whether it was so."""
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
        """Hold ``name`` against every other process while the context lasts; False if taken."""
        path = path_inside(self.root, f"{CLAIMS}/{name}")
        with ExitStack() as stack:
            with self._explained(f"{CLAIMS}/{name}", "lock"):
                mine = stack.enter_context(file_claim(path, wait))
            yield mine

    def claims(self) -> list[str]:
        """Names held now, or left behind by a process that was killed."""
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
            remedy = "fix its permissions, or the disk it lies on"
            if verb in ("write", "delete", "lock", "tidy"):
                remedy = "free space or fix permissions, then run again: finished shards are kept"
            what, got = f"cannot {verb} a file of the store", error.strerror or error
            raise GdistillError(what, where=self.root / name, got=got, remedy=remedy) from error


Location = Union[LocalLocation, "shards.store.remote.RemoteLocation"]
"""The few storage operations that a store needs, as :class:`LocalLocation` describes them."""
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
            descriptor = open_itself(path, os.O_RDWR | os.O_CREAT)
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
