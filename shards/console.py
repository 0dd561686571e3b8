"""What every command shares: one-line errors with exit codes, and one progress bar per stage."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from shards.errors import GdistillError, UsageError

WrongOption = cast(type[Exception], typer.BadParameter.__mro__[2])
"""ClickException, in whichever package this Typer keeps it."""
INTERRUPTED = "interrupted; run the same command again to resume"
stderr = Console(stderr=True, highlight=False)
DESCRIPTION_WIDTH = 18
SECONDS_BETWEEN_LINES = 60.0
FIGURES_WIDTH = 58
"""Of description, counts, rate and time together."""
LogFormat = Literal["plain", "json"]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        help="Progress on stderr. plain: a bar, or a line a minute where stderr is no terminal;"
        " json: one JSON object a minute and stage, for machines.",
    ),
]
_chosen: dict[str, LogFormat] = {"log_format": "plain"}


def command_app(**options: Any) -> typer.Typer:
    """A Typer app for :func:`run_command`, which tells what went wrong in one line."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **options)


def use_log_format(log_format: LogFormat) -> None:
    """How this process tells its progress from here on."""
    _chosen["log_format"] = log_format


def run_command(app: Callable[..., object], /, **others: Callable[..., object]) -> None:
    """Run a Typer app; whatever the user got wrong becomes one line on stderr and an exit code.

    A :class:`GdistillError` brings its own code, a wrong option 2. Of several processes with the
    same wrong request only the first one says so. ``GDISTILL_TRACEBACK=1`` lets the traceback of a
    :class:`GdistillError` through, for developers.

    Args:
        app: The command.
        others: Further commands by the first word that calls them, or what makes one
            (``settings``).
    """
    try:
        sys.exit(_call(app, others))
    except GdistillError as error:
        if os.environ.get("GDISTILL_TRACEBACK") == "1":
            raise
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


def _amount(done: float | int, total: float | int | None, unit: str) -> str:
    if unit == "%":  # parts of several pieces of work whose units differ
        return f"{100 * done / (total or 1):.0f}%"
    return f"{_si(done)}{f'/{_si(total)}' if total is not None else ''} {unit}"


def _si(value: float | int) -> str:
    for prefix in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.0f}{prefix}" if prefix == "" else f"{value:.1f}{prefix}"
        value /= 1000
    return f"{value:.1f}T"


def _columns(width: int) -> list[ProgressColumn]:
    """What fits one line of a terminal; a bar that wraps is no bar."""

    def column(at_most: int | None = None) -> Column:
        return Column(no_wrap=True, overflow="ellipsis", max_width=at_most)

    name = TextColumn("{task.description}", table_column=column(DESCRIPTION_WIDTH))
    left = TimeRemainingColumn(elapsed_when_finished=True, table_column=column())
    bar_width = min(24, (width - FIGURES_WIDTH) // 2)
    if bar_width < 4:
        return [name, _Rate(table_column=column()), left]
    note_width = max(1, width - FIGURES_WIDTH - bar_width)
    note = TextColumn("{task.fields[note]}", table_column=column(note_width))
    return [name, BarColumn(bar_width), _Rate(table_column=column()), left, note]


class _Rate(ProgressColumn):
    """Units per second, with SI prefixes."""

    def render(self, task: Task) -> Text:
        unit = str(task.fields.get("unit", "tok"))
        rate = f" {_si(task.speed)} {unit}/s" if task.speed and unit != "%" else ""
        return Text(_amount(task.completed, task.total, unit) + rate)


class Bar:
    """A handle on one stage's progress; does nothing off the main process."""

    def advance(self, amount: float | int) -> None:
        """Count ``amount`` further units as done."""

    def note(self, text: str, **figures: float | int) -> None:
        """Show ``text`` at the end of the bar; machines are told ``figures`` (``loss``) by name."""


class _TerminalBar(Bar):
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: float | int) -> None:
        self._progress.advance(self._task, amount)

    def note(self, text: str, **figures: float | int) -> None:
        self._progress.update(self._task, note=text)


class _LineBar(Bar):
    """For log files: a line a minute, and one at the end; plain, or a JSON object for machines."""

    def __init__(self, stage: str, total: int | None, unit: str, done: int, as_json: bool) -> None:
        self._stage, self._total, self._unit, self._as_json = stage, total, unit, as_json
        self._begun, self._done, self._note = done, done, ""
        self._named: dict[str, float | int] = {}
        self._start = self._said = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, amount: float | int) -> None:
        with self._lock:
            self._done += amount
            self._say_now_and_then()

    def note(self, text: str, **figures: float | int) -> None:
        with self._lock:
            self._note, self._named = text, figures
            self._say_now_and_then()

    def _say_now_and_then(self) -> None:
        if time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self.say(finished=False)

    def say(self, *, finished: bool) -> None:
        """One line on stderr; the rate is units per second since the stage began here."""
        self._said = time.monotonic()
        seconds = self._said - self._start
        rate = (self._done - self._begun) / seconds if seconds > 0 else 0.0
        left = (self._total or 0) - self._done
        eta = left / rate if rate and left > 0 else None
        if self._as_json:
            times = {"rate": rate, "eta_seconds": eta, "seconds": seconds}
            short = {n: None if t is None else float(f"{t:.4g}") for n, t in times.items()}
            counts = {"done": self._done, "total": self._total, "unit": self._unit}
            end = {"finished": finished, "note": self._note, **self._named}
            _say(json.dumps({"stage": self._stage, **counts, **short, **end}))
            return
        parts = [f"{self._stage}: {_amount(self._done, self._total, self._unit)}"]
        if rate and self._unit != "%":
            parts.append(f"{_si(rate)} {self._unit}/s")
        time_told, word = (seconds, "so far") if eta is None else (eta, "left")
        parts.append(f"{timedelta(seconds=round(time_told))} {word}")
        _say(", ".join([*parts, *([self._note] if self._note else [])]))


@contextmanager
def progress_bar(
    description: str, total: int | None, unit: str = "tok", done: int = 0, main_process: bool = True
) -> Iterator[Bar]:
    """One bar on stderr for one stage; where stderr is no terminal, a line per minute.

    A line for machines is a JSON object: ``stage``, ``done``, ``total`` and ``unit``, ``rate``
    (units per second), ``eta_seconds`` (null where unknown, or nothing is left), ``seconds`` since
    the stage began here, ``finished``, ``note``, and figures such as ``loss``.

    Args:
        description: The stage, in a word or two.
        total: Units in the whole stage; None when unknown.
        unit: What is counted (tokens unless told).
        done: Units that an earlier, interrupted run finished.
        main_process: Whether this process shows the bar; others get a silent handle.
    """
    if not main_process:
        yield Bar()
        return
    as_json = _chosen["log_format"] == "json"
    if as_json or not stderr.is_terminal:
        lines = _LineBar(description, total, unit, done, as_json)
        yield lines
        lines.say(finished=True)
        return
    with Progress(*_columns(stderr.width), console=stderr, refresh_per_second=4) as progress:
        task = progress.add_task(description, total=total, completed=done, unit=unit, note="")
        yield _TerminalBar(progress, task)


@contextmanager
def without_library_bars(reports: bool = True) -> Iterator[None]:
    """One progress bar per stage, and it is ours: models load and save without transformers'.

    Args:
        reports: Whether transformers may say which weights it leaves out.
    """
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


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: its first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
