"""One thread that works through tasks in order, with a limit on how many are unfinished.

Torch and compressors release the interpreter lock, so a thread is enough to let encoding,
compression and writing run while the next forward pass computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

Task = tuple[Callable[..., object], tuple[Any, ...], bool]


class Background:
    """A bounded, ordered worker thread. The first error of a task is raised at the next call.

    Leaving the context finishes what was handed over; after a task has failed, nothing more.

    Args:
        name: Of the thread.
        limit: Most unfinished tasks that were reserved.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._slots = threading.BoundedSemaphore(limit)
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tasks.put(None)
        self._thread.join()
        if error is None:
            self._raise()

    def reserve(self) -> None:
        """Wait until there is room for one more task."""
        self._slots.acquire()
        if self._error is not None:
            self._slots.release()
            self._raise()

    def cancel_reservation(self) -> None:
        """Give back room that was reserved and is not needed."""
        self._slots.release()

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Hand over a task for which room was reserved."""
        self._tasks.put((function, arguments, True))

    def append(self, function: Callable[..., object], *arguments: Any) -> None:
        """Hand over a small task that needs no reservation."""
        self._tasks.put((function, arguments, False))

    def wait(self) -> None:
        """Until every task is done."""
        done = threading.Event()
        self._tasks.put((done.set, (), False))
        while not done.wait(0.2):
            if not self._thread.is_alive() or self._error is not None:
                break
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, arguments, reserved = task
            try:
                if self._error is None:
                    function(*arguments)
            except BaseException as error:
                self._error = error
            finally:
                del task, function, arguments
                if reserved:
                    self._slots.release()
