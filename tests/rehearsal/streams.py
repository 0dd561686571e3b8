"""Streams of the pretended device: who may read what, and whose memory may be given away.

Every operation is computed at once, so nothing is ever late here. What is kept is the order that a
GPU would be told of: an operation may read what its own stream wrote, and of another stream what it
has waited for; memory that one stream took and another uses must be recorded for the other, or it
is given away while that one still reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Event:
    """All that a stream had done and seen at a moment."""

    def __init__(self, seen: dict[int, int]) -> None:
        self.seen = seen


class Stream:
    """Operations in order; ``waited`` is told when the host waits for them."""

    waited: Callable[[str], None] = staticmethod(lambda kind: None)  # type: ignore[assignment]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seen: dict[int, int] = {id(self): 0}

    def record_event(self, *_: Any) -> Event:
        return Event(dict(self.seen))

    def wait_event(self, event: Event) -> None:
        for stream, time in event.seen.items():
            self.seen[stream] = max(time, self.seen.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        Stream.waited("stream")


DEFAULT = Stream()
_local = threading.local()


def current_stream(*_: Any) -> Stream:
    return getattr(_local, "stream", DEFAULT)


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before, _local.stream = current_stream(), chosen
    try:
        yield
    finally:
        _local.stream = before


class Ledger:
    """Which stream took and last wrote each storage, and for whom it is kept."""

    def __init__(self) -> None:
        self.owners: dict[int, Stream] = {}
        self.written: dict[int, tuple[Stream, int]] = {}
        self.recorded: set[tuple[int, int]] = set()
        self.lent: dict[tuple[int, int], str] = {}

    def run(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """An operation on the current stream.

        Raises:
            RuntimeError: If it reads what another stream may still be writing.
        """
        now = current_stream()
        now.seen[id(now)] += 1
        read = {_place(tensor) for tensor in inputs}
        for place in read - {0}:
            writer, time = self.written.get(place, (now, 0))
            if writer is not now and now.seen.get(id(writer), 0) < time:
                raise RuntimeError(f"{name} reads what another stream may still be writing")
            if self.owners.get(place, now) is not now and (place, id(now)) not in self.recorded:
                self.lent[place, id(now)] = name
        in_place = name.endswith("_")
        for place in {_place(tensor) for tensor in outputs} - {0}:
            if place not in read:
                self.owners[place] = now
                self.recorded = {kept for kept in self.recorded if kept[0] != place}
            if place not in read or in_place:
                self.written[place] = now, now.seen[id(now)]

    def record(self, tensor: torch.Tensor, user: Stream) -> None:
        """``tensor.record_stream(user)``."""
        key = _place(tensor), id(user)
        self.recorded.add(key)
        self.lent.pop(key, None)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
