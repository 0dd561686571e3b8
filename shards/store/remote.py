"""A store at an fsspec URL (``s3://``, ``gs://``, ``memory://`` ...), read through a local cache.

Object stores replace a file atomically but have neither rename nor locks: claims are leases, objects that their
holder renews. One that is no longer renewed is void. Should two writers ever hold one claim (a clock far off), they
write the same bytes: a shard is a function of its inputs. Where a client can only look first and then write (webhdfs,
hdfs, ftp), replacing a file is not atomic either: a reader may meet a part of one, which no record vouches for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from shards.atomic import FileRecord
from shards.errors import GdistillError, UsageError, safe_name

LEASE_SECONDS = 120.0
POLL_SECONDS = 0.5
SETTLE_SECONDS = 1.0
"""Before a claim is read back: what looking and writing take at most, in general."""
FOLDER_VARIABLE = "GDISTILL_CACHE"
KEPT_FREE = 20
"""One part in so many of the disk is never filled with copies."""
_COPY = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{32}\.tmp")
_ABANDONED_SECONDS = 24 * 3600


class DamagedCopy(ValueError):
    """What was downloaded is not what the store's record says."""


@dataclass(frozen=True)
class FileCache:
    """A folder of local copies of remote files, named by the hash of their content.

    A copy is made, checked and only then given its name, so what is there is right, and stores share it. Where the
    disk fills, the least recently used copies go. Only files of this form are ever removed. Any number of processes
    may share the folder.
    """

    folder: Path

    @classmethod
    def default(cls) -> FileCache:
        """The cache named by ``GDISTILL_CACHE`` (``~/.cache/gdistill``)."""
        return cls(Path(os.environ.get(FOLDER_VARIABLE, "~/.cache/gdistill")).expanduser())

    def open(self, record: FileRecord, download: Callable[[], bytes]) -> int:
        """A descriptor of a copy of the file, downloaded if need be; the caller closes it.

        A descriptor and not a path: it can be read even if another process, in need of room, removes the copy.

        Raises:
            DamagedCopy: If the download has another size or hash than ``record``.
            GdistillError: If the cache cannot be written.
        """
        path = self.folder / record.sha256
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            if os.fstat(descriptor).st_size == record.num_bytes:
                with suppress(OSError):  # another user's copy, as good as ours
                    os.utime(descriptor)  # used now; eviction goes by this
                return descriptor
            os.close(descriptor)
        data = download()
        if not record.matches(data):
            raise DamagedCopy(f"{len(data)} bytes of another hash, expected {record.num_bytes} bytes")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(len(data))
            temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
            try:
                temporary.write_bytes(data)
                descriptor = os.open(temporary, os.O_RDONLY)
                os.replace(temporary, path)
                return descriptor
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            what, got = "cannot write the cache of remote files", error.strerror or error
            remedy = f"free space, or set {FOLDER_VARIABLE}"
            raise GdistillError(what, where=self.folder, got=got, remedy=remedy) from error

    def discard_altered(self, record: FileRecord) -> bool:
        """Remove the copy of a file if its content has changed since; whether it had."""
        path = self.folder / record.sha256
        with suppress(OSError):
            if not record.matches(path.read_bytes()):
                path.unlink(missing_ok=True)
                return True
        return False

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used copies, and what a killed download left, until ``num_bytes`` more fit."""
        disk = shutil.disk_usage(self.folder)
        short = num_bytes + disk.total // KEPT_FREE - disk.free
        if short <= 0:
            return
        found = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process removed it
                status = path.stat()
                is_abandoned = _UNFINISHED.fullmatch(path.name) and time.time() - status.st_mtime > _ABANDONED_SECONDS
                if is_abandoned or _COPY.fullmatch(path.name):
                    found.append((status.st_mtime_ns, status.st_size, path))
        for _, size, path in sorted(found):
            if short <= 0:
                return
            with suppress(PermissionError):  # another user's, in a folder that protects it
                path.unlink(missing_ok=True)
                short -= size


CLAIMS = ".claims"
EXCLUSIVE_CREATION = {"s3", "s3a", "memory"}
"""Protocols whose clients create a file only if there is none, whoever else tries."""
NO_BUCKET = "bucket does not exist"
"""How the absence of the whole place differs, in a client's words, from that of a file."""


