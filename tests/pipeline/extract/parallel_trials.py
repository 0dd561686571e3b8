"""Extraction by several processes, slowed down enough to be stopped in the middle."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipeline.run import run_extraction
from pipeline.settings import Worker, resolve_request
from pipeline.teacher import RawLogits, Teacher
from shards.errors import GdistillError
from shards.store.store import ShardStore
from tests.pipeline.extract_cases import contents, run

PAUSE_SECONDS = 0.15
_context = get_context("forkserver")
_context.set_forkserver_preload(["tests.pipeline.extract.parallel_trials"])


@dataclass(frozen=True)
class Trial:
    """A run in a folder of its own, and the store that one process makes of it."""

    out: Path
    given: dict[str, Any]
    reference: dict[str, bytes]

    def start(self, index: int = 0, count: int = 1, pause: float = 0) -> BaseProcess:
        """A worker in a process of its own; its exit code is the command's."""
        arguments = (self.out, self.given, Worker(index, count), pause)
        process = _context.Process(target=_work, args=arguments)
        process.start()
        return process

    def run(self, index: int = 0, count: int = 1) -> None:
        """A worker in this process."""
        run(self.out, self.given, Worker(index, count))

    def wait_for_shards(self, count: int) -> None:
        """Until that many shards are in the ledger."""
        while len(list(self.out.glob("store/ledger/*/*.json"))) < count:
            time.sleep(0.02)

    def unfinished(self) -> list[str]:
        store = ShardStore.open(self.out / "store", allow_incomplete=True)
        return [f"{shard.split}-{shard.index}" for shard in store.unfinished()]

    def require_bytes_of_one(self) -> None:
        assert contents(self.out / "store") == self.reference


def end(process: BaseProcess) -> int | None:
    """Wait for a worker; its exit code."""
    process.join()
    return process.exitcode


def _work(out: Path, given: dict[str, Any], worker: Worker, pause: float) -> None:
    forward = Teacher.forward

    def slow(self: Teacher, *arguments: Any) -> RawLogits:
        time.sleep(pause)
        return forward(self, *arguments)

    Teacher.forward = slow  # type: ignore[method-assign]
    try:
        run_extraction(resolve_request(out, given), worker)
    except GdistillError as error:
        (out / f"error-{worker.index}.txt").write_text(str(error))
        sys.exit(error.exit_code)
