"""Where a store lives: a local folder or an fsspec URL, seen as names -> bytes.

A name is a relative path with forward slashes. Writes are atomic: a name holds its old content or all of the new one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Union

from shards.atomic import FileRecord, discard_leftovers, file_claim, fsync_path, write_bytes_atomic
from shards.errors import GdistillError, UsageError, path_inside, safe_name

if TYPE_CHECKING:
    import shards.store.remote


def open_location(location: str | Path | Location) -> Location:
    """``location`` itself, or that of a path or any fsspec URL; UsageError for one that cannot be reached."""
    if not isinstance(location, str | Path):
        return location
    text = str(location)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalLocation(Path(text))
    if scheme in ("file", "local"):
        return LocalLocation(Path(rest))
    from shards.store.remote import RemoteLocation  # fsspec's clients are slow to import

    return RemoteLocation(text)


CLAIMS = ".claims"


class LocalLocation:
    """A folder on a file system with atomic rename and flock; no claim outlives its process."""

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
        top = self.root / safe_name(prefix) if prefix else self.root
        found = {}
        with self._explained(prefix, "list"):
            for folder, folders, names in os.walk(top, onerror=_raise_unless_gone):
                if Path(folder) == self.root and CLAIMS in folders:
                    folders.remove(CLAIMS)
                for name in names:
                    path = Path(folder, name)
                    with suppress(FileNotFoundError):  # renamed since, by who wrote it
                        # Of a link to a file the file's.
                        found[path.relative_to(self.root).as_posix()] = path.stat(follow_symlinks=path.exists()).st_size
        return found

    def open_file(self, name: str, record: FileRecord) -> int:
        """A descriptor of a local file that ``record`` describes, for the caller to close.

        A copy has been hashed; the file itself is checked by its reader, chunk by chunk.
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
        descriptor = os.open(self.root / safe_name(name), os.O_RDONLY | os.O_NONBLOCK)
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


def _raise_unless_gone(error: OSError) -> None:
    """What cannot be listed must not look empty; what is gone is no longer there."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
