"""What a run says of itself: lines of metrics.jsonl, and how far it is. Needs no torch.

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
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from shards.atomic import is_held, open_itself, write_bytes_atomic
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
        numbers = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
        whole = [n for n in numbers if (directory / f"{PREFIX}{n}" / STATE_FILE).exists()]
    except OSError as error:
        got, remedy = error.strerror, "give another --out"
        raise UsageError("cannot read there", where=directory, got=got, remedy=remedy) from error
    return sorted(int(number) for number in whole if number.isdigit())


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
        for number, line in enumerate(lines):
            try:
                step = json.loads(line)["step"] if line.endswith(b"\n") else None
                is_kept = step is not None and step <= last_step
            except (ValueError, KeyError, TypeError) as error:
                raise IntegrityError(
                    "not a line of metrics",
                    where=f"{path}:{number + 1}",
                    remedy="move the file away; the run starts a new one",
                ) from error
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

    def add(
        self, loss: float, norm: float, num_tokens: int, num_masked: int, num_flops: float
    ) -> None:
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


@dataclass(frozen=True)
class RunStatus:
    """How far a run is, by the last lines of its metrics.

    Attributes:
        out: The run's folder.
        student: What is trained.
        conditioning: On which noise, or ``none``.
        step: Step of the last line of training; None before the first.
        num_steps: Steps of the whole run.
        tokens_per_second: Over the steps since the line before.
        steps_per_second: The same in steps.
        eta_seconds: What the steps left take at that rate; validation comes on top.
        loss: Mean training loss over those steps.
        validation_step: Step of the last validation; None before the first.
        validation_nll_nats: Its negative log-likelihood per token.
        checkpoint_step: Step of the last whole checkpoint.
        seconds_since_line: Age of the last line.
        is_running: Whether a process holds the folder; None where that cannot be seen.
        is_finished: Whether the model of the last step is written.
    """

    out: str
    student: str
    conditioning: str
    step: int | None
    num_steps: int | None
    tokens_per_second: float | None
    steps_per_second: float | None
    eta_seconds: float | None
    loss: float | None
    validation_step: int | None
    validation_nll_nats: float | None
    checkpoint_step: int | None
    seconds_since_line: float | None
    is_running: bool | None
    is_finished: bool

    @classmethod
    def of(cls, out: Path, now: float | None = None) -> RunStatus:
        """Read the folder of one training.

        Args:
            out: The ``--out`` of a training.
            now: Unix time; the clock's unless given.

        Raises:
            UsageError: If no training has begun there.
        """
        try:
            config = json.loads((out / CONFIG_FILE).read_bytes())
            student = str(config["student"])
            conditioning = str(config["model"]["conditioning"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                "no training run there",
                where=out,
                got=f"no {CONFIG_FILE} of a run",
                expected="the --out of gdistill-train",
            ) from error
        train, validation = _last_lines(out / METRICS_FILE)
        step, num_steps = train.get("step"), train.get("num_steps")
        speed = train.get("tokens_per_second")
        steps_per_second = None
        if speed and train.get("num_tokens"):
            steps_per_second = speed * step / train["num_tokens"]
        left = None if step is None else num_steps - step
        checkpoints = checkpoint_steps(out / CHECKPOINTS)
        age = None
        if (out / METRICS_FILE).exists():
            written = (out / METRICS_FILE).stat().st_mtime
            age = max(0.0, (time.time() if now is None else now) - written)
        return cls(
            out=str(out),
            student=student,
            conditioning=conditioning,
            step=step,
            num_steps=num_steps,
            tokens_per_second=speed,
            steps_per_second=steps_per_second,
            eta_seconds=left / steps_per_second if left and steps_per_second else None,
            loss=train.get("loss"),
            validation_step=validation.get("step"),
            validation_nll_nats=validation.get("nll_nats"),
            checkpoint_step=checkpoints[-1] if checkpoints else None,
            seconds_since_line=age,
            is_running=is_held(out),
            is_finished=left == 0 and (out / MODEL / CONFIG_FILE).is_file(),
        )

    def to_text(self) -> str:
        """A few aligned lines."""
        lines = {"run": f"{self.student}, conditioning {self.conditioning}, {self.out}"}
        lines["step"] = "none yet"
        if self.step is not None and self.num_steps:
            share = 100 * self.step / self.num_steps
            lines["step"] = f"{self.step:,} of {self.num_steps:,} ({share:.1f}%)"
        if self.steps_per_second is not None and self.tokens_per_second is not None:
            lines["rate"] = (
                f"{self.tokens_per_second:,.0f} tok/s, {self.steps_per_second:.3g} steps/s"
            )
        if self.eta_seconds is not None:
            lines["left"] = str(timedelta(seconds=round(self.eta_seconds)))
        if self.loss is not None:
            lines["loss"] = f"{self.loss:.4f} (the objective, with its own weights)"
        if self.validation_nll_nats is not None:
            lines["validation"] = (
                f"{self.validation_nll_nats:.4f} nats per token at step {self.validation_step:,}"
            )
        step = self.checkpoint_step
        lines["checkpoint"] = "none yet" if step is None else f"step {step:,}"
        lines["process"] = self._process()
        return "\n".join(f"{name:<12} {text}" for name, text in lines.items())

    def _process(self) -> str:
        age = ""
        if self.seconds_since_line is not None:
            age = f"; last line {timedelta(seconds=round(self.seconds_since_line))} ago"
        if self.is_running:
            return f"at work{age}"
        if self.is_finished:
            return f"none: finished, {Path(self.out) / MODEL}"
        if self.is_running is None:
            return f"unknown: this file system has no locks{age}"
        step = self.checkpoint_step
        begin = "the beginning" if step is None else f"step {step:,}"
        return f"none{age}; the same command goes on from {begin}"


def run_parts(out: Path) -> list[RunStatus]:
    """What was trained, or is, in a run's folder: one part, or both of a two-stage training.

    Raises:
        UsageError: If no training has begun there.
    """
    try:
        folders = [folder for folder in (out / PLAIN, out) if (folder / CONFIG_FILE).is_file()]
    except OSError:
        folders = []  # which RunStatus.of tells
    return [RunStatus.of(folder) for folder in folders or [out]]


def status_json(out: Path) -> str:
    """The figures of every part by name; null where there is none yet."""
    return json.dumps({"parts": [asdict(part) for part in run_parts(out)]}, indent=2)


def status_text(out: Path) -> str:
    """A few aligned lines a part."""
    parts = [part.to_text() for part in run_parts(out)]
    if (out / PLAIN / CONFIG_FILE).is_file():
        parts += ["run          begins when part 1 is finished"] if len(parts) == 1 else []
        parts = [f"part {n} of 2\n{text}" for n, text in enumerate(parts, 1)]
    return "\n\n".join(parts)


def _last_lines(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last line of training and of validation; one that is being written is not there yet."""
    found: dict[str, dict[str, Any]] = {}
    for line in reversed(path.read_bytes().splitlines() if path.exists() else []):
        try:
            value = json.loads(line)
            found.setdefault(value["kind"], value)
        except (ValueError, KeyError, TypeError):
            continue
        if len(found) == 2:
            break
    return found.get("train", {}), found.get("validation", {})
