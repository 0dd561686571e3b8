"""How a process is asked to end: SIGTERM and Ctrl-C, noticed between two pieces of work.

A command imports this module first: a Ctrl-C while the rest is still being imported is then one
line too. Nothing here waits for another library.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from shards.errors import GdistillError

STOP_CHECK_SECONDS = 0.2
INTERRUPTED = "interrupted; run the same command again to resume"


def _without_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(INTERRUPTED, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _without_traceback


class Stopped(GdistillError):
    """The process was asked to end before the work was done; its exit code is 128 + SIGTERM."""

    exit_code = 128 + signal.SIGTERM


class StopRequest:
    """Turns the first signal into a flag; a second SIGINT interrupts at once.

    Args:
        numbers: The signals that are caught.

    Attributes:
        signal_number: The signal received; None while there is none.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self.signal_number: int | None = None
        self._numbers = numbers

    @property
    def is_pending(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal_number is not None

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
        if self.is_pending and number == signal.SIGINT:
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
