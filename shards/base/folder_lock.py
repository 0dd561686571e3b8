"""An output folder: one that can be written, and one run at a time in it."""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shards.base.errors import UsageError

LOCK_FILE = ".lock"
TRIES, PAUSE_SECONDS = 5, 0.02
"""Who only asks whether a folder is held (:func:`is_held`) holds it for an instant itself."""


def require_writable(directory: Path) -> None:
    """Make ``directory``, or refuse it, before the work whose results it is for.

    Raises:
        UsageError: When it is no folder, or nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        got, remedy = error.strerror or error, "give another --out"
        raise UsageError("cannot write there", where=directory, got=got, remedy=remedy) from error


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold ``directory`` for one run.

    Raises:
        UsageError: When another process holds it, or nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / LOCK_FILE, "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        where, got = error.filename or directory, error.strerror
        remedy = "give another --out"
        raise UsageError("cannot write there", where=where, got=got, remedy=remedy) from error
    with lock as file:
        if not any(_locked(file, fcntl.LOCK_EX, attempt) for attempt in range(TRIES)):
            remedy = "wait for it, or give another --out"
            raise UsageError("another run is writing here", where=directory, remedy=remedy)
        yield


def is_held(directory: Path) -> bool | None:
    """Whether a process holds ``directory``; None where the file system cannot tell."""
    try:
        with open(directory / LOCK_FILE) as file:
            return not _locked(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _locked(file: IO[str], kind: int, attempt: int = 0) -> bool:
    """Whether the lock is ours now; it goes when the file is closed."""
    if attempt:
        time.sleep(PAUSE_SECONDS)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
