"""Micro-batches on their way to the device: the next one is copied while one is computed on.

On a GPU the copies go from pinned memory on a stream of their own, so neither the host waits for
them nor the kernels before them. At most two micro-batches are on the device. Elsewhere each is
moved when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.objective.batch import Batch

Coming = tuple[Batch, Any]
"""A part and the event of its copy."""


class CopiesAhead:
    """The parts of one batch after another, on a device.

    Args:
        device: Where they are computed on.
        size: Rows of a part; None keeps batches whole.
    """

    def __init__(self, device: torch.device, size: int | None) -> None:
        self.device, self.size = device, size
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._announced: tuple[Batch, Iterator[Batch], Coming] | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether there is something to gain by :meth:`announce`."""
        return self._stream is not None

    def announce(self, batch: Batch) -> None:
        """The batch whose parts will be asked for next: the first of them sets out now."""
        if self._stream is not None:
            parts = batch.micro_batches(self.size)
            self._announced = batch, parts, self._send(next(parts))

    def of(self, batch: Batch) -> Iterator[tuple[Batch, bool]]:
        """The parts of a batch on the device in turn, and whether each is the last."""
        if self._stream is None:
            num_parts = 1 if self.size is None else max(1, -(-batch.num_rows // self.size))
            for index, part in enumerate(batch.micro_batches(self.size)):
                yield part.to(self.device), index == num_parts - 1
            return
        if self._announced is None or self._announced[0] is not batch:
            self.announce(batch)
        assert self._announced is not None
        _, parts, coming = self._announced
        self._announced = None
        for following in parts:
            sent = self._send(following)
            yield self._arrived(coming), False
            coming = sent
        yield self._arrived(coming), True

    def _send(self, part: Batch) -> Coming:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            return part.to(self.device), self._stream.record_event()

    def _arrived(self, coming: Coming) -> Batch:
        """The part, for the stream that computes: it waits for the copy, and the memory for it."""
        part, copied = coming
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(copied)
        for tensor in _tensors(part):
            tensor.record_stream(computing)
        return part


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors on a GPU within dataclasses and dictionaries."""
    if isinstance(value, Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
