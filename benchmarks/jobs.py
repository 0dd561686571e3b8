"""The project's commands side by side, each with a log of its own and a share that is done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shards.console import progress_bar
from shards.errors import GdistillError, StopRequest, UsageError

POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Job:
    """One command of the project, its name first; what it prints goes to ``log``.

    ``share_done`` tells how much of it is done, from 0 to 1.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    share_done: Callable[[], float]


def script(name: str) -> str:
    """The console script installed beside the running interpreter.

    Raises:
        UsageError: When the project is not installed there.
    """
    path = Path(sys.executable).with_name(name)
    if not path.is_file():
        what, remedy = "a command of the project is not installed", "install it (make setup)"
        raise UsageError(what, where=path, got="no such file", remedy=remedy)
    return str(path)


def run_visibly(name: str, command: Sequence[str]) -> None:
    """Run one command with its own progress bars on this terminal.

    Raises:
        GdistillError: When it fails; its own error line is above.
    """
    code = subprocess.run([script(command[0]), *command[1:]], check=False).returncode
    if code != 0:
        raise GdistillError(f"{name} failed", where=" ".join(command), got=f"exit code {code}")


def run_jobs(jobs: Sequence[Job], num_parallel: int, report: Callable[[float, str], None]) -> None:
    """Run jobs, ``num_parallel`` at a time on as many threads each as the machine affords.

    ``report`` is told, a few times a second, how much of all is done (0 to 1), and what runs.

    Raises:
        GdistillError: When a job fails: its name, its log and the last line it printed. The others
            are ended; what they finished stays, and the same call goes on. A SIGTERM ends all too.
    """
    threads = max(1, (os.cpu_count() or 1) // num_parallel)
    environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | {"OMP_NUM_THREADS": str(threads)}  # none spins
    waiting, running, finished = list(jobs), dict[Job, "subprocess.Popen[bytes]"](), 0
    try:
        with StopRequest(signal.SIGTERM).listening() as stop:
            while waiting or running:
                while waiting and len(running) < num_parallel:
                    job = waiting.pop(0)
                    job.log.parent.mkdir(parents=True, exist_ok=True)
                    command = [script(job.command[0]), *job.command[1:]]
                    with open(job.log, "wb") as log:
                        running[job] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
                stop.pause(POLL_SECONDS)
                for job in [job for job, process in running.items() if process.poll() is not None]:
                    if code := running.pop(job).returncode:
                        printed = job.log.read_text(encoding="utf-8", errors="replace").strip()
                        last = printed.splitlines()[-1] if printed else "no output"
                        what = f"{job.name} failed with exit code {code}"
                        remedy = "see the log; the same command resumes"
                        raise GdistillError(what, where=job.log, got=last, remedy=remedy)
                    finished += 1
                done = finished + sum(min(1.0, job.share_done()) for job in running)
                report(done / len(jobs), ", ".join(job.name for job in running))
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def run_under_a_bar(description: str, jobs: Sequence[Job], num_parallel: int) -> None:
    """:func:`run_jobs` with a progress bar of its own."""
    with progress_bar(description, 100, unit="%") as bar:
        shown = 0

        def report(share: float, running: str) -> None:
            nonlocal shown
            bar.advance(int(100 * share) - shown)
            shown = int(100 * share)
            bar.note(running)

        run_jobs(jobs, num_parallel, report)


def share_of_training(metrics: Path) -> Callable[[], float]:
    """How much of a training run is done, from the last line of its metrics."""

    def share() -> float:
        try:
            with open(metrics, "rb") as file:
                file.seek(max(0, metrics.stat().st_size - 4096))
                last = json.loads(file.read().splitlines()[-1])
            return last["step"] / last["num_steps"]
        except (OSError, ValueError, IndexError, KeyError):
            return 0.0  # no metrics yet, or a line still being written

    return share


def share_by_the_clock(expected_seconds: float) -> Callable[[], float]:
    """How much is done of a job that does not tell; never all of it."""
    started = time.monotonic()
    return lambda: min(0.95, (time.monotonic() - started) / expected_seconds)
