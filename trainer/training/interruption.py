"""SIGTERM and Ctrl-C as a request to stop at the next step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Turns the first SIGTERM or SIGINT into a flag; a second SIGINT interrupts at once.

    Attributes:
        signal_number: The signal received; None while there is none.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None

    @property
    def is_pending(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal_number is not None

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
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
