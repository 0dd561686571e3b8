"""A store at an fsspec URL (``s3://``, ``gs://``, ``memory://`` ...), read through a local cache.

Object stores replace a file atomically but have neither rename nor locks. A claim is therefore an
object that its holder renews; one that is no longer renewed, or whose holder has ended on this
machine, is void. Should two writers ever hold one claim (a clock far off), they write the same
bytes: a shard is a function of its inputs.

What is guaranteed where: S3 and fsspec's memory create a file only if there is none, in one step,
so exactly one process gets a claim (an S3 server that ignores ``If-None-Match`` lets two have it
that look within a request of each other). Elsewhere (webhdfs, hdfs, ftp) a client can only look
first and then write: there a claim is read back after a pause, and who was overwritten has lost it.
Two hold it only if one was held up between look and write for longer than the pause. Nor is
replacing a file atomic there: a reader may meet a part of one, which no record vouches for.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from zarr.abc.store import Store
from zarr.storage import FsspecStore

from shards.base import GdistillError, UsageError, has_ended, this_process
from shards.storage.file_cache import FileCache
from shards.store import FileRecord

CLAIMS, TAKEOVER = ".claims", "~"
LEASE_SECONDS = 120.0
POLL_SECONDS = 0.5
EXCLUSIVE_CREATION = {"s3", "s3a", "memory"}
"""Protocols whose clients create a file only if there is none, whoever else tries."""
SETTLE_SECONDS = 1.0
"""Before a claim is read back, elsewhere: what looking and writing take at most, in general."""
NO_BUCKET = "bucket does not exist"
"""How the absence of the whole place differs, in a client's words, from that of a file."""


class RemoteLocation:
    """A place that fsspec can reach.

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
        self._lease_seconds = lease_seconds
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

    def _path(self, name: str) -> str:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise UsageError("a file name leaves the store", where=name)
        return f"{self._root}/{name}" if name else self._root

    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""
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
        """Remove the file if it is there."""
        with self._explained(name, "delete"), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def size(self, name: str) -> int | None:
        """Bytes of the file, None if there is none."""
        with self._explained(name, "look at"):
            try:
                return int(self._files.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Every file below ``prefix`` with its size; claims left out."""
        with self._explained(prefix, "list"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._path(prefix), detail=True)
            except FileNotFoundError:
                return {}
        start = len(self._root.rstrip("/")) + 1
        names = {path[start:]: int(info["size"]) for path, info in found.items()}
        return {name: size for name, size in names.items() if not name.startswith(f"{CLAIMS}/")}

    def local_file(self, name: str, record: FileRecord) -> Path:
        """A local copy of the file, checked against its record.

        Raises:
            DamagedCopy: If the file at the URL is not what the record says.
            FileNotFoundError: If there is none.
        """
        return self.cache.fetch(record, lambda: self.read(name))

    def discard_altered_copy(self, record: FileRecord) -> bool:
        """Drop the cached copy of a file if it is not what ``record`` says; whether it was so."""
        return self.cache.discard_altered(record)

    def claims(self) -> list[str]:
        """Names held now, or left behind by a process that was killed."""
        with self._explained(CLAIMS, "list"):
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._path(CLAIMS))
            except FileNotFoundError:
                return []
        names = (path.rpartition("/")[2] for path in found)
        return sorted(name for name in names if TAKEOVER not in name)

    def claim(self, name: str, *, wait: bool) -> AbstractContextManager[bool]:
        """Hold ``name`` against every other process while the context lasts; False if taken."""
        return self._claim(f"{CLAIMS}/{name}", wait)

    @contextmanager
    def _claim(self, name: str, wait: bool) -> Iterator[bool]:
        owner = {**this_process(), "id": uuid.uuid4().hex}
        while not (mine := self._take(name, owner)) and wait:
            time.sleep(POLL_SECONDS)
        if not mine:
            yield False
            return
        released = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(name, owner, released), daemon=True)
        renewal.start()
        try:
            yield True
        finally:
            released.set()
            renewal.join()
            if self._holder(name) == owner["id"]:
                self.delete(name)

    def _take(self, name: str, owner: Mapping[str, Any]) -> bool:
        """Create the claim object, or take over one that is void."""
        with self._explained(name, "claim"):
            path = self._path(name)
            self._make_folder(path)
            # Looked at first, as some clients would overwrite a claim that is there.
            held = self._held(name)
            if held is not None:
                return self._is_void(held) and self._take_over(name, held, owner)
            try:
                self._files.pipe_file(path, _claim_bytes(owner), mode="create")
            except FileExistsError:
                return False
            return self._was_first(name, owner)

    def _was_first(self, name: str, owner: Mapping[str, Any]) -> bool:
        """Whether the claim just written is ours and stays so; see the top of this module."""
        protocol = self._files.protocol
        if EXCLUSIVE_CREATION & {*([protocol] if isinstance(protocol, str) else protocol)}:
            return True
        time.sleep(SETTLE_SECONDS)
        return self._holder(name) == owner["id"]

    def _take_over(self, name: str, void: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
        """Put our claim in a void one's place; of several processes that try, one does.

        Whoever may do it holds a claim on the void claim's id, and looks again before writing: by
        then another may have taken over and let go of that second claim. One left by a process
        killed in between becomes void itself.
        """
        takeover = f"{name}{TAKEOVER}{void.get('id', '')}"
        if not self._take(takeover, owner):
            return False
        try:
            if self._held(name) != void:
                return False
            self._files.pipe_file(self._path(name), _claim_bytes(owner))
            return True
        finally:
            self.delete(takeover)

    def _held(self, name: str) -> dict[str, Any] | None:
        """What a claim says, empty if it is no claim of ours; None if it is gone."""
        try:
            value = json.loads(self.read(name))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _holder(self, name: str) -> str | None:
        return (self._held(name) or {}).get("id")

    def _is_void(self, held: Mapping[str, Any]) -> bool:
        """Whether a claim's holder has died here, or has stopped renewing it elsewhere."""
        try:
            if has_ended(held):
                return True
            return time.time() - held["renewed"] > self._lease_seconds
        except (ValueError, KeyError, TypeError):  # not a claim that any version of ours wrote
            return True

    def _renew(self, name: str, owner: Mapping[str, Any], released: threading.Event) -> None:
        while not released.wait(self._lease_seconds / 4):
            # A renewal that fails is tried again; only if all fail does the claim run out.
            with suppress(Exception):
                if self._holder(name) != owner["id"]:  # we were too slow; it is another's now
                    return
                self._files.pipe_file(self._path(name), _claim_bytes(owner))

    def zarr_store(self) -> Store:
        """The place as a read-only Zarr store."""
        return FsspecStore.from_url(self.url, storage_options=self._options, read_only=True)

    @contextmanager
    def _explained(self, name: str, verb: str) -> Iterator[None]:
        """Whatever the storage client raises as one line; absence stays FileNotFoundError."""
        try:
            yield
        except (FileExistsError, GdistillError):
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


def _claim_bytes(owner: Mapping[str, Any]) -> bytes:
    return json.dumps({**owner, "renewed": time.time()}).encode()
