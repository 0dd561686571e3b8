"""How far a run is, read from its folder: ``gdistill-train status``. Needs no torch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from shards.atomic import is_held
from shards.errors import UsageError
from trainer.training.settings import CHECKPOINTS, CONFIG_FILE, METRICS_FILE, MODEL, PLAIN, checkpoint_steps


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
        raise UsageError("no training run there", where=out, got=got, expected=expected) from error
    metrics = out / METRICS_FILE
    last: dict[str, dict[str, Any]] = {}
    for line in metrics.read_bytes().splitlines() if metrics.exists() else []:
        try:
            value = json.loads(line)
            last[value["kind"]] = value
        except (ValueError, KeyError, TypeError):
            continue  # it is being written
    train, validation = last.get("train", {}), last.get("validation", {})
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


def status_text(out: Path, as_json: bool = False, now: float | None = None) -> str:
    """What was trained, or is, in a run's folder: the figures of one part, or of both of a two-stage training.

    Args:
        out: The ``--out`` of a training.
        as_json: ``{"parts": [...]}``, null where there is nothing yet; else a line a figure that there is.
        now: As in :func:`run_status`.

    Raises:
        UsageError: If no training has begun there.
    """
    begun = [folder for folder in (out / PLAIN, out) if (folder / CONFIG_FILE).is_file()]
    parts = [run_status(folder, now) for folder in begun or [out]]
    if as_json:
        return json.dumps({"parts": parts}, indent=2)
    shown = [{n: f"{v:.6g}" if isinstance(v, float) else v for n, v in part.items() if v is not None} for part in parts]
    return "\n\n".join("\n".join(f"{name:<24} {value}" for name, value in part.items()) for part in shown)
