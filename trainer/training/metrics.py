"""What lies in a run's folder, and the lines of its metrics.jsonl. Needs no torch.

One JSON object per line: ``kind`` (``train`` or ``validation``), ``step``, ``num_steps`` and the
figures. Fields in ``TIMING_FIELDS`` depend on the machine; all others are the same for an
interrupted and resumed run as for an uninterrupted one. ``loss`` is the training objective with
its own weights; ``nll_nats`` of a validation is a likelihood (a bound for diffusion students).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shards.atomic import open_itself, write_bytes_atomic
from shards.errors import IntegrityError, UsageError

METRICS_FILE, CONFIG_FILE = "metrics.jsonl", "config.json"
CHECKPOINTS, MODEL = "checkpoints", "model"
STATE_FILE, PREFIX = "state.json", "step-"
PLAIN = "plain"
"""Folder of the first part of a two-stage training, below the run's."""
TIMING_FIELDS = ("seconds", "tokens_per_second", "flops_per_second")


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of all whole checkpoints in ``OUT/checkpoints``, ascending.

    Raises:
        UsageError: When the folder cannot be read.
    """
    try:
        names = [path.name for path in directory.iterdir()] if directory.exists() else []
        whole = [name for name in names if (directory / name / STATE_FILE).exists()]
    except OSError as error:
        got, remedy = error.strerror, "give another --out"
        raise UsageError("cannot read there", where=directory, got=got, remedy=remedy) from error
    numbers = (name.removeprefix(PREFIX) for name in whole if name.startswith(PREFIX))
    return sorted(int(number) for number in numbers if number.isdigit())


class MetricsFile:
    """Appends lines to metrics.jsonl, visible at once to whoever reads it.

    Args:
        path: The file.
        last_step: Step that the run resumes after; lines of later steps, which an interrupted run
            wrote behind its last checkpoint, are dropped, and so is a half-written last line.

    Raises:
        IntegrityError: For a line in the middle that is no line of metrics.
        OSError: When the file cannot be written.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = []
        for number, line in enumerate(lines, 1):
            try:
                is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= last_step
            except (ValueError, KeyError, TypeError) as error:
                where, remedy = f"{path}:{number}", "move the file away; the run starts a new one"
                raise IntegrityError("not a line of metrics", where=where, remedy=remedy) from error
            kept += [line] if is_kept else []
        if len(kept) < len(lines):
            write_bytes_atomic(path, b"".join(kept))
        self._file = open(path, "ab", buffering=0, opener=open_itself)  # noqa: SIM115

    def write(self, kind: str, step: int, num_steps: int, values: Mapping[str, Any]) -> None:
        """Add one line."""
        line = {"kind": kind, "step": step, "num_steps": num_steps, **values}
        self._file.write(json.dumps(line).encode() + b"\n")

    def sync(self) -> None:
        """Make every line so far survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Finish the file."""
        self.sync()
        self._file.close()


@dataclass
class StepWindow:
    """Averages over the steps since the last line; the sums are saved with a checkpoint."""

    num_steps: int = 0
    loss_sum: float = 0.0
    norm_sum: float = 0.0
    num_tokens: int = 0
    num_masked: int = 0
    _started: float = field(default_factory=time.monotonic)
    _timed_steps: int = 0
    _timed_tokens: int = 0
    _timed_flops: float = 0.0

    def add(self, loss: float, norm: float, num_tokens: int, num_masked: int, num_flops: float) -> None:
        """Count one optimiser step."""
        self.num_steps += 1
        self.loss_sum += loss
        self.norm_sum += norm
        self.num_tokens += num_tokens
        self.num_masked += num_masked
        self._timed_steps += 1
        self._timed_tokens += num_tokens
        self._timed_flops += num_flops

    def close(self) -> dict[str, Any]:
        """The figures of the window, which starts anew."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        values = {
            "loss": self.loss_sum / self.num_steps,
            "grad_norm": self.norm_sum / self.num_steps,
            "masked_fraction": self.num_masked / self.num_tokens,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(self._timed_tokens / seconds, 1),
            "flops_per_second": float(f"{self._timed_flops / seconds:.4g}"),
        }
        self.__init__()  # type: ignore[misc]
        return values

    @property
    def seconds_per_step(self) -> float:
        """Over the steps of this window that were made here."""
        return (time.monotonic() - self._started) / max(1, self._timed_steps)

    def restart_clock(self) -> None:
        """Training starts now."""
        self._started = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work within the context is not training: its time is left out of the rates."""
        began = time.monotonic()
        yield
        self._started += time.monotonic() - began

    def state_dict(self) -> dict[str, Any]:
        """The sums; the clock starts anew in a resumed run."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}
