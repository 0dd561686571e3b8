"""One run per output folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.base.errors import UsageError


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold ``directory`` for one run.

    Raises:
        UsageError: When another process holds it, or nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        where, got = error.filename or directory, error.strerror
        remedy = "give another --out"
        raise UsageError("cannot write there", where=where, got=got, remedy=remedy) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            remedy = "wait for it, or give another --out"
            raise UsageError(
                "another run is writing here", where=directory, remedy=remedy
            ) from error
        yield
