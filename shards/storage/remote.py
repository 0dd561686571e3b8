"""A store at an fsspec URL (``s3://``, ``gs://``, ``memory://`` ...), read through a local cache.

Object stores replace a file atomically but have neither rename nor locks: claims are leases, see
:mod:`shards.storage.leases`. Where a client can only look first and then write (webhdfs, hdfs,
ftp), replacing a file is not atomic either: a reader may meet a part of one, which no record
vouches for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from shards.base import GdistillError, UsageError, safe_name
from shards.storage.file_cache import FileCache
from shards.storage.file_record import FileRecord
from shards.storage.leases import LEASE_SECONDS, TAKEOVER, Leases

CLAIMS = ".claims"
EXCLUSIVE_CREATION = {"s3", "s3a", "memory"}
"""Protocols whose clients create a file only if there is none, whoever else tries."""
WRITTEN_AT = ("LastModified", "last_modified", "updated", "mtime", "created")
NO_BUCKET = "bucket does not exist"
"""How the absence of the whole place differs, in a client's words, from that of a file."""


class RemoteLocation:
    """A place that fsspec can reach; see ``location.Location``.

    Credentials and endpoints come from the scheme's usual environment variables (for S3
    ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL`` ...) or from ``storage_options``.

    Attributes:
        url: The place, without a closing slash.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        cache: FileCache | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.url = url.rstrip("/")
        self.cache = cache or FileCache.default()
        self._options = {"use_listings_cache": False, **(storage_options or {})}
        scheme = self.url.partition("://")[0]
        try:
            self._files, self._root = fsspec.url_to_fs(self.url, **self._options)
        except ImportError as error:
            raise UsageError(
                f"stores at {scheme}:// need another package",
                where=self.url,
                got=error,
                remedy="pip install 'gdistill[remote]' for S3, or fsspec's package for the scheme",
            ) from error
        except ValueError as error:
            raise UsageError("unknown kind of store location", where=url, got=error) from error
        self._leases = Leases(self, lease_seconds)

    def _path(self, name: str) -> str:
        return f"{self._root}/{safe_name(name)}"

    def read(self, name: str) -> bytes:
        with self._explained(name, "read"):
            return self._files.cat_file(self._path(name))

    def write(self, name: str, data: bytes) -> None:
        """Replace the file; in an object store readers see the old content or all of the new."""
        path = self._path(name)
        with self._explained(name, "write"):
            self._make_folder(path)
            self._files.pipe_file(path, data)

    def _make_folder(self, path: str) -> None:
        """The folder of a file, where there are folders: an object store would make a bucket."""
        if not isinstance(self._files, AsyncFileSystem):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def delete(self, name: str) -> None:
        with self._explained(name, "delete"), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def size(self, name: str) -> int | None:
        with self._explained(name, "look at"):
            try:
                return int(self._files.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {name: int(info["size"]) for name, info in self._listing(prefix).items()}

    def written_at(self, prefix: str) -> dict[str, float]:
        found = {name: _written_at(info) for name, info in self._listing(prefix).items()}
        return {name: seconds for name, seconds in found.items() if seconds is not None}

    def _listing(self, prefix: str) -> dict[str, Mapping[str, Any]]:
        with self._explained(prefix, "list"):
            self._files.invalidate_cache()
            try:
                top = self._path(prefix) if prefix else self._root
                found = self._files.find(top, detail=True)
            except FileNotFoundError:
                return {}
        start = len(self._root.rstrip("/")) + 1
        names = {path[start:]: info for path, info in found.items()}
        return {name: info for name, info in names.items() if not name.startswith(f"{CLAIMS}/")}

    def open_file(self, name: str, record: FileRecord) -> int:
        """See ``Location``; DamagedCopy if the file at the URL is not what the record says."""
        return self.cache.open(record, lambda: self.read(name))

    def peek(self, name: str, start: int, length: int) -> bytes | None:
        return None  # every look would be a request

    def discard_leftovers(self, name: str) -> None:
        """Nothing: a put leaves none."""

    def discard_altered_copy(self, record: FileRecord) -> bool:
        return self.cache.discard_altered(record)

    def claims(self) -> list[str]:
        with self._explained(CLAIMS, "list"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._path(CLAIMS))
            except FileNotFoundError:
                return []
        names = (path.rpartition("/")[2] for path in found)
        return sorted(name for name in names if TAKEOVER not in name)

    def claim(self, name: str, *, wait: bool) -> AbstractContextManager[bool]:
        return self._leases.hold(f"{CLAIMS}/{name}", wait)

    @property
    def creates_exclusively(self) -> bool:
        protocol = self._files.protocol
        return bool(EXCLUSIVE_CREATION & {*([protocol] if isinstance(protocol, str) else protocol)})

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with self._explained(name, "write"):
            self._make_folder(path)
            try:
                self._files.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
        return True

    @contextmanager
    def _explained(self, name: str, verb: str) -> Iterator[None]:
        """Whatever the storage client raises as one line; absence stays FileNotFoundError."""
        try:
            yield
        except GdistillError:
            raise
        except FileNotFoundError as error:
            if verb == "read" and NO_BUCKET not in str(error):
                raise FileNotFoundError(name) from error
            raise self._failed(name, verb, error) from error
        except Exception as error:  # every storage client has exceptions of its own
            raise self._failed(name, verb, error) from error

    def _failed(self, name: str, verb: str, error: Exception) -> GdistillError:
        return GdistillError(
            f"cannot {verb} the remote store",
            where=f"{self.url}/{name}".rstrip("/"),
            got=" ".join(f"{type(error).__name__}: {error}".split()),
            remedy="check bucket, credentials, endpoint and network, then run the same again",
        )


def _written_at(info: Mapping[str, Any]) -> float | None:
    """Each client of fsspec has a word of its own for the time of the last write."""
    value = next((info[word] for word in WRITTEN_AT if info.get(word) is not None), None)
    if isinstance(value, str):  # Google's, in ISO 8601
        with suppress(ValueError):
            value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else None
