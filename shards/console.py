"""What every command shares: one-line errors with exit codes, and one progress bar per stage."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shards.errors import INTERRUPTED, GdistillError, UsageError

WrongOption = cast(type[Exception], typer.BadParameter.__mro__[2])
"""ClickException, in whichever package this Typer keeps it."""
stderr = Console(stderr=True, highlight=False)
SECONDS_BETWEEN_LINES = 60.0


def command_app(**options: Any) -> typer.Typer:
    """A Typer app for :func:`run_command`, which tells what went wrong in one line."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **options)


def run_command(app: Callable[..., object], /, **others: Callable[..., object]) -> None:
    """Run a Typer app; whatever the user got wrong becomes one line on stderr and an exit code.

    A :class:`GdistillError` brings its own code, an OSError 1, a wrong option 2. Of several processes with the
    same wrong request only the first one says so. ``GDISTILL_TRACEBACK=1`` lets tracebacks through.

    Args:
        app: The command.
        others: Further commands by the first word that calls them, or what makes one (``settings``).
    """
    try:
        sys.exit(_call(app, others))
    except (GdistillError, OSError) as error:
        if os.environ.get("GDISTILL_TRACEBACK") == "1":
            raise
        if isinstance(error, OSError):  # a disk that is full, a folder in a file's place
            error = GdistillError("cannot read or write", where=error.filename or "", got=error.strerror or error)
        if not isinstance(error, UsageError) or is_first_process():
            _say(f"error: {error}")
        sys.exit(error.exit_code)
    except WrongOption as wrong:
        error: Any = wrong
        if type(error).__name__ == "NoArgsIsHelpError":
            _say(error.ctx.get_help())  # no word was given
        elif is_first_process():
            message = " ".join(error.format_message().split())
            context = getattr(error, "ctx", None)  # which knows where help is
            remedy = f"; see {context.command_path} --help" if context is not None else ""
            _say(f"error: {message[:1].lower()}{message[1:].rstrip('.')}{remedy}")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _say(INTERRUPTED)
        sys.exit(130)


def is_first_process() -> bool:
    """Whether this process speaks for all that a launcher (torchrun, accelerate) started."""
    return os.environ.get("RANK", "0") == "0"


def _call(app: Callable[..., object], others: Mapping[str, Callable[..., object]]) -> int:
    """The app's exit code; Typer's own handling of errors takes three lines for each."""
    # What no shell expands: --out=~/runs would make a folder of that name here.
    home = os.path.expanduser("~")
    sys.argv[1:] = [re.sub(r"^(--[\w-]+=)~(?=/|$)", lambda found: found[1] + home, word) for word in sys.argv[1:]]
    if not isinstance(app, typer.Typer):
        app()
        return 0
    words: dict[str, Any] = {}
    if len(sys.argv) > 1 and sys.argv[1] in others:
        name, given = f"{Path(sys.argv[0]).name} {sys.argv[1]}", others[sys.argv[1]]
        app = given if isinstance(given, typer.Typer) else given()  # type: ignore[assignment]
        words = {"args": sys.argv[2:], "prog_name": name}
    code: Any = app(standalone_mode=False, **words)
    if code == 130:
        _say(INTERRUPTED)
    return code if isinstance(code, int) else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _si(value: float | int) -> str:
    for prefix in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.0f}{prefix}" if prefix == "" else f"{value:.1f}{prefix}"
        value /= 1000
    return f"{value:.1f}T"


class Bar:
    """A handle on one stage's progress; does nothing off the main process."""

    def advance(self, amount: float | int) -> None:
        """Count ``amount`` further units as done."""

    def note(self, text: str) -> None:
        """Show ``text`` at the end of the bar."""


class _ShownBar(Bar):
    """A bar where stderr is a terminal; in a log file a line a minute, and one at the end."""

    def __init__(self, stage: str, total: int | None, unit: str, done: int, progress: Progress | None) -> None:
        self._stage, self._total, self._unit, self._progress = stage, total, unit, progress
        self._begun, self._done, self._note, self._task = done, done, "", TaskID(0)
        self._start = self._said = time.monotonic()
        self._lock = threading.Lock()
        if progress is not None:
            self._task = progress.add_task(stage, total=total, completed=done, figures="", note="")

    def advance(self, amount: float | int) -> None:
        with self._lock:
            self._done += amount
            self._update()

    def note(self, text: str) -> None:
        with self._lock:
            self._note = text
            self._update()

    def _update(self) -> None:
        if self._progress is not None:
            figures = ", ".join(self._figures()[0])
            self._progress.update(self._task, completed=self._done, figures=figures, note=self._note)
        elif time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self.say()

    def say(self) -> None:
        """One line on stderr."""
        self._said = time.monotonic()
        figures, rate = self._figures()
        left = (self._total or 0) - self._done
        seconds, word = (left / rate, "left") if rate and left > 0 else (self._said - self._start, "so far")
        parts = [*figures, f"{timedelta(seconds=round(seconds))} {word}", self._note]
        _say(f"{self._stage}: {', '.join(part for part in parts if part)}")

    def _figures(self) -> tuple[list[str], float]:
        """What is done and how fast, in units a second since the stage began here, as text; the rate."""
        seconds = time.monotonic() - self._start
        rate = (self._done - self._begun) / seconds if seconds > 0 else 0.0
        if self._unit == "%":  # parts of several pieces of work whose units differ
            return [f"{100 * self._done / (self._total or 1):.0f}%"], rate
        done = f"{_si(self._done)}{f'/{_si(self._total)}' if self._total is not None else ''} {self._unit}"
        return [done, *([f"{_si(rate)} {self._unit}/s"] if rate else [])], rate


@contextmanager
def progress_bar(
    description: str, total: int | None, unit: str = "tok", done: int = 0, main_process: bool = True
) -> Iterator[Bar]:
    """One bar on stderr for one stage; where stderr is no terminal, a line per minute.

    Args:
        description: The stage, in a word or two.
        total: Units in the whole stage; None when unknown.
        unit: What is counted.
        done: Units that an earlier, interrupted run finished.
        main_process: Whether this process shows the bar; others get a silent handle.
    """
    if not main_process:
        yield Bar()
        return
    if not stderr.is_terminal:
        lines = _ShownBar(description, total, unit, done, None)
        yield lines
        lines.say()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=stderr, refresh_per_second=4) as progress:
        yield _ShownBar(description, total, unit, done, progress)


@contextmanager
def without_library_bars(reports: bool = True) -> Iterator[None]:
    """One progress bar per stage, and it is ours; ``reports``: transformers may say which weights it leaves out."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    if not reports:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()
