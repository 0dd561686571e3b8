"""What a run tells: metrics.jsonl, trackers, averages between two lines, FLOPs, its divergence.

One JSON object per line: ``kind`` (``train`` or ``validation``), ``step``, ``num_steps`` and the
figures. Fields in ``TIMING_FIELDS`` depend on the machine; all others are the same for an
interrupted and resumed run as for an uninterrupted one.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float, Int
from torch import Tensor

from shards.atomic import open_itself, write_bytes_atomic
from shards.errors import GdistillError, IntegrityError, first_line
from trainer.students.registry import Student
from trainer.training.parallel import cannot_write, on_main_process

TIMING_FIELDS = ("seconds", "tokens_per_second", "flops_per_second", "mfu")
PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 peaks of the vendors' data sheets, FLOP/s, by a part of the device's name."""
MAX_NAMED_ROWS = 16
WANDB_RUN_ID = "wandb-run-id"


class MetricsLog:
    """Appends to metrics.jsonl and to the trackers; silent off the main process.

    Args:
        path: metrics.jsonl.
        accelerator: Gives the main process and the trackers.
        last_step: Step that the run resumes after; later lines, which an interrupted run wrote
            behind its last checkpoint, are dropped.
    """

    def __init__(self, path: Path, accelerator: Accelerator, last_step: int) -> None:
        self._accelerator = accelerator
        self._file, self._path = None, path
        on_main_process(lambda: keep_lines_until(path, last_step), accelerator)
        if accelerator.is_main_process:
            self._file = open(path, "ab", buffering=0, opener=open_itself)  # noqa: SIM115
        on_main_process(lambda: start_trackers(accelerator, path.parent, last_step), accelerator)

    def write(self, kind: str, step: int, num_steps: int, values: Mapping[str, Any]) -> None:
        """Add one line, visible at once to whoever reads the file."""
        if self._file is None:
            return
        line = {"kind": kind, "step": step, "num_steps": num_steps, **values}
        numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._accelerator.log(numbers, step=step)
        except OSError as error:
            raise cannot_write(error, self._path) from error

    def sync(self) -> None:
        """Make every line so far survive a power cut."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Finish the file and the trackers (the process group stays: the export needs it)."""
        if self._file is not None:
            self.sync()
            self._file.close()
        for tracker in self._accelerator.trackers:
            tracker.finish()


def start_trackers(accelerator: Accelerator, out: Path, last_step: int) -> None:
    """Begin, or go on with, what the trackers show of the run in ``out``.

    Weights & Biases knows a run by an id, kept in the folder: a resumed run is the same one there.

    Raises:
        GdistillError: If a tracker does not start (no account, no network).
    """
    options: dict[str, Any] = {"tensorboard": {"purge_step": last_step + 1}}
    if any(str(getattr(t, "value", t)) == "wandb" for t in accelerator.log_with):
        run_id = out / WANDB_RUN_ID
        if not run_id.exists():
            write_bytes_atomic(run_id, secrets.token_hex(8).encode())
        same = {"id": run_id.read_text().strip(), "resume": "allow"}
        options["wandb"] = {"dir": str(out), "name": out.resolve().name, **same}
    try:
        accelerator.init_trackers("gdistill", init_kwargs=options)
    except Exception as error:  # of the trackers' own libraries
        raise GdistillError(
            "a tracker does not start",
            where="training.trackers",
            got=first_line(error),
            remedy="log in to it (wandb login), set WANDB_MODE=offline, or leave it out",
        ) from error


