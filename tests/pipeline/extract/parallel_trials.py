"""Extraction by several processes, slowed down enough to be stopped in the middle."""

from __future__ import annotations

import sys
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipeline.run import run_extraction
from pipeline.settings import Worker, resolve_request
from pipeline.teacher import RawLogits, Teacher
from shards.errors import GdistillError

_context = get_context("forkserver")
_context.set_forkserver_preload(["tests.pipeline.extract.parallel_trials"])


def start(
    out: Path, given: dict[str, Any], worker: Worker, pause_seconds: float = 0
) -> BaseProcess:
    """A worker in a process of its own; its exit code is the command's."""
    process = _context.Process(target=_work, args=(out, given, worker, pause_seconds))
    process.start()
    return process


def _work(out: Path, given: dict[str, Any], worker: Worker, pause_seconds: float) -> None:
    forward = Teacher.forward

    def slow(self: Teacher, *arguments: Any) -> RawLogits:
        time.sleep(pause_seconds)
        return forward(self, *arguments)

    Teacher.forward = slow  # type: ignore[method-assign]
    try:
        run_extraction(resolve_request(out, given), worker)
    except GdistillError as error:
        (out / f"error-{worker.index}.txt").write_text(str(error))
        sys.exit(error.exit_code)


def end(process: BaseProcess) -> int | None:
    """Wait for a worker; its exit code."""
    process.join()
    return process.exitcode


def wait_for_shards(store: Path, count: int) -> None:
    """Until that many shards are in the ledger."""
    while len(list(store.glob("ledger/*/*.json"))) < count:
        time.sleep(0.02)
