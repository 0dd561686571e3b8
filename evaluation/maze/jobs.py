"""Commands run side by side, each with its own log, under one progress bar per stage."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shards.console import progress_bar
from shards.errors import GdistillError, UsageError

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One command of the project.

    Attributes:
        name: What it does, for messages.
        command: Name of the console script, then its arguments.
        log: File that receives everything it prints.
        total: Units of work in it.
        done: Tells how many units it has finished so far.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    total: int
    done: Callable[[], int]


def script(name: str) -> str:
    """The console script installed beside the running interpreter.

    Raises:
        UsageError: When the project is not installed there.
    """
    path = Path(sys.executable).with_name(name)
    if not path.is_file():
        raise UsageError(
            "a command of the project is not installed",
            where=path,
            got="no such file",
            remedy="install the project into this environment (make setup)",
        )
    return str(path)


def check_parallel(num_parallel: int) -> None:
    """Refuse to run no job at a time.

    Raises:
        UsageError: Below one.
    """
    if num_parallel < 1:
        raise UsageError(
            "no job could run",
            where="--parallel",
            got=num_parallel,
            expected="at least 1",
            remedy="give the number of jobs that may run side by side",
        )


def run_visibly(name: str, command: Sequence[str]) -> None:
    """Run one command with its own progress bars on this terminal.

    Raises:
        GdistillError: When it fails; its own error line is above.
    """
    code = subprocess.run([script(command[0]), *command[1:]], check=False).returncode
    if code != 0:
        raise GdistillError(f"{name} failed", where=" ".join(command), got=f"exit code {code}")


def run_jobs(description: str, jobs: Sequence[Job], num_parallel: int, unit: str = "tok") -> None:
    """Run jobs, ``num_parallel`` at a time on as many threads each as the machine affords.

    Raises:
        UsageError: For fewer than one job at a time.
        GdistillError: When a job fails: its name, its log and the last line it printed. The others
            are ended; what they finished stays, and the same call resumes.
    """
    check_parallel(num_parallel)
    threads = max(1, (os.cpu_count() or 1) // num_parallel)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    waiting, running = list(jobs), {}
    total = sum(job.total for job in jobs)
    with progress_bar(description, total, unit=unit) as bar:
        shown = 0
        try:
            while waiting or running:
                while waiting and len(running) < num_parallel:
                    job = waiting.pop(0)
                    running[job] = _start(job, environment)
                time.sleep(POLL_SECONDS)
                for job, process in list(running.items()):
                    if process.poll() is not None:
                        del running[job]
                        _check(job, process.returncode)
                finished = total - sum(job.total for job in [*waiting, *running])
                now = finished + sum(min(job.total, job.done()) for job in running)
                bar.advance(max(0, now - shown))
                shown = max(shown, now)
                bar.note(", ".join(job.name for job in running))
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()


def _start(job: Job, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with open(job.log, "wb") as log:
        return subprocess.Popen(
            [script(job.command[0]), *job.command[1:]],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _check(job: Job, code: int) -> None:
    if code == 0:
        return
    lines = job.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise GdistillError(
        f"{job.name} failed with exit code {code}",
        where=job.log,
        got=lines[-1] if lines else "no output",
        remedy="see the log; the same command resumes",
    )
