"""What a run says: metrics, averages, ``gdistill-train status`` at every stage, trackers."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.gpu_parts import model_flops
from shards.atomic import exclusive
from shards.errors import GdistillError, IntegrityError, UsageError
from tests.commands import call
from tests.trainer.run_cases import LENGTH, next_batch, student_of, tiny_run, trainer_of
from trainer.students.registry import MDLM
from trainer.training.loop import MetricsFile, StepWindow, train
from trainer.training.settings import checkpoint_steps
from trainer.training.status import run_status, status_text


def test_a_line_that_is_none_of_metrics_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in ("{", "[]", "3", '{"kind": "train"}', '{"step": "many"}'):
        path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
        with pytest.raises(IntegrityError, match=r"metrics.jsonl:2"):
            MetricsFile(path, 5)
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4')
    MetricsFile(path, 2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n', "what is behind the checkpoint is made again"


def test_a_saved_window_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are of the steps that were made here, in the time that was not paused."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    whole = StepWindow()
    whole.add(1.0, 2.0, 8, 4)
    rest = StepWindow(**json.loads(json.dumps(whole.state_dict())))
    for window, steps_here in ((whole, 2), (rest, 1)):
        window.add(3.0, 4.0, 8, 2)
        window.restart_clock()
        clock[0] += 4.0
        with window.paused():
            clock[0] += 1000.0
        figures = {"loss": 2.0, "grad_norm": 3.0, "masked_fraction": 6 / 16, "seconds": 4.0}
        figures["tokens_per_second"] = 2.0 * steps_here
        assert window.close() == figures
    assert whole.num_steps == 0, "a window starts anew when it is closed"


def test_model_flops_by_hand(store: Path) -> None:
    student = student_of(store)
    matrices = (3 * 16 * 16) + 16 * 16 + 2 * (16 * 64)  # qkv, attention output, two of the MLP
    assert isinstance(student, MDLM)
    assert model_flops(student, 1, 0) == 6 * matrices * 8 + 12 * 16 * 8 * 8  # rows of 8 tokens
    assert model_flops(student, 0, 1) == (6 + 4) * 16 * 13


def test_the_masked_fraction_is_of_all_tokens(store: Path, tmp_path: Path) -> None:
    trainer = trainer_of(store, tmp_path / "run")[0]
    batch = next_batch(trainer)
    num_masked = int(trainer.student.corrupt(batch).mask.sum())
    trainer.advance(batch)
    assert trainer.window.close()["masked_fraction"] == num_masked / 64


def run_folder(out: Path, *lines: dict[str, Any], tail: str = "") -> Path:
    """A folder as a run of 1,000 steps leaves it after writing these lines at time 5,000."""
    out.mkdir(parents=True, exist_ok=True)
    config = {"student": "mdlm", "training": {}, "model": {"conditioning": "none"}}
    (out / "config.json").write_text(json.dumps(config))
    text = "".join(json.dumps({"num_steps": 1000, **line}) + "\n" for line in lines)
    (out / "metrics.jsonl").write_text(text + tail)
    os.utime(out / "metrics.jsonl", (5000, 5000))
    return out


def train_line(step: int, rate: float, loss: float = 3.0) -> dict[str, Any]:
    figures = {"num_tokens": step * 64, "tokens_per_second": rate, "loss": loss}
    return {"kind": "train", "step": step, **figures}


def test_a_run_at_work(tmp_path: Path) -> None:
    lines = [train_line(100, 10.0), {"kind": "validation", "step": 200, "nll_nats": 2.5}]
    out = run_folder(tmp_path / "out", *lines, train_line(250, 320.0, 2.75), tail='3\n{}\n{"kind": "tr')
    whole = ("step-00000100", "step-00000200", ".writing-step-00000250", "00000300", "step-new")
    for file in (*(f"{name}/state.json" for name in whole), "step-00000400/weights.safetensors"):
        (out / "checkpoints" / file).parent.mkdir(parents=True)
        (out / "checkpoints" / file).touch()
    with exclusive(out):
        text = status_text(out, now=5042.0)
    # 64 tokens a step at 320 tokens a second: 5 steps a second, 750 to go.
    assert "; ".join(" ".join(line.split()) for line in text.splitlines()[3:]) == (
        "step 250; num_steps 1000; tokens_per_second 320; steps_per_second 5; eta_seconds 150; loss 2.75; "
        "validation_step 200; validation_nll_nats 2.5; checkpoint_step 200; seconds_since_line 42; "
        "is_running True; is_finished False"
    )


def test_a_run_that_died_one_before_its_first_line_and_none(tmp_path: Path, monkeypatch: Any) -> None:
    died = run_status(run_folder(tmp_path / "out", train_line(250, 320.0)), now=8600.0)
    assert died["is_running"] is False and died["seconds_since_line"] == 3600 and died["checkpoint_step"] is None
    begun = run_folder(tmp_path / "begun")
    assert run_status(begun)["eta_seconds"] is None and "step" not in status_text(begun)
    assert run_status(begun, now=4990.0)["seconds_since_line"] == 0, "by another machine's clock"
    (begun / "metrics.jsonl").unlink()
    assert run_status(begun)["seconds_since_line"] is None
    monkeypatch.setattr("trainer.training.status.is_held", lambda _: None)  # a file system without locks
    assert run_status(begun)["is_running"] is None
    for content in (None, "{", "[]", '{"student": "mdlm"}'):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(UsageError, match="no training run there"):
            status_text(tmp_path)
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UsageError, match="cannot read there"):
        checkpoint_steps(tmp_path / "checkpoints")


def test_both_parts_are_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first part of a two-stage training lies below the run's folder, alone at first."""
    run_folder(tmp_path / "out" / "plain", train_line(250, 320.0))
    assert "\n\n" not in status_text(tmp_path / "out")
    run_folder(tmp_path / "out", train_line(7, 320.0))
    assert call("gdistill-train", "status", tmp_path / "out", "--json") == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert [part["step"] for part in parts] == [250, 7]
    first, second = status_text(tmp_path / "out").split("\n\n")
    assert "plain" in first and "plain" not in second.splitlines()[0]


