"""A store in a folder, and claims by flock: the kernel drops one when its process ends.

However that ends, so no claim can be stale. The claim's file is removed on release and, after a
kill, by the next process that takes it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from zarr.abc.store import Store
from zarr.storage import LocalStore

from shards.base import GdistillError, UsageError, fsync_path, make_folders
from shards.storage.file_record import FileRecord

CLAIMS = ".claims"


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


def _lock(path: Path, wait: bool) -> int | None:
    """The descriptor of the locked file at ``path``, None if another process holds it."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
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
                return descriptor
        os.close(descriptor)


def _unlock(path: Path, descriptor: int) -> None:
    """Remove the file while still holding it, then let go."""
    try:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # other claims are still there
            path.parent.rmdir()
    finally:
        os.close(descriptor)


@contextmanager
def file_claim(path: Path, wait: bool) -> Iterator[bool]:
    """Hold ``path`` while the context lasts; gives False if it is taken and ``wait`` is off."""
    descriptor = _lock(path, wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            _unlock(path, descriptor)
