"""Local copies of remote files, named by the hash of their content.

A copy is made, checked and only then given its name, so what is in the cache is right; a name says
nothing of where the content came from, so stores share it. Only copies are ever removed: the
cache writes and deletes nothing but files of its own form in a folder of its own.
"""

from __future__ import annotations

import os
import re
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
        max_bytes: The least recently used copies go when there are more bytes; None keeps all.
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

    def fetch(self, record: FileRecord, download: Callable[[], bytes]) -> Path:
        """The path of a copy of the file, downloaded if need be.

        Raises:
            DamagedCopy: If the download has another size or hash than ``record``.
            GdistillError: If the cache cannot be written.
        """
        path = self.folder / record.sha256
        with suppress(OSError):
            if path.stat().st_size == record.num_bytes:
                os.utime(path)  # used now; eviction goes by this
                return path
        data = download()
        if not record.matches(data):
            raise DamagedCopy(
                f"{len(data)} bytes of another hash, expected {record.num_bytes} bytes"
            )
        try:
            self._keep(path, data)
        except OSError as error:
            raise GdistillError(
                "cannot write the cache of remote files",
                where=self.folder,
                got=error.strerror or error,
                remedy=f"free space, or set {FOLDER_VARIABLE} or {SIZE_VARIABLE}",
            ) from error
        return path

    def discard_altered(self, record: FileRecord) -> bool:
        """Remove the copy of a file if its content has changed since; whether it had."""
        path = self.folder / record.sha256
        with suppress(OSError):
            if not record.matches(path.read_bytes()):
                path.unlink(missing_ok=True)
                return True
        return False

    def _keep(self, path: Path, data: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_room(len(data))
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used copies until ``num_bytes`` more fit.

        What a killed download left behind goes too, once no download can be that old.
        """
        if self.max_bytes is None:
            return
        copies = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process removed it
                if _COPY.fullmatch(path.name):
                    status = path.stat()
                    copies.append((status.st_mtime_ns, status.st_size, path))
                elif _UNFINISHED.fullmatch(path.name) and _is_abandoned(path):
                    path.unlink()
        excess = sum(size for _, size, _ in copies) + num_bytes - self.max_bytes
        for _, size, path in sorted(copies):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


def _is_abandoned(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
