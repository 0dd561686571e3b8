"""Many processes on one store: who does which shard first, and how a process is asked to stop.

There is no coordination but the ledger and the claims of shards. Every process begins with its
own share, then takes up what nobody is working on, so a killed or late worker leaves no gap; the
bytes of a shard do not depend on who writes it.
"""

from __future__ import annotations

import os
import signal
import threading
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
)
"""What torchrun, Open MPI and MPICH call a process's number; ``accelerate launch`` uses these."""


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
        if not 0 <= self.index < self.count:
            raise UsageError(
                "no such worker",
                where="--worker",
                got=f"{self.index} of {self.count}",
                expected=f"0 to {self.count - 1}, with --workers",
            )

    @classmethod
    def from_environment(
        cls, index: int | None, count: int | None, environment: Mapping[str, str] = os.environ
    ) -> Worker:
        """The options if given, else what the launcher (accelerate, torchrun, mpirun) tells.

        Raises:
            UsageError: If only one of the two options is given, or they do not fit.
        """
        if (index is None) != (count is None):
            raise UsageError("--worker and --workers belong together")
        if index is not None and count is not None:
            return cls(index, count)
        for rank, size, local_rank in RANKS:
            if rank in environment and size in environment:
                local = environment.get(local_rank, environment[rank])
                return cls(int(environment[rank]), int(environment[size]), int(local))
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
        return [
            item
            for shift in range(self.count)
            for item in items[(self.index + shift) % self.count :: self.count]
        ]


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
