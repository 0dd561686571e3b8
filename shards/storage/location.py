"""Where a store lives: a local folder or an fsspec URL, seen as names -> bytes.

A name is a relative path with forward slashes. Writes are atomic: a name holds its old content or
all of the new one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Protocol, runtime_checkable

from zarr.abc.store import Store
from zarr.storage import LocalStore

from shards.base import GdistillError, UsageError, fsync_path, make_folders
from shards.storage.claims import file_claim
from shards.store import FileRecord

CLAIMS = ".claims"


@runtime_checkable
class Location(Protocol):
    """The few storage operations that a store needs."""

    @property
    def url(self) -> str:
        """How to name the place in messages."""
        ...

    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replace the file atomically and durably."""
        ...

    def delete(self, name: str) -> None:
        """Remove the file, durably, if it is there."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of the file, None if there is none."""
        ...

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Every file below ``prefix`` (a folder; "" for all) with its size; claims left out."""
        ...

    def local_file(self, name: str, record: FileRecord) -> Path:
        """A local file with the content that ``record`` describes: the file itself, or a copy."""
        ...

    def discard_altered_copy(self, record: FileRecord) -> bool:
        """Drop the local copy of a file if it is not what ``record`` says; whether it was so."""
        ...

    def claim(self, name: str, *, wait: bool) -> AbstractContextManager[bool]:
        """Hold ``name`` against every other process while the context lasts; False if taken."""
        ...

    def claims(self) -> list[str]:
        """Names held now, or left behind by a process that was killed."""
        ...

    def zarr_store(self) -> Store:
        """The place as a read-only Zarr store."""
        ...


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
    from shards.storage.remote import RemoteLocation  # fsspec's clients are slow to import

    return RemoteLocation(text)


def as_location(location: str | Path | Location) -> Location:
    """``location`` itself, or :func:`open_location` of a path or URL."""
    return open_location(location) if isinstance(location, str | Path) else location


class LocalLocation:
    """A folder on a file system with atomic rename and flock."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().resolve()

    @property
    def url(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        """The path of a file of the store."""
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UsageError("a file name leaves the store", where=name)
        return self.root / name

    def read(self, name: str) -> bytes:
        with self._explained(name, "read"):
            return self.path(name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        path = self.path(name)
        # One fixed temporary name: what a killed writer left behind, its successor overwrites.
        temporary = path.with_name(f".{path.name}.tmp")
        with self._explained(name, "write"):
            make_folders(path.parent)
            try:
                with open(temporary, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            fsync_path(path.parent)

    def delete(self, name: str) -> None:
        path = self.path(name)
        with self._explained(name, "delete"), suppress(FileNotFoundError):
            path.unlink()
            fsync_path(path.parent)  # or a power cut could bring a dropped ledger record back

    def size(self, name: str) -> int | None:
        try:
            return self.path(name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found = {}
        for folder, folders, names in os.walk(self.path(prefix)):
            if Path(folder) == self.root and CLAIMS in folders:
                folders.remove(CLAIMS)
            for name in names:
                path = Path(folder, name)
                found[path.relative_to(self.root).as_posix()] = path.lstat().st_size
        return found

    def local_file(self, name: str, record: FileRecord) -> Path:
        return self.path(name)  # checked by its reader, chunk by chunk

    def discard_altered_copy(self, record: FileRecord) -> bool:
        return False  # the file itself is no copy

    def claim(self, name: str, *, wait: bool) -> AbstractContextManager[bool]:
        return self._claim(name, wait)

    @contextmanager
    def _claim(self, name: str, wait: bool) -> Iterator[bool]:
        with ExitStack() as stack:
            with self._explained(f"{CLAIMS}/{name}", "lock"):
                mine = stack.enter_context(file_claim(self.root / CLAIMS / name, wait))
            yield mine

    def claims(self) -> list[str]:
        return sorted(path.name for path in (self.root / CLAIMS).glob("*"))

    def zarr_store(self) -> Store:
        return LocalStore(self.root, read_only=True)

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
