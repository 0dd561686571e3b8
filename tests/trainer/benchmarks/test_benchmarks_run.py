"""The benchmarks at toy shapes on the CPU: they run, and check before they time."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_checks, gpu_suite, readings, training_step
from benchmarks.conditioner import run_benchmark
from benchmarks.measure import peak_allocated_bytes
from shards.errors import GdistillError, UsageError

CPU = torch.device("cpu")


def test_gpu_suite_at_toy_shape(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    gpu_suite.main(shape="toy", device="cpu", out=out)
    record = json.loads(out.read_text())
    assert record["machine"]["device"] == "cpu"
    assert all(check["passed"] for check in record["checks"].values())
    names = ("keyed noise", "categorical draws", "conditioner", "flex", "drafter", "step")
    assert all(any(key.startswith(name) for key in record["checks"]) for name in names)
    assert record["left_out_for_time"] == []
    for length in (16, 32):
        part = record[f"training, rows of {length}"]
        assert part["decoupling_gain"] > 0
        assert part["mfu_of_h200_bf16"] > 0
    assert record["extraction"]["figures"]["posterior"]["ratio"] > 0
    speed = record["first hitting"]["tokens_per_second"]
    assert record["first hitting"]["batched_gain"] == pytest.approx(speed["16"] / speed["1"])
    assert len(record["bars"]) == 5
    for name in ("Qwen2.5-0.5B", "Llama-3.2-1B"):
        part = record[f"heads on {name}"]
        assert part["frozen_weights_stayed"] and part["trained_parameters"] > 0
        assert part["training"]["losses"][1] < part["training"]["losses"][0]
        decoding = part["decoding"]
        assert decoding["coupled"]["teacher_passes"] <= decoding["plain"]["teacher_passes"] == 11
        assert decoding["coupled"]["padding_ids"] == decoding["plain"]["padding_ids"] == 0
    page = out.with_suffix(".md").read_text()
    assert "not measured" not in page and page.count("| yes |") + page.count("| NO |") >= 5


def suite_with(
    monkeypatch: pytest.MonkeyPatch, out: Path, **changes: Callable[..., object]
) -> dict[str, Any]:
    """What a suite leaves whose checks pass and whose parts cost nothing, but for the changes."""
    quick: dict[str, Callable[..., object]] = {
        "check_everything": lambda *_: {"step": {"error": 0.0, "passed": True}},
        "run_benchmark": lambda *_, **__: {"noise in memory": {"time_ratio": 0.4}},
        "training_throughput": lambda *_: {"decoupling_gain": 3.0},
        "extraction": lambda *_: {"figures": {"posterior": {"ratio": 1.2}}},
        "first_hitting": lambda *_: {"batched_gain": 6.0},
        "block_training": lambda *_: {"seconds": {}},
        "measure_shape": lambda *_: {"decoding": {}},
    }
    for name, replacement in {**quick, **changes}.items():
        monkeypatch.setattr(gpu_suite, name, replacement)
    with pytest.raises(GdistillError, match="parts of the suite failed") as caught:
        gpu_suite.main(shape="toy", device="cpu", out=out)
    assert caught.value.exit_code == 1
    return json.loads(out.read_text())


def full(*_: object, **__: object) -> object:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")


def test_gpu_suite_keeps_what_it_has_when_a_part_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = suite_with(monkeypatch, tmp_path / "a.json", training_throughput=full)
    rows = ["training, rows of 16", "training, rows of 32"]
    assert record["failures"] == rows
    for name in rows:
        expected = "OutOfMemoryError: CUDA out of memory. Tried to allocate"
        assert record[name] == {"error": expected}
    assert record["conditioner float32"]["noise in memory"]["time_ratio"] == 0.4
    assert record["block training"] == {"seconds": {}}
    assert [bar["met"] for bar in record["bars"].values()] == [True, False, True]
    page = (tmp_path / "a.md").read_text()
    assert "from shards over an online teacher >= 2.5 | not measured | NO |" in page
    assert "extraction: stage 2 over the bare forward pass <= 1.1 | 1.2 | NO |" in page
    assert "Failed: training, rows of 16, training, rows of 32." in page


def test_gpu_suite_reports_a_failed_check_and_times_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = {"step": {"error": float("nan"), "tolerance": 1e-5, "passed": False}}
    record = suite_with(monkeypatch, tmp_path / "a.json", check_everything=lambda *_: wrong)
    assert record["failures"] == ["check step"]
    assert record["checks"]["step"]["error"] == "nan"
    assert len(record["bars"]) == 5


def test_gpu_suite_writes_after_the_checks_and_after_each_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, seen = tmp_path / "a.json", []

    def look(*_: object, **__: object) -> object:
        seen.append(set(json.loads(out.read_text())))
        return full()

    timed = ("run_benchmark", "training_throughput", "extraction", "block_training")
    changes = dict.fromkeys(timed, look)
    last = suite_with(monkeypatch, out, **changes)
    assert "checks" in seen[0]
    assert [len(after - before) for before, after in pairwise(seen)] == [2, 1, 1, 2]
    assert len(last["failures"]) == 5


def test_a_check_that_cannot_run_has_failed_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_checks, "check_attention", full)
    monkeypatch.setattr(gpu_checks, "check_conditioner", lambda *_: {})
    monkeypatch.setattr(gpu_checks, "check_drafter", lambda *_: {})
    monkeypatch.setattr(gpu_checks, "check_step", lambda *_: {"step loss": {"passed": True}})
    checks = gpu_checks.check_everything(97, CPU)
    assert [name for name, check in checks.items() if not check["passed"]] == ["flex attention"]
    assert "OutOfMemoryError" in checks["flex attention"]["error"]
    assert set(checks) == {"keyed noise", "categorical draws", "flex attention", "step loss"}


def test_gpu_suite_refuses_what_it_cannot_run_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    with pytest.raises(UsageError, match=r"--shape\]; got foo; expected paper or toy"):
        gpu_suite.main(shape="foo", device="cpu", out=out)
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(UsageError, match="no such GPU"):
        gpu_suite.main(shape="toy", device=missing, out=out)
    assert not out.exists()


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


def test_readings_at_toy_shape(tmp_path: Path) -> None:
    found = readings.measure_steps("tiny", (1, 2), (4, 8), (2, 8, 50), CPU, repeats=2)
    low, high = found["K = 8"]["interval"]
    assert 0 < low <= high and set(found["seconds"]) == {"paper", "K = 4", "K = 8"}
    memory = readings.measure_memory(20, 60, 8, 4, 2, CPU)
    assert set(memory["peak_allocated_bytes"]) == {"search", "readings", "dense"}


def test_allocated_bytes_are_the_most_held_at_once() -> None:
    """Two tensors of a million float32 one after the other, then two at once: 8 MB, not 16 or 4."""

    def work() -> None:
        for _ in range(2):
            torch.empty(1_000_000)
        both = torch.empty(1_000_000), torch.empty(1_000_000)
        del both
        torch.empty(1_000_000)

    kept = torch.empty(5_000_000)  # held before: no part of it
    assert peak_allocated_bytes(work, CPU) == 8_000_000
    del kept


def test_an_interval_of_equal_ratios_is_a_point() -> None:
    found = readings.time_ratio([1.1, 2.2, 3.3], [1.0, 2.0, 3.0])
    assert found["ratio"] == pytest.approx(1.1)
    assert found["interval"] == pytest.approx([1.1, 1.1])


def test_coverage_follows_its_closed_form() -> None:
    """Two words in turns, bigrams certain but for 2%: p_x is near 1, and xi like the prior's.

    Then the token is among the k largest of V = 20 in k / V of the cases without a prior; with one
    only the two words race, which are as frequent. Within four standard errors, and 0.02 for p.
    """
    tokens = torch.arange(4000) % 2
    found = readings.coverage(tokens, 20, (1, 10, 20), 600, share=0.98)
    for w, count, expected in (("0", "1", 0.05), ("0", "10", 0.5), ("1", "1", 0.5)):
        room = 0.02 + 4 * (expected * (1 - expected) / 600) ** 0.5
        assert abs(found[f"w = {w}"][count] - expected) < room
    assert found["w = 0"]["20"] == 1.0 and found["w = 1"]["10"] > 0.98
