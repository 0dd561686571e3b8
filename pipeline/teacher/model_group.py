"""A teacher cut over several processes: the first works as if alone, the others compute along.

torchrun starts the processes, transformers cuts the layers. Rows, shards and the store are the
first process's business; before every forward pass it sends the rows to the others, which run the
same pass and drop what comes out. Messages go over the CPU (gloo) and may be hours apart; whoever
dies is noticed by torchrun, which ends the rest.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.teacher.model import Teacher
from shards.errors import GdistillError, UsageError
from shards.language_model.spread import Spread

Load = Callable[[Spread], Teacher]
END, LOAD, SCORE = range(3)
PATIENCE = timedelta(days=30)
"""Stage 1 may take long, and only the first process is at it."""


class ModelGroup:
    """The processes that hold one model together; see :meth:`join`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._in_pass = False

    @classmethod
    def join(cls, environment: Mapping[str, str] = os.environ) -> ModelGroup:
        """The group that torchrun describes.

        Raises:
            UsageError: If it describes none, or one process only.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        values = [environment.get(name, "") for name in names]
        if not all(value.isdigit() for value in values) or int(values[1]) < 2:
            raise UsageError(
                "a teacher is cut over the processes that torchrun starts",
                where="teacher.tensor_parallel",
                got=", ".join(f"{n}={v or 'unset'}" for n, v in zip(names, values, strict=True)),
                expected="2 processes or more",
                remedy="torchrun --nproc-per-node N -m pipeline.cli ..., one process a GPU",
            )
        rank, size, local_rank = map(int, values)
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=PATIENCE)
        return cls(rank, size)

    @property
    def is_leader(self) -> bool:
        """Whether this is the process that works as if alone."""
        return self.rank == 0

    def load(self, load: Load) -> Teacher:
        """The leader's teacher; the others load their parts of it at the same time."""
        self._tell(LOAD)
        with self._together():
            teacher = load(Spread(tensor_parallel=self.size))
        teacher.num_processes, teacher.scorer = self.size, self._scorer(teacher)
        return teacher

    def _scorer(self, teacher: Teacher) -> Callable[..., Any]:
        def score(input_ids: Tensor, **options: Any) -> Any:
            if self._in_pass:
                raise GdistillError(
                    "a forward pass broke off in one of the processes that share the teacher",
                    where="teacher.tensor_parallel",
                    remedy="run the same command again with a smaller --batch-size",
                )
            self._tell(SCORE, *input_ids.shape)
            dist.broadcast(input_ids.cpu().contiguous(), 0)
            with self._together():
                return teacher.model(input_ids=input_ids, **options)

        return score

    @torch.inference_mode()
    def follow(self, load: Load) -> None:
        """Do what the leader does until it ends."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader decides when the group stops
        teacher = None
        while (message := self._hear())[0] != END:
            if message[0] == LOAD:
                teacher = load(Spread(tensor_parallel=self.size))
                continue
            assert teacher is not None
            rows = torch.empty(message[1:], dtype=torch.int64)
            dist.broadcast(rows, 0)
            teacher.forward_only(rows)
        dist.destroy_process_group()

    def end(self) -> None:
        """Let the others go; where they hang in a pass that broke off, torchrun ends them."""
        if self._in_pass:
            return
        with suppress(RuntimeError):  # they have gone already
            self._tell(END)
            dist.destroy_process_group()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all processes must come out of, or none can go on."""
        self._in_pass = True
        yield
        self._in_pass = False

    def _tell(self, kind: int, num_rows: int = 0, num_tokens: int = 0) -> None:
        dist.broadcast(torch.tensor([kind, num_rows, num_tokens]), 0)

    def _hear(self) -> list[int]:
        message = torch.zeros(3, dtype=torch.int64)
        dist.broadcast(message, 0)
        return message.tolist()
