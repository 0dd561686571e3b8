"""Where a store lives: a local folder or an fsspec URL, seen as names -> bytes.

A name is a relative path with forward slashes. Writes are atomic: a name holds its old content or
all of the new one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from shards.storage.file_record import FileRecord
from shards.storage.local import LocalLocation


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

    def written_at(self, prefix: str) -> dict[str, float]:
        """Unix time of the last write of every file below ``prefix``, where the place tells it."""
        ...

    def discard_leftovers(self, name: str) -> None:
        """Remove what killed writers left of a file; only for who holds its claim."""
        ...

    def open_file(self, name: str, record: FileRecord) -> int:
        """A descriptor of a local file that ``record`` describes: the file itself, or a copy.

        A copy has been hashed; the file itself is checked by its reader. The caller closes it.
        """
        ...

    def peek(self, name: str, start: int, length: int) -> bytes | None:
        """Some bytes of a file, none if it is not there; None where looking is not cheap."""
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