class RemoteLocation:
    """A place that fsspec can reach; see :class:`~shards.store.location.LocalLocation`.

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
            what = f"stores at {scheme}:// need another package"
            remedy = "pip install 'gdistill[remote]' for S3, or fsspec's package for the scheme"
            raise UsageError(what, where=self.url, got=error, remedy=remedy) from error
        except ValueError as error:
            raise UsageError("unknown kind of store location", where=url, got=error) from error
        self._lease_seconds = lease_seconds

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
        with self._explained(prefix, "list"):
            self._files.invalidate_cache()
            try:
                top = self._path(prefix) if prefix else self._root
                found = self._files.find(top, detail=True)
            except FileNotFoundError:
                return {}
        start = len(self._root.rstrip("/")) + 1
        sizes = {path[start:]: int(info["size"]) for path, info in found.items()}
        return {name: size for name, size in sizes.items() if not name.startswith(f"{CLAIMS}/")}

    def open_file(self, name: str, record: FileRecord) -> int:
        """See ``LocalLocation``; DamagedCopy if the file at the URL is not what the record says."""
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
        return sorted(path.rpartition("/")[2] for path in found)

    @contextmanager
    def claim(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Hold ``name`` against every other process while the context lasts; False if taken."""
        file, owner = f"{CLAIMS}/{name}", uuid.uuid4().hex
        while not (mine := self._take(file, owner)) and wait:
            time.sleep(POLL_SECONDS)
        if not mine:
            yield False
            return
        released = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(file, owner, released), daemon=True)
        renewal.start()
        try:
            yield True
        finally:
            released.set()
            renewal.join()
            if self._holder(file) == owner:
                self.delete(file)

    def _take(self, file: str, owner: str) -> bool:
        """Create the claim, or write over one that is void.

        S3 and fsspec's memory create a file only if there is none, in one step. All else is read back after a pause,
        and who was overwritten has lost it.
        """
        held = self._held(file)
        if held is None:  # looked at first, as some clients would overwrite a claim that is there
            path = self._path(file)
            with self._explained(file, "write"):
                self._make_folder(path)
                try:
                    self._files.pipe_file(path, _claim_bytes(owner), mode="create")
                except FileExistsError:
                    return False
            protocol = self._files.protocol
            if EXCLUSIVE_CREATION & {*([protocol] if isinstance(protocol, str) else protocol)}:
                return True
        elif time.time() - held[1] <= self._lease_seconds:
            return False
        else:
            self.write(file, _claim_bytes(owner))
        time.sleep(SETTLE_SECONDS)
        return self._holder(file) == owner

    def _held(self, file: str) -> tuple[str, float] | None:
        """Who holds a claim and when it was renewed; nobody, never, of what is no claim; None if it is gone."""
        try:
            value = json.loads(self.read(file))
            return str(value["id"]), float(value["renewed"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return "", 0.0

    def _holder(self, file: str) -> str:
        return (self._held(file) or ("",))[0]

    def _renew(self, file: str, owner: str, released: threading.Event) -> None:
        while not released.wait(self._lease_seconds / 4):
            # A renewal that fails is tried again; only if all fail does the claim run out.
            with suppress(Exception):
                if self._holder(file) != owner:  # we were too slow; it is another's now
                    return
                self.write(file, _claim_bytes(owner))

    @contextmanager
    def _explained(self, name: str, verb: str) -> Iterator[None]:
        """Whatever the storage client raises as one line; absence stays FileNotFoundError."""
        try:
            yield
        except GdistillError:
            raise
        except Exception as error:  # every storage client has exceptions of its own
            absent = isinstance(error, FileNotFoundError) and NO_BUCKET not in str(error)
            if absent and verb == "read":
                raise FileNotFoundError(name) from error
            what, where = f"cannot {verb} the remote store", f"{self.url}/{name}".rstrip("/")
            got = " ".join(f"{type(error).__name__}: {error}".split())
            remedy = "check bucket, credentials, endpoint and network, then run the same again"
            raise GdistillError(what, where=where, got=got, remedy=remedy) from error


def _claim_bytes(owner: str) -> bytes:
    return json.dumps({"id": owner, "renewed": time.time()}).encode()
