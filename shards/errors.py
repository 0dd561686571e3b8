"""Errors a user can act on, and how a process is asked to end."""

from __future__ import annotations

import difflib
import posixpath
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

INTERRUPTED = "interrupted; run the same command again to resume"
STOP_CHECK_SECONDS = 0.2


def visible(text: str) -> str:
    """``text`` with what is no printable character spelt out (``\\x1b``, ``\\n``, ``\\u202e``).

    Names and settings that somebody else chose can then neither steer a terminal nor end a line.
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class GdistillError(Exception):
    """A failure told in one line. Commands print it and leave with ``exit_code``.

    Empty parts are left out of the line.

    Args:
        what: The failure in a few words.
        where: The file, field, row or option concerned.
        got: What was found there.
        expected: What should have been found.
        remedy: What the user can do about it.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, where: object = "", got: object = "", expected: object = "", remedy: str = ""
    ) -> None:
        self.what, self.where, self.got = what, str(where), str(got)
        self.expected, self.remedy = str(expected), remedy
        parts = [f"{what} [{self.where}]" if self.where else what]
        parts += [f"got {self.got}"] if self.got else []
        parts += [f"expected {self.expected}"] if self.expected else []
        parts += [remedy] if remedy else []
        super().__init__("; ".join(visible(" ".join(part.split())) for part in parts))


class UsageError(GdistillError):
    """The request itself is wrong (an option, a config key, a path): exit code 2."""

    exit_code = 2


class IntegrityError(GdistillError):
    """Stored data are missing, truncated or altered; nothing was returned from them."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", *, cutoff: float = 0.4) -> str:
    """A remedy that names the known name nearest to ``name``; ``otherwise`` if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else otherwise


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its type if it says nothing.

    Of a compiler's, which begins with which compiler it was, that of what went wrong in it.
    """
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def safe_name(name: str) -> str:
    """``name`` itself, if it means the same file below any folder, on any system; else a UsageError.

    No root, no ``..``, no ``.``, no doubled or closing slash, no backslash, no control character.
    """
    plain = (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and posixpath.normpath(name) == name
        and not name.startswith(("/", "../"))
        and "\\" not in name
        and name.isprintable()
        and all(len(part.encode()) <= 255 for part in name.split("/"))
    )
    if not plain:
        raise UsageError("a file name leaves the store", where=repr(name)[:120])
    return name


def path_inside(folder: Path, name: str) -> Path:
    """``folder / name`` for writing; a UsageError also where a link on the way leads out of ``folder``."""
    path = folder / safe_name(name)
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise UsageError("a file name leaves the store", where=path, got=path.parent.resolve())
    return path


class Stopped(GdistillError):
    """The process was asked to end before the work was done; its exit code is 128 + SIGTERM."""

    exit_code = 128 + signal.SIGTERM


class StopRequest:
    """Turns the first of some signals into a flag, ``signal_number``; a second SIGINT interrupts at once."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.signal_number: int | None = None
        self._numbers = numbers

    def check(self) -> None:
        """Raises :class:`Stopped` if this process was asked to stop."""
        if self.signal_number is not None:
            raise Stopped(f"stopped by {signal.Signals(self.signal_number).name}")

    def pause(self, seconds: float) -> None:
        """Sleep; raises :class:`Stopped` as soon as this process is asked to stop."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, STOP_CHECK_SECONDS))
        self.check()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Signals are caught within the context (of the main thread; elsewhere nothing is)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.signal(number, self._receive) for number in self._numbers}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
