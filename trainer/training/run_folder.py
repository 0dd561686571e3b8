"""What lies in the folder of a run, and how far the run is: read without torch, while it runs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from shards.base import UsageError, is_held

METRICS_FILE, CONFIG_FILE = "metrics.jsonl", "config.json"
CHECKPOINTS, MODEL = "checkpoints", "model"
STATE_FILE, PREFIX = "state.json", "step-"


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of all whole checkpoints in ``OUT/checkpoints``, ascending."""
    found = directory.glob(f"{PREFIX}*/{STATE_FILE}")
    numbers = (path.parent.name.removeprefix(PREFIX) for path in found)
    return sorted(int(number) for number in numbers if number.isdigit())


@dataclass(frozen=True)
class RunStatus:
    """How far a run is, by the last lines of its metrics.

    Attributes:
        out: The run's folder.
        student: What is trained.
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
        is_running: Whether a process holds the folder; None where that cannot be told.
        is_finished: Whether the model of the last step is written.
    """

    out: str
    student: str
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
        """Read a run's folder.

        Args:
            out: The ``--out`` of a training.
            now: Unix time; the clock's unless told.

        Raises:
            UsageError: If no training has begun there.
        """
        try:
            config = json.loads((out / CONFIG_FILE).read_bytes())
            student = str(config["student"])
            config["training"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                "no training run there",
                where=out,
                got=f"no {CONFIG_FILE} of a run",
                expected="the --out of gdistill-train run",
            ) from error
        last = _last_lines(out / METRICS_FILE)
        train, validation = last.get("train", {}), last.get("validation", {})
        step, num_steps = train.get("step"), train.get("num_steps")
        speed = train.get("tokens_per_second")
        steps_per_second = None
        if speed and train.get("num_tokens"):
            steps_per_second = speed * step / train["num_tokens"]
        left = None if step is None else num_steps - step
        checkpoints = checkpoint_steps(out / CHECKPOINTS)
        return cls(
            out=str(out),
            student=student,
            step=step,
            num_steps=num_steps,
            tokens_per_second=speed,
            steps_per_second=steps_per_second,
            eta_seconds=left / steps_per_second if left and steps_per_second else None,
            loss=train.get("loss"),
            validation_step=validation.get("step"),
            validation_nll_nats=validation.get("nll_nats"),
            checkpoint_step=checkpoints[-1] if checkpoints else None,
            seconds_since_line=_age(out / METRICS_FILE, time.time() if now is None else now),
            is_running=is_held(out),
            is_finished=left == 0 and (out / MODEL / CONFIG_FILE).is_file(),
        )

    def to_json(self) -> dict[str, Any]:
        """The figures by name; null where there is none yet."""
        return asdict(self)

    def to_text(self) -> str:
        """A few aligned lines."""
        lines = {"run": f"{self.student}, {self.out}", "step": "none yet"}
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
            lines["loss"] = f"{self.loss:.4f}"
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
        begin = (
            "the beginning" if self.checkpoint_step is None else f"step {self.checkpoint_step:,}"
        )
        return f"none{age}; the same command goes on from {begin}"


def _last_lines(path: Path) -> dict[str, dict[str, Any]]:
    """The last line of each kind; a line that is being written is not there yet."""
    found: dict[str, dict[str, Any]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return found
    for line in reversed(lines):
        try:
            value = json.loads(line)
            found.setdefault(value["kind"], value)
        except (ValueError, KeyError, TypeError):
            continue
        if len(found) == 2:
            break
    return found


def _age(path: Path, now: float) -> float | None:
    try:
        return max(0.0, now - path.stat().st_mtime)
    except OSError:
        return None
