"""The benchmarks at toy shapes on the CPU: they run, and check before they time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_suite, training_step
from benchmarks.conditioner import run_benchmark
from shards.errors import GdistillError

CPU = torch.device("cpu")


def test_gpu_suite_at_toy_shape(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    gpu_suite.main(shape="toy", device="cpu", out=out)
    record = json.loads(out.read_text())
    assert record["machine"]["device"] == "cpu"
    assert all(check["passed"] for check in record["checks"].values())
    names = ("keyed noise", "conditioner", "flex", "step")
    assert all(any(key.startswith(name) for key in record["checks"]) for name in names)
    assert record["left_out_for_time"] == []
    for length in (16, 32):
        part = record[f"training, rows of {length}"]
        assert part["decoupling_gain"] > 0
        assert part["mfu_of_h200_bf16"] > 0
    assert len(record["bars"]) == 3


def test_gpu_suite_times_nothing_when_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"conditioner output": {"error": 1.0, "tolerance": 1e-5, "passed": False}}
    monkeypatch.setattr(gpu_suite, "check_everything", lambda *_: wrong)
    monkeypatch.setattr(gpu_suite, "run_benchmark", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(GdistillError, match="conditioner output"):
        gpu_suite.run_suite(gpu_suite.TOY, CPU)


def test_conditioner_benchmark_at_toy_shape() -> None:
    found = run_benchmark(600, 8, 50, device=CPU, repeats=1)
    for setting in ("noise in memory", "keyed noise"):
        assert found[setting]["gradient_relative_error"] < 1e-5
        assert found[setting]["time_ratio"] > 0


def test_training_step_benchmark_at_toy_shape(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    training_step.main(
        out=out,
        presets="tiny",
        codecs="posterior,full",
        batch_size=4,
        row_length=16,
        vocab_size=300,
        repeats=1,
        dtypes="float32",
        teacher="1,16,2",
    )
    steps = json.loads(out.read_text())["steps"]
    assert set(steps) == {"tiny, posterior, float32", "tiny, full, float32"}
    for found in steps.values():
        assert found["losses"]["ours"] == pytest.approx(found["losses"]["dense"], rel=1e-4)
        assert found["decoupling_gain"] > 0
