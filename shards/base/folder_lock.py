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
        UsageError: When another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            remedy = "wait for it, or give another --out"
            raise UsageError(
                "another run is writing here", where=directory, remedy=remedy
            ) from error
        yield
