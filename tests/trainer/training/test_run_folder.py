"""What ``gdistill-train status`` says of a run: before it, in it, after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shards.atomic import exclusive
from shards.errors import UsageError
from tests.trainer.run_cases import LENGTH, tiny_run
from trainer.training.checkpoint import RunStatus
from trainer.training.loop import train


def run_folder(out: Path, *lines: dict[str, Any], tail: str = "") -> Path:
    """A folder as a run of 1,000 steps leaves it after writing these lines at time 5,000."""
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"student": "mdlm", "training": {}}))
    text = "".join(json.dumps({"num_steps": 1000, **line}) + "\n" for line in lines)
    (out / "metrics.jsonl").write_text(text + tail)
    os.utime(out / "metrics.jsonl", (5000, 5000))
    return out


def train_line(step: int, rate: float, loss: float = 3.0) -> dict[str, Any]:
    figures = {"num_tokens": step * 64, "tokens_per_second": rate, "loss": loss}
    return {"kind": "train", "step": step, **figures}


def test_a_run_at_work(tmp_path: Path) -> None:
    lines = [train_line(100, 10.0), {"kind": "validation", "step": 200, "nll_nats": 2.5}]
    out = run_folder(tmp_path / "out", *lines, train_line(250, 320.0, 2.75), tail='{"kind": "tr')
    for step in ("step-00000100", "step-00000200", ".writing-step-00000250"):
        (out / "checkpoints" / step).mkdir(parents=True)
        (out / "checkpoints" / step / "state.json").touch()
    with exclusive(out):
        status = RunStatus.of(out, now=5042.0)
    # 64 tokens a step at 320 tokens a second: 5 steps a second, 750 to go.
    assert (status.step, status.num_steps, status.steps_per_second) == (250, 1000, 5.0)
    assert status.eta_seconds == 150.0 and status.loss == 2.75
    assert (status.validation_step, status.validation_nll_nats) == (200, 2.5)
    assert status.checkpoint_step == 200 and status.seconds_since_line == 42.0
    assert status.is_running and not status.is_finished
    assert status.to_text().splitlines()[1:] == [
        "step         250 of 1,000 (25.0%)",
        "rate         320 tok/s, 5 steps/s",
        "left         0:02:30",
        "loss         2.7500",
        "validation   2.5000 nats per token at step 200",
        "checkpoint   step 200",
        "process      at work; last line 0:00:42 ago",
    ]


def test_a_run_that_died(tmp_path: Path) -> None:
    out = run_folder(tmp_path / "out", train_line(250, 320.0))
    status = RunStatus.of(out, now=8600.0)
    assert status.is_running is False
    line = "process      none; last line 1:00:00 ago; the same command goes on from the beginning"
    assert status.to_text().splitlines()[-1] == line


def test_a_run_before_its_first_line(tmp_path: Path) -> None:
    status = RunStatus.of(run_folder(tmp_path / "out"))
    assert status.step is None and status.eta_seconds is None
    assert "step         none yet" in status.to_text()


def test_a_real_run_and_a_longer_one_after_it(tmp_path: Path, store: Path) -> None:
    out = tmp_path / "out"
    assert train(tiny_run(), store, out)
    status = RunStatus.of(out)
    assert status.is_finished and status.is_running is False
    assert status.step == status.num_steps == status.checkpoint_step == status.validation_step == 10
    assert status.tokens_per_second and status.steps_per_second
    per_step = status.tokens_per_second / status.steps_per_second
    assert per_step == pytest.approx(8 * LENGTH)
    lines = (out / "metrics.jsonl").read_text().replace('"num_steps": 10', '"num_steps": 20')
    (out / "metrics.jsonl").write_text(lines)
    assert not RunStatus.of(out).is_finished, "the model there is that of the shorter run"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"student": "mdlm"}'])
def test_what_is_no_run_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match="no training run there"):
        RunStatus.of(tmp_path)


def test_asking_does_not_wait_for_torch(tmp_path: Path) -> None:
    out = run_folder(tmp_path / "out", train_line(250, 320.0))
    program = (
        "import sys; sys.argv = ['gdistill-train', 'status', sys.argv[1], '--json']\n"
        "from trainer.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 250
