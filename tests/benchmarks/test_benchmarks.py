"""Every benchmark at a toy shape: it runs, checks before it times, and keeps what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_checks, gpu_suite, parity
from shards.errors import GdistillError, UsageError

CPU = torch.device("cpu")


@pytest.mark.slow
def test_gpu_suite_at_toy_shape(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    gpu_suite.main(shape="toy", device="cpu", out=out)
    record = json.loads(out.read_text())
    assert all(check["passed"] for check in record["checks"].values())
    names = ("keyed noise", "categorical draws", "conditioner", "flex", "step")
    assert all(any(key.startswith(name) for key in record["checks"]) for name in names)
    assert record["left_out_for_time"] == [] and len(record["bars"]) == 5
    page = out.with_suffix(".md").read_text()
    assert "not measured" not in page and page.count("| yes |") + page.count("| NO |") >= 5


def test_gpu_suite_keeps_what_it_has_when_a_part_and_a_check_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object, **__: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    wrong = {"step": {"error": float("nan"), "tolerance": 1e-5, "passed": False}}
    monkeypatch.setattr(gpu_suite, "check_everything", lambda *_: wrong)
    monkeypatch.setattr(
        gpu_suite, "run_benchmark", lambda *_, **__: {"noise in memory": {"time_ratio": 0.4}}
    )
    for name in ("training_throughput", "extraction", "first_hitting", "block_training"):
        monkeypatch.setattr(gpu_suite, name, full)
    out = tmp_path / "suite.json"
    with pytest.raises(GdistillError, match="parts of the suite failed"):
        gpu_suite.main(shape="toy", device="cpu", out=out)
    record = json.loads(out.read_text())
    assert record["failures"][0] == "check step" and "extraction" in record["failures"]
    assert record["checks"]["step"]["error"] == "nan"
    assert "OutOfMemoryError: CUDA out of memory" in record["extraction"]["error"]
    assert "Failed: check step," in out.with_suffix(".md").read_text()


def test_a_check_that_cannot_run_has_failed_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_checks, "check_attention", broken)
    monkeypatch.setattr(gpu_checks, "check_conditioner", lambda *_: {})
    checks = gpu_checks.check_everything(97, CPU)
    failed = [name for name, check in checks.items() if not check["passed"]]
    assert failed == ["flex attention"] and "no such kernel" in checks["flex attention"]["error"]


def test_gpu_suite_refuses_an_unknown_shape(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--shape\]; got foo; expected paper or toy"):
        gpu_suite.main(shape="foo", device="cpu", out=tmp_path / "a.json")


def check(comparisons: list[parity.Comparison]) -> None:
    assert comparisons
    assert not [c for c in comparisons if not c.passed]


@pytest.mark.parametrize("name", parity.DIFFUSION_CASES)
def test_a_training_pass_is_the_authors(golden: Path, name: str) -> None:
    check(parity.diffusion_case(golden, name))


@pytest.mark.parametrize("name", parity.SAMPLING_CASES)
def test_a_sampling_pass_is_the_authors(golden: Path, name: str) -> None:
    check(parity.sampling_case(golden, name))


def test_the_rest_of_the_authors_numbers(golden: Path) -> None:
    check(parity.n_minus_2_case(golden))
    check(parity.autoregressive_case(golden))
    check(parity.training_case(golden))
