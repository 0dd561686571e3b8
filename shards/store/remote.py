"""A store at an fsspec URL (``s3://``, ``gs://``, ``memory://`` ...), read through a local cache.

Object stores replace a file atomically but have neither rename nor locks: claims are leases. Where
a client can only look first and then write (webhdfs, hdfs, ftp), replacing a file is not atomic
either: a reader may meet a part of one, which no record vouches for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from shards.atomic import FileRecord
from shards.errors import GdistillError, UsageError, safe_name

TAKEOVER = "~"
LEASE_SECONDS = 120.0
POLL_SECONDS = 0.5
SETTLE_SECONDS = 1.0
"""Before a claim is read back: what looking and writing take at most, in general."""


class Leases:
    """Claims at a URL: an object that its holder renews; one that is no longer renewed is void.

    A claim whose holder has ended on this machine is void too. Should two writers ever hold one
    claim (a clock far off), they write the same bytes: a shard is a function of its inputs.

    S3 and fsspec's memory create a file only if there is none, in one step, so exactly one process
    gets a claim (an S3 server that ignores ``If-None-Match`` lets two have it that look within a
    request of each other). Elsewhere a claim is read back after a pause, and who was overwritten
    has lost it: two hold it only if one was held up between look and write for longer than that.

    Args:
        place: Where they lie.
        lease_seconds: A claim is void that was last renewed so long ago.
    """

    def __init__(self, place: RemoteLocation, lease_seconds: float) -> None:
        self._place, self._lease_seconds = place, lease_seconds

    @contextmanager
    def hold(self, name: str, wait: bool) -> Iterator[bool]:
        """Hold ``name`` against every other process while the context lasts; False if taken."""
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
                self._place.delete(name)

    def _take(self, name: str, owner: Mapping[str, Any]) -> bool:
        """Create the claim, or take over one that is void."""
        # Looked at first, as some clients would overwrite a claim that is there.
        held = self._held(name)
        if held is not None:
            return self._is_void(held) and self._take_over(name, held, owner)
        if not self._place.create(name, self._bytes(owner)):
            return False
        if self._place.creates_exclusively:
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
            self._place.write(name, self._bytes(owner))
            return True
        finally:
            self._place.delete(takeover)

    def _held(self, name: str) -> dict[str, Any] | None:
        """What a claim says, empty if it is no claim of ours; None if it is gone."""
        try:
            value = json.loads(self._place.read(name))
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
            return has_ended(held) or time.time() - held["renewed"] > self._lease_seconds
        except (ValueError, KeyError, TypeError):  # not a claim that any version of ours wrote
            return True

    def _renew(self, name: str, owner: Mapping[str, Any], released: threading.Event) -> None:
        while not released.wait(self._lease_seconds / 4):
            # A renewal that fails is tried again; only if all fail does the claim run out.
            with suppress(Exception):
                if self._holder(name) != owner["id"]:  # we were too slow; it is another's now
                    return
                self._place.write(name, self._bytes(owner))

    def _bytes(self, owner: Mapping[str, Any]) -> bytes:
        return json.dumps({**owner, "renewed": time.time()}).encode()


# Which process wrote a note, and whether it has ended: told only where that is certain.
#
# A host name and a process id do not name a process. Containers share host names or have process
# ids of their own, and an id is given anew. So a note also has the boot of its kernel, the
# process-id namespace and the time at which the process started; where the system tells none of
# these, nothing is concluded from a note.


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


def this_process() -> dict[str, Any]:
    """What names this process; JSON values, None for what the system does not tell."""
    own = {"host": socket.gethostname(), "pid": os.getpid()}
    return {**own, "pid_space": _pid_space(), "started": _start_time(os.getpid())}


def has_ended(process: Mapping[str, Any]) -> bool:
    """Whether a process, as :func:`this_process` named it, has ended here; False if in doubt."""
    space, started = process.get("pid_space"), process.get("started")
    if space is None or started is None or space != _pid_space():
        return False  # of another machine or container: its ids mean nothing here
    pid = process.get("pid")
    if not isinstance(pid, int) or pid < 1:
        return False
    with suppress(PermissionError, OverflowError):  # another user's; no process id at all
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
    now = _start_time(pid)
    return now is not None and now != started


def _pid_space() -> str | None:
    """Within what a process id names one process at a time."""
    with suppress(OSError):
        return f"{BOOT_ID.read_text().strip()} {os.readlink(PID_NAMESPACE)}"
    return None


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of a process, "ended" if it only waits to be reaped."""
    with suppress(OSError, IndexError):
        # The command's name, in parentheses, may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "ended" if fields[0] in "ZX" else fields[19]
    return None


# Local copies of remote files, named by the hash of their content.
#
# A copy is made, checked and only then given its name, so what is in the cache is right; a name
# says nothing of where the content came from, so stores share it. Only copies are ever removed: the
# cache writes and deletes nothing but files of its own form in a folder of its own.


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
            expected = f"expected {record.num_bytes} bytes"
            raise DamagedCopy(f"{len(data)} bytes of another hash, {expected}")
        try:
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
        except OSError as error:
            what, got = "cannot write the cache of remote files", error.strerror or error
            remedy = f"free space, or set {FOLDER_VARIABLE} or {SIZE_VARIABLE}"
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
                status = path.stat()
                is_old = time.time() - status.st_mtime > _ABANDONED_SECONDS
                if _COPY.fullmatch(path.name):
                    copies.append((status.st_mtime_ns, status.st_size, path))
                elif _UNFINISHED.fullmatch(path.name) and is_old:
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


CLAIMS = ".claims"
EXCLUSIVE_CREATION = {"s3", "s3a", "memory"}
"""Protocols whose clients create a file only if there is none, whoever else tries."""
WRITTEN_AT = ("LastModified", "last_modified", "updated", "mtime", "created")
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
        names = (path.rpartition("/")[2] for path in found)
        return sorted(name for name in names if TAKEOVER not in name)

    def claim(self, name: str, *, wait: bool) -> AbstractContextManager[bool]:
        return self._leases.hold(f"{CLAIMS}/{name}", wait)

    @property
    def creates_exclusively(self) -> bool:
        """Whether :meth:`create` looks and writes in one step."""
        protocol = self._files.protocol
        return bool(EXCLUSIVE_CREATION & {*([protocol] if isinstance(protocol, str) else protocol)})

    def create(self, name: str, data: bytes) -> bool:
        """Write the file if there is none; whether there was none."""
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
        except Exception as error:  # every storage client has exceptions of its own
            absent = isinstance(error, FileNotFoundError) and NO_BUCKET not in str(error)
            if absent and verb == "read":
                raise FileNotFoundError(name) from error
            what, where = f"cannot {verb} the remote store", f"{self.url}/{name}".rstrip("/")
            got = " ".join(f"{type(error).__name__}: {error}".split())
            remedy = "check bucket, credentials, endpoint and network, then run the same again"
            raise GdistillError(what, where=where, got=got, remedy=remedy) from error


def _written_at(info: Mapping[str, Any]) -> float | None:
    """Each client of fsspec has a word of its own for the time of the last write."""
    value = next((info[word] for word in WRITTEN_AT if info.get(word) is not None), None)
    if isinstance(value, str):  # Google's, in ISO 8601
        with suppress(ValueError):
            value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else None
