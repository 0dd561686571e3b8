"""How many rows go through a model at once: what memory holds, less where memory runs out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from shards.base import GdistillError, first_line, stderr

LARGEST_GPU_TENSOR = 2**31 - 1
"""Elements; beyond it kernels that count in 32 bits fail, or worse."""


def largest_batch(row_elements: int, device: torch.device) -> int:
    """Rows whose tensors a device's kernels can index; at least one, whatever its length."""
    if device.type != "cuda":
        return sys.maxsize
    return max(1, LARGEST_GPU_TENSOR // row_elements)


def require_indexable(row_elements: int, device: torch.device, remedy: str) -> None:
    """Refuse rows of which a GPU's kernels cannot index one.

    Args:
        row_elements: Elements of the largest tensor of a row: tokens x vocabulary.
        device: Where it would be computed.
        remedy: What to do instead.

    Raises:
        GdistillError: For such a row.
    """
    if device.type == "cuda" and row_elements > LARGEST_GPU_TENSOR:
        raise GdistillError(
            "one row is too long for a GPU's kernels",
            where=str(device),
            got=f"{row_elements:,} logits of a row",
            expected=f"at most {LARGEST_GPU_TENSOR:,}, tokens x vocabulary",
            remedy=remedy,
        )


def memory_bytes(device: torch.device) -> int:
    """The memory that a device has, whoever else uses it; the host's for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
    from accelerate.utils.memory import should_reduce_batch_size  # slow to load

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
