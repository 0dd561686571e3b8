"""metrics.jsonl survives interruptions; rates and model FLOPs by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from shards.errors import IntegrityError
from shards.store.store import ShardStore
from tests.trainer.run_cases import tiny_run
from trainer.students.dit import training_mask
from trainer.training.construction import build_student
from trainer.training.metrics import (
    TIMING_FIELDS,
    StepWindow,
    keep_lines_until,
    peak_flops_per_second,
    training_flops,
)


def write_lines(path: Path, steps: list[int], tail: bytes = b"") -> None:
    lines = [json.dumps({"kind": "train", "step": step}).encode() + b"\n" for step in steps]
    path.write_bytes(b"".join(lines) + tail)


def test_lines_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [1, 4, 4, 8], tail=b'{"kind": "tr')
    keep_lines_until(path, 4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4, 4]


def test_a_complete_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [1, 2])
    before = path.stat().st_mtime_ns
    keep_lines_until(path, 2)
    assert path.stat().st_mtime_ns == before


def test_a_foreign_line_is_not_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [1], tail=b"hello\n")
    with pytest.raises(IntegrityError, match=r"metrics\.jsonl:2"):
        keep_lines_until(path, 1)


def test_a_window_averages_over_steps_and_continues_after_a_checkpoint() -> None:
    window = StepWindow()
    window.add(1.0, 3.0, num_tokens=100, num_masked=50, num_flops=1e6)
    resumed = StepWindow()
    resumed.load_state_dict(json.loads(json.dumps(window.state_dict())))
    for each in (window, resumed):
        each.add(2.0, 5.0, num_tokens=100, num_masked=30, num_flops=1e6)
    values, others = window.close(None), resumed.close(None)
    assert (values["loss"], values["grad_norm"], values["masked_fraction"]) == (1.5, 4.0, 0.4)
    assert {k: v for k, v in values.items() if k not in TIMING_FIELDS} == {
        k: v for k, v in others.items() if k not in TIMING_FIELDS
    }
    assert values["tokens_per_second"] > 0
    assert window.num_steps == 0


def test_paused_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    window = StepWindow()
    window.add(1.0, 1.0, num_tokens=100, num_masked=50, num_flops=1e6)
    clock = time.monotonic
    with window.paused():
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000.0)
    assert window.close(None)["seconds"] < 10.0


def test_utilisation_needs_a_peak() -> None:
    window = StepWindow()
    window.add(1.0, 1.0, num_tokens=100, num_masked=50, num_flops=1e6)
    values = window.close(peak_flops_per_second=1e15)
    assert 0 <= values["mfu"] < 1


def test_model_flops_by_hand(store: Path) -> None:
    student = build_student(tiny_run(), ShardStore.open(store), None)
    matrices = (3 * 16 * 16) + 16 * 16 + 2 * (16 * 64)  # qkv, attention output, two of the MLP
    body = 6 * matrices * 8 * 2 + 12 * 16 * 8 * 8 * 2  # 8 tokens, 2 rows
    assert training_flops(student, num_rows=2, num_masked=5) == body + 5 * (6 + 4) * 16 * 13
    named = dict(student.backbone.blocks.named_parameters())
    blocks = sum(p.numel() for n, p in named.items() if n.endswith("weight") and p.ndim == 2)
    modulation = sum(p.numel() for n, p in named.items() if "adaLN" in n and p.ndim == 2)
    assert matrices == blocks - modulation


def test_a_block_student_reads_two_halves(store: Path) -> None:
    opened = ShardStore.open(store)
    whole = build_student(tiny_run(), opened, None)
    blocks = build_student(tiny_run(student="bd3lm", model__block_size=4), opened, None)
    pairs = int(training_mask(8, 4, torch.device("cpu")).sum())
    matrices = (training_flops(whole, 4, 0) - 4 * 12 * 16 * 8 * 8) * 2
    assert training_flops(blocks, 4, 0) == matrices + 4 * 12 * 16 * pairs


def test_an_autoregressive_student_attends_half_the_pairs(store: Path) -> None:
    student = build_student(
        tiny_run(student="ar", model__conditioning="none"), ShardStore.open(store), None
    )
    assert student.num_attended_pairs == sum(range(1, 8)) and student.num_read_tokens == 7


def test_no_peak_is_made_up_for_a_cpu() -> None:
    assert peak_flops_per_second(None, torch.device("cpu"), 4) is None
    assert peak_flops_per_second(1e12, torch.device("cpu"), 4) == 4e12
