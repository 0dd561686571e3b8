"""Claims: at most one process works on a named thing at a time, and a dead one's claim is void.

On a file system a claim is an flock on a small file. The kernel drops it when the process ends,
however it ends, so no claim can be stale; the file itself is removed on release and, after a kill,
by the next process that takes it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
