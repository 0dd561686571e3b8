"""How many rows go through the teacher at once: by memory, backing off when memory runs out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from shards.base import GdistillError, first_line, stderr

Result = TypeVar("Result")

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 1 << 12, 1 << 15
CPU_BATCH_BYTES = 1 << 30
GPU_MEMORY_SHARE = 0.4
LARGEST_GPU_TENSOR = 2**31 - 1
"""Elements; beyond it kernels that count in 32 bits fail, or worse."""
FLOATS_PER_LOGIT = 6
"""Float32 tensors of the logits' size alive at once: two batches, their log-softmax, the codec's
temporaries."""


def automatic_batch_size(
    row_length: int, vocab_size: int, weight_bytes: int, device: torch.device
) -> int:
    """Rows of one forward pass. The same on every machine with the same device.

    Args:
        weight_bytes: Size of the teacher in memory.
    """
    budget, most = CPU_BATCH_BYTES, CPU_BATCH_TOKENS
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        budget = max(1 << 30, int(GPU_MEMORY_SHARE * (total - weight_bytes)))
        most = GPU_BATCH_TOKENS
    row_bytes = row_length * vocab_size * 4 * FLOATS_PER_LOGIT
    most_rows = min(most // row_length, largest_batch(row_length * vocab_size, device))
    return max(1, min(budget // row_bytes, most_rows))


def largest_batch(row_elements: int, device: torch.device) -> int:
    """Rows whose tensors a device's kernels can index; at least one, whatever its length."""
    if device.type != "cuda":
        return sys.maxsize
    return max(1, LARGEST_GPU_TENSOR // row_elements)


@dataclass
class BatchSize:
    """Rows per batch, halved for the rest of the run whenever memory runs out.

    Batches begin at the same rows in every run, whoever does the shard: float rounding may depend
    on what shares a batch. Backing off is the one thing that moves the borders.
    """

    rows: int

    def parts(self, num_rows: int) -> Iterator[slice]:
        """Consecutive parts of 0 .. num_rows - 1, at most ``rows`` each."""
        start = 0
        while start < num_rows:
            stop = min(start + self.rows, num_rows)
            yield slice(start, stop)
            start = stop

    def halve(self, error: BaseException, num_rows: int | None = None) -> None:
        """Back off, or give up at one row.

        Args:
            num_rows: Rows of the batch that did not fit, where it was a smaller one.

        Raises:
            GdistillError: If a single row does not fit.
        """
        failed = min(self.rows, num_rows or self.rows)
        if failed == 1:
            raise one_row_too_many(error) from error
        self.rows = failed // 2
        stderr.print(f"out of memory: batches of {self.rows} rows from here on")


def one_row_too_many(error: BaseException) -> GdistillError:
    """What to tell when there is nothing left to halve."""
    return GdistillError(
        "out of memory with a batch of one row",
        got=first_line(error),
        remedy="use shorter rows, --dtype bfloat16 or a larger device",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may help."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, Exception) and should_reduce_batch_size(error)


def in_batches(work: Callable[[slice], None], num_rows: int, size: BatchSize) -> None:
    """Do ``work`` on all rows, batch by batch; where memory runs out, the size is halved for good.

    Raises:
        GdistillError: If a single row does not fit.
    """
    start = 0
    while start < num_rows:
        part = slice(start, min(start + size.rows, num_rows))
        failure = _failure(work, part)
        if failure is None:
            start = part.stop
        else:
            torch.cuda.empty_cache()
            size.halve(failure, part.stop - part.start)


def _failure(work: Callable[[slice], None], part: slice) -> GdistillError | None:
    """Do ``work``; what to tell where memory ran out.

    The retry must not happen while the error is handled: its traceback holds every tensor of the
    attempt that failed.
    """
    try:
        work(part)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if part.stop - part.start < 2:
            raise one_row_too_many(error) from error
        return one_row_too_many(error)
    return None
