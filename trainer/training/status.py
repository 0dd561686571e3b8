"""How far a run is, read from its folder: ``gdistill-train status``. Needs no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from shards.atomic import is_held
from shards.errors import UsageError
from trainer.training.metrics import CHECKPOINTS, CONFIG_FILE, METRICS_FILE, MODEL, PLAIN, checkpoint_steps


def run_status(out: Path, now: float | None = None) -> dict[str, Any]:
    """How far a run is, by the last lines of its metrics; None where there is nothing yet.

    Args:
        out: The ``--out`` of a training.
        now: Unix time; the clock's unless given.

    Returns:
        ``out``, ``student``, ``conditioning``; ``step`` of the last line of training, of
        ``num_steps``; ``tokens_per_second``, ``steps_per_second`` and the mean ``loss`` since the
        line before; ``eta_seconds``, what the steps left take at that rate, without validation;
        ``validation_step`` and its ``validation_nll_nats`` per token; ``checkpoint_step``, the last
        whole one; ``seconds_since_line``; ``is_running``, whether a process holds the folder (None
        where that cannot be seen); ``is_finished``, whether the last step's model is written.

    Raises:
        UsageError: If no training has begun there.
    """
    try:
        config = json.loads((out / CONFIG_FILE).read_bytes())
        student, conditioning = str(config["student"]), str(config["model"]["conditioning"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        got, expected = f"no {CONFIG_FILE} of a run", "the --out of gdistill-train"
        what = "no training run there"
        raise UsageError(what, where=out, got=got, expected=expected) from error
    metrics, (train, validation) = out / METRICS_FILE, _last_lines(out / METRICS_FILE)
    step, num_steps = train.get("step"), train.get("num_steps")
    speed, tokens = train.get("tokens_per_second"), train.get("num_tokens")
    steps_per_second = speed * step / tokens if speed and tokens else None
    left = None if step is None else num_steps - step
    now = time.time() if now is None else now
    return {
        "out": str(out),
        "student": student,
        "conditioning": conditioning,
        "step": step,
        "num_steps": num_steps,
        "tokens_per_second": speed,
        "steps_per_second": steps_per_second,
        "eta_seconds": left / steps_per_second if left and steps_per_second else None,
        "loss": train.get("loss"),
        "validation_step": validation.get("step"),
        "validation_nll_nats": validation.get("nll_nats"),
        "checkpoint_step": max(checkpoint_steps(out / CHECKPOINTS), default=None),
        "seconds_since_line": max(0, now - metrics.stat().st_mtime) if metrics.exists() else None,
        "is_running": is_held(out),
        "is_finished": left == 0 and (out / MODEL / CONFIG_FILE).is_file(),
    }


def _text(status: Mapping[str, Any]) -> str:
    """A few aligned lines."""
    step, checkpoint = status["step"], status["checkpoint_step"]
    lines = {"run": "{student}, conditioning {conditioning}, {out}", "step": "none yet"}
    if step is not None:
        share = f"{step / status['num_steps']:.1%}"
        lines["step"] = f"{{step:,}} of {{num_steps:,}} ({share})"
    if status["steps_per_second"] is not None:
        lines["rate"] = "{tokens_per_second:,.0f} tok/s, {steps_per_second:.3g} steps/s"
    if status["eta_seconds"] is not None:
        lines["left"] = _duration(status["eta_seconds"])
    if status["loss"] is not None:
        lines["loss"] = "{loss:.4f} (the objective, with its own weights)"
    if status["validation_nll_nats"] is not None:
        nll = "{validation_nll_nats:.4f} nats per token"
        lines["validation"] = f"{nll} at step {{validation_step:,}}"
    lines["checkpoint"] = "none yet" if checkpoint is None else "step {checkpoint_step:,}"
    age = status["seconds_since_line"]
    age = "" if age is None else f"; last line {_duration(age)} ago"
    if status["is_running"]:
        lines["process"] = f"at work{age}"
    elif status["is_finished"]:
        lines["process"] = f"none: finished, {{out}}/{MODEL}"
    elif status["is_running"] is None:
        lines["process"] = f"unknown: this file system has no locks{age}"
    else:
        begin = "the beginning" if checkpoint is None else "step {checkpoint_step:,}"
        lines["process"] = f"none{age}; the same command goes on from {begin}"
    return "\n".join(f"{name:<12} {text.format(**status)}" for name, text in lines.items())


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def run_parts(out: Path, now: float | None = None) -> list[dict[str, Any]]:
    """What was trained, or is, in a run's folder: one part, or both of a two-stage training.

    Raises:
        UsageError: If no training has begun there.
    """
    try:
        folders = [folder for folder in (out / PLAIN, out) if (folder / CONFIG_FILE).is_file()]
    except OSError:
        folders = []  # which run_status tells
    return [run_status(folder, now) for folder in folders or [out]]


def status_json(out: Path) -> str:
    """The figures of every part by name; null where there is none yet."""
    return json.dumps({"parts": run_parts(out)}, indent=2)


def status_text(out: Path, now: float | None = None) -> str:
    """A few aligned lines a part; ``now`` as in :func:`run_status`."""
    parts = [_text(part) for part in run_parts(out, now)]
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
