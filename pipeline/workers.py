"""Many processes on one store: who does which shard first, and how a process is asked to stop.

There is no coordination but the ledger and the claims of shards. Every process begins with its
own share, then takes up what nobody is working on. What others hold it comes back to at the end,
and stays until each such shard is finished or, its holder dead, can be taken over: a process that
ends without an error leaves a complete store. The bytes of a shard do not depend on who writes it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from shards.errors import GdistillError, UsageError

Item = TypeVar("Item")

RANKS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""A process's number, how many there are, its number on its machine: as torchrun (and
``accelerate launch``), Open MPI, MPICH and srun call them."""
STOP_CHECK_SECONDS = 0.2


@dataclass(frozen=True)
class Worker:
    """One of ``count`` processes.

    Attributes:
        index: 0 .. count - 1; number 0 shows progress.
        count: Processes at work on the same store.
        local_index: Number among the processes of this machine: chooses the GPU.
    """

    index: int = 0
    count: int = 1
    local_index: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            expected = "at least 1"
            raise UsageError(
                "no workers at all", where="--workers", got=self.count, expected=expected
            )
        if not 0 <= self.index < self.count:
            got, expected = f"{self.index} of {self.count}", f"0 to {self.count - 1}"
            raise UsageError("no such worker", where="--worker", got=got, expected=expected)

    @classmethod
    def from_environment(
        cls, index: int | None, count: int | None, environment: Mapping[str, str] = os.environ
    ) -> Worker:
        """The options if given, else what the launcher (torchrun, mpirun, srun) says.

        Raises:
            UsageError: If only one of the two options is given, they do not fit, or a variable
                of the launcher is no number.
        """

        def number(name: str) -> int:
            try:
                return int(environment[name])
            except ValueError as error:
                raise UsageError(
                    "a launcher's variable is no number",
                    where=f"environment variable {name}",
                    got=repr(environment[name]),
                    remedy="unset it, or give --worker and --workers",
                ) from error

        if (index is None) != (count is None):
            raise UsageError("--worker and --workers belong together")
        if index is not None and count is not None:
            local = next((name for *_, name in RANKS if name in environment), None)
            return cls(index, count, None if local is None else number(local))
        for rank, size, local_rank in RANKS:
            if rank in environment and size in environment:
                local = local_rank if local_rank in environment else rank
                return cls(number(rank), number(size), number(local))
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all."""
        return self.index == 0

    def device(self, name: str) -> str:
        """The device of this process: its own GPU where there are several."""
        import torch

        if self.local_index is None or name not in ("auto", "cuda"):
            return name
        if name == "auto" and not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{self.local_index % max(1, torch.cuda.device_count())}"

    def order(self, items: Sequence[Item]) -> list[Item]:
        """Own items first (every ``count``-th), then the others', starting with the next worker."""
        firsts = [(self.index + shift) % self.count for shift in range(self.count)]
        return [item for first in firsts for item in items[first :: self.count]]


class Stopped(GdistillError):
    """The process was asked to end before the work was done; its exit code is 128 + 15."""

    exit_code = 143


class StopRequest:
    """Notices SIGTERM; the work ends at the next check, with nothing half-written."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def check(self) -> None:
        """Raise :class:`Stopped` if the process was asked to end."""
        if self._event.is_set():
            raise Stopped("stopped by SIGTERM")

    def pause(self, seconds: float) -> None:
        """Sleep; raises :class:`Stopped` as soon as the process is asked to end.

        In short sleeps: waiting for the event itself could meet the handler, in the same thread,
        inside the event's lock.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, STOP_CHECK_SECONDS))
        self.check()

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """React to SIGTERM while the context lasts (in the main thread; else never)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self._event.set())
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, before)
