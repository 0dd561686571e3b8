"""Local copies of remote files, named by the hash of their content.

A copy is made, checked and only then given its name, so what is in the cache is right; a name says
nothing of where the content came from, so stores share it. Only copies are ever removed: the
cache writes and deletes nothing but files of its own form in a folder of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shards.base import GdistillError, UsageError
from shards.storage.file_record import FileRecord

FOLDER_VARIABLE, SIZE_VARIABLE = "GDISTILL_CACHE", "GDISTILL_CACHE_BYTES"
MAX_SIZE_DIGITS = 18
KEPT_FREE = 20
"""One part in so many of the disk is never filled with copies."""
_COPY = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{32}\.tmp")
_ABANDONED_SECONDS = 24 * 3600


class DamagedCopy(ValueError):
    """What was downloaded is not what the store's record says."""


@dataclass(frozen=True)
class FileCache:
    """A folder of checked copies.

    Attributes:
        folder: Where the copies lie; may be shared by any number of processes.
        max_bytes: The least recently used copies go when there are more bytes. None sets no bound
            but this one, which always holds: a twentieth of the disk stays free.
    """

    folder: Path
    max_bytes: int | None = None

    @classmethod
    def default(cls) -> FileCache:
        """The cache named by ``GDISTILL_CACHE`` (``~/.cache/gdistill``), ``GDISTILL_CACHE_BYTES``.

        Raises:
            UsageError: If the size is not a number of bytes.
        """
        folder = Path(os.environ.get(FOLDER_VARIABLE, "~/.cache/gdistill")).expanduser()
        size = os.environ.get(SIZE_VARIABLE)
        # Not isdigit, which takes superscripts that int refuses, as it does thousands of digits.
        if size is not None and not (size.isdecimal() and len(size) <= MAX_SIZE_DIGITS):
            raise UsageError("bad cache size", where=SIZE_VARIABLE, got=size, expected="bytes")
        return cls(folder, int(size) if size else None)

    def open(self, record: FileRecord, download: Callable[[], bytes]) -> int:
        """A descriptor of a copy of the file, downloaded if need be; the caller closes it.

        A descriptor and not a path: it can be read even if another thread or process, in need of
        room, removes the copy meanwhile.

        Raises:
            DamagedCopy: If the download has another size or hash than ``record``.
            GdistillError: If the cache cannot be written.
        """
        path = self.folder / record.sha256
        descriptor = _open_copy(path, record.num_bytes)
        if descriptor is not None:
            return descriptor
        data = download()
        if not record.matches(data):
            raise DamagedCopy(
                f"{len(data)} bytes of another hash, expected {record.num_bytes} bytes"
            )
        try:
            return self._keep(path, data)
        except OSError as error:
            raise GdistillError(
                "cannot write the cache of remote files",
                where=self.folder,
                got=error.strerror or error,
                remedy=f"free space, or set {FOLDER_VARIABLE} or {SIZE_VARIABLE}",
            ) from error

    def discard_altered(self, record: FileRecord) -> bool:
        """Remove the copy of a file if its content has changed since; whether it had."""
        path = self.folder / record.sha256
        with suppress(OSError):
            if not record.matches(path.read_bytes()):
                path.unlink(missing_ok=True)
                return True
        return False

    def _keep(self, path: Path, data: bytes) -> int:
        """Put a copy into the cache; a descriptor of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_room(len(data))
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            temporary.write_bytes(data)
            descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            os.replace(temporary, path)
            return descriptor
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used copies until ``num_bytes`` more fit.

        What a killed download left behind goes too, once no download can be that old.
        """
        disk = shutil.disk_usage(self.folder)
        short = num_bytes + disk.total // KEPT_FREE - disk.free
        if self.max_bytes is None and short <= 0:
            return
        copies = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process removed it
                if _COPY.fullmatch(path.name):
                    status = path.stat()
                    copies.append((status.st_mtime_ns, status.st_size, path))
                elif _UNFINISHED.fullmatch(path.name) and _is_abandoned(path):
                    path.unlink()
        excess = short
        if self.max_bytes is not None:
            kept = sum(size for _, size, _ in copies)
            excess = max(short, kept + num_bytes - self.max_bytes)
        for _, size, path in sorted(copies):
            if excess <= 0:
                return
            with suppress(PermissionError):  # another user's, in a folder that protects it
                path.unlink(missing_ok=True)
                excess -= size


def _open_copy(path: Path, num_bytes: int) -> int | None:
    """A descriptor of the copy at ``path`` if it is there with its size; it is in use now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(descriptor).st_size != num_bytes:
        os.close(descriptor)
        return None
    with suppress(OSError):  # another user's copy, as good as ours
        os.utime(descriptor)  # used now; eviction goes by this
    return descriptor


def _is_abandoned(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
