"""What every command shares: one-line errors with exit codes, and one progress bar per stage."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from shards.base.errors import GdistillError

stderr = Console(stderr=True, highlight=False)
DESCRIPTION_WIDTH = 18
FIGURES_WIDTH = 58
"""Of description, counts, rate and time together."""


def run_command(app: Callable[[], object]) -> None:
    """Run a Typer app; a :class:`GdistillError` becomes one line on stderr and its exit code.

    ``GDISTILL_TRACEBACK=1`` lets the traceback through, for developers.
    """
    try:
        app()
    except GdistillError as error:
        if os.environ.get("GDISTILL_TRACEBACK") == "1":
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr, flush=True)
        sys.exit(130)


class _Rate(ProgressColumn):
    """Units per second, with SI prefixes."""

    def render(self, task: Task) -> Text:
        unit = str(task.fields.get("unit", "tok"))
        if unit == "%":  # parts of several pieces of work whose units differ
            return Text(f"{100 * task.completed / (task.total or 1):.0f}%")
        done, speed = _si(task.completed), task.speed
        total = f"/{_si(task.total)}" if task.total is not None else ""
        rate = f" {_si(speed)} {unit}/s" if speed else ""
        return Text(f"{done}{total} {unit}{rate}")


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
    rate = _Rate(table_column=column())
    left = TimeRemainingColumn(elapsed_when_finished=True, table_column=column())
    bar_width = min(24, (width - FIGURES_WIDTH) // 2)
    if bar_width < 4:
        return [name, rate, left]
    note_width = max(1, width - FIGURES_WIDTH - bar_width)
    note = TextColumn("{task.fields[note]}", table_column=column(note_width))
    return [name, BarColumn(bar_width), rate, left, note]


class Bar:
    """A handle on one running progress bar; does nothing off the main process."""

    def __init__(self, progress: Progress | None = None, task: int = 0) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: int) -> None:
        """Count ``amount`` further units as done."""
        if self._progress is not None:
            self._progress.advance(self._task, amount)  # type: ignore[arg-type]

    def note(self, text: str) -> None:
        """Show ``text`` (a loss, say) at the end of the bar."""
        if self._progress is not None:
            self._progress.update(self._task, note=text)  # type: ignore[arg-type]


@contextmanager
def progress_bar(
    description: str,
    total: int | None,
    *,
    unit: str = "tok",
    done: int = 0,
    main_process: bool = True,
) -> Iterator[Bar]:
    """One bar on stderr for one stage.

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
    with Progress(*_columns(stderr.width), console=stderr, refresh_per_second=4) as progress:
        task = progress.add_task(description, total=total, completed=done, unit=unit, note="")
        yield Bar(progress, task)


@contextmanager
def without_library_bars() -> Iterator[None]:
    """One progress bar per stage, and it is ours: models load and save without transformers'."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