def keep_lines_until(path: Path, last_step: int) -> None:
    """Drop the lines of steps after ``last_step``, and a half-written last line.

    Raises:
        IntegrityError: For a line in the middle that is not a metrics line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines):
        try:
            step = json.loads(line)["step"] if line.endswith(b"\n") else None
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                "not a line of metrics",
                where=f"{path}:{number + 1}",
                remedy="move the file away; the run starts a new one",
            ) from error
        if step is not None and step <= last_step:
            kept.append(line)
    if len(kept) < len(lines):
        write_bytes_atomic(path, b"".join(kept))


class StepWindow:
    """Averages over the steps since the last line; saved with a checkpoint."""

    def __init__(self) -> None:
        self.num_steps, self.loss_sum, self.norm_sum = 0, 0.0, 0.0
        self.num_tokens = self.num_masked = 0
        self._started = time.monotonic()
        self._timed_tokens, self._timed_flops = 0, 0.0

    def add(
        self, loss: float, norm: float, num_tokens: int, num_masked: int, num_flops: float
    ) -> None:
        """Count one optimiser step."""
        self.num_steps += 1
        self.loss_sum += loss
        self.norm_sum += norm
        self.num_tokens += num_tokens
        self.num_masked += num_masked
        self._timed_tokens += num_tokens
        self._timed_flops += num_flops

    def close(self, peak_flops_per_second: float | None) -> dict[str, Any]:
        """The figures of the window, which starts anew."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        flops = self._timed_flops / seconds
        values = {
            "loss": self.loss_sum / self.num_steps,
            "grad_norm": self.norm_sum / self.num_steps,
            "masked_fraction": self.num_masked / self.num_tokens,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(self._timed_tokens / seconds, 1),
            "flops_per_second": float(f"{flops:.4g}"),
        }
        if peak_flops_per_second:
            values["mfu"] = round(flops / peak_flops_per_second, 4)
        self.__init__()  # type: ignore[misc]
        return values

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
        names = ("num_steps", "loss_sum", "norm_sum", "num_tokens", "num_masked")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved window."""
        for name, value in state.items():
            setattr(self, name, value)


def training_flops(student: Student, num_rows: int, num_masked: int) -> float:
    """FLOPs of one forward and backward pass, as the model needs them (no recomputation).

    Args:
        student: What is trained.
        num_rows: Rows.
        num_masked: Positions that met the head.
    """
    return num_rows * student.flops_per_row + num_masked * student.flops_per_masked


def peak_flops_per_second(
    configured: float | None, device: torch.device, num_devices: int
) -> float | None:
    """Peak of all devices together; None where it is unknown (every CPU, for one).

    Args:
        configured: Peak of one device, FLOP/s; None looks the device up.
        device: The kind of device.
        num_devices: How many there are.
    """
    peak = configured or _known_peak(device)
    return None if peak is None else peak * num_devices


def _known_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return max((peak for part, peak in PEAK_BF16_FLOPS.items() if part in name), default=None)


def diverged(
    step: int,
    loss: float,
    grad_norm: float,
    rows: list[tuple[Int[Tensor, "b"], Float[Tensor, "b"]]],
    checkpoint_steps: list[int],
) -> GdistillError:
    """The error to raise, the same one on every process; all of them must call this.

    Args:
        step: The step that failed.
        loss: Global loss.
        grad_norm: Global gradient norm.
        rows: Row ids and NLLs of this process's micro-batches.
        checkpoint_steps: Checkpoints there are.
    """
    ids = torch.cat([row_ids for row_ids, _ in rows]).cpu()
    finite = torch.cat([nlls for _, nlls in rows]).isfinite().cpu()
    bad = gather_object(ids[~finite].tolist())
    everything = gather_object(ids.tolist())
    what = "the loss is not finite" if bad else "the gradient is not finite"
    last = f"the last good checkpoint is step {checkpoint_steps[-1]}" if checkpoint_steps else ""
    return GdistillError(
        what,
        where=f"step {step}",
        got=f"loss {loss}, gradient norm {grad_norm}, rows {_listed(bad or everything)}",
        remedy=f"look at these rows of the train split, or lower the learning rate; {last}",
    )


def _listed(rows: list[int]) -> str:
    named = ", ".join(map(str, sorted(rows)[:MAX_NAMED_ROWS]))
    more = len(rows) - MAX_NAMED_ROWS
    return f"{named} and {more} more" if more > 0 else named
