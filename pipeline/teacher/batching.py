"""How many rows go through the teacher at once: by memory, backing off when memory runs out."""

from __future__ import annotations

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
    return max(1, min(budget // row_bytes, most // row_length))


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

    def halve(self, error: BaseException) -> None:
        """Back off, or give up at one row.

        Raises:
            GdistillError: If a single row does not fit.
        """
        if self.rows == 1:
            raise one_row_too_many(error) from error
        self.rows //= 2
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


def in_halves(work: Callable[[slice], None], part: slice) -> None:
    """Do ``work`` on a range of rows; where memory runs out, on one half after the other.

    Raises:
        GdistillError: If a single row does not fit.
    """
    if _fits(work, part):
        return
    middle = (part.start + part.stop) // 2
    torch.cuda.empty_cache()
    in_halves(work, slice(part.start, middle))
    in_halves(work, slice(middle, part.stop))


def _fits(work: Callable[[slice], None], part: slice) -> bool:
    """Do ``work``; False where memory runs out.

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
        return False
    return True