def test_a_real_run_and_a_longer_one_after_it(tmp_path: Path, finished: Path) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    status = run_status(out)
    assert status["is_finished"] and status["is_running"] is False and status["eta_seconds"] is None
    steps = ("step", "num_steps", "checkpoint_step", "validation_step")
    assert [status[name] for name in steps] == [10] * 4
    assert status["tokens_per_second"] / status["steps_per_second"] == pytest.approx(8 * LENGTH)
    lines = (out / "metrics.jsonl").read_text().replace('"num_steps": 10', '"num_steps": 20')
    (out / "metrics.jsonl").write_text(lines)
    assert not run_status(out)["is_finished"], "the model there is that of the shorter run"
    shutil.copy(finished / "metrics.jsonl", out)
    assert run_status(out)["is_finished"]
    (out / "model" / "config.json").unlink()
    assert not run_status(out)["is_finished"], "its model is still to be written"


# Weights & Biases: refused where it is not installed, and one run there for one run here.

WANDB = {"training__trackers": '["wandb"]'}


def test_a_resumed_run_is_the_same_one_there(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    # Accelerate looks once, when it is imported.
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.WANDB, LoggerType.TENSORBOARD])
    changes = {"training__trackers": '["wandb", "tensorboard"]', "training__checkpoint_every_steps": 3}
    for steps, out in ((4, tmp_path / "out"), (10, tmp_path / "out"), (1, Path("."))):
        assert train(tiny_run(training__num_steps=steps, **changes), store, out)
        shutil.rmtree(out / "checkpoints/step-00000004", ignore_errors=True)  # as of a run that was killed
        (tmp_path / "other").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "other")
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard" / "gdistill")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 3, 6, 9, 10]
    started = [call.kwargs for call in wandb.init.call_args_list]
    assert started[0] == started[1] and started[2]["id"] != started[0]["id"]
    assert started[0]["project"] == "gdistill" and started[0]["resume"] == "allow"
    assert [kwargs["name"] for kwargs in started] == ["out", "out", "other"]
    assert wandb.init.return_value.finish.call_count == 3
    logged = [call for call in wandb.init.return_value.log.call_args_list if "train/num_tokens" in call.args[0]]
    assert [call.kwargs["step"] for call in logged] == [1, 3, 4, 6, 9, 10, 1]
    wandb.init.side_effect = RuntimeError("api_key not configured\nsee the manual")
    with pytest.raises(GdistillError, match=r"does not start.*api_key not configured") as caught:
        train(tiny_run(**WANDB), store, tmp_path / "refused")
    assert "manual" not in str(caught.value)
