from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.maze import MazeLayout, load_maze
from pipeline.maze_teacher import MazeTeacherConfig, path_rows, row_log_probs, train_maze_teacher
from shards.errors import UsageError

TINY = MazeTeacherConfig(
    num_layers=2, num_heads=2, hidden_size=32, num_steps=120, learning_rate=1e-2
)
MOST_EXCESS_NATS = 0.1


def test_rows_are_bos_moves_and_eos_padding() -> None:
    rows = path_rows([("right",), ("down", "right", "up")], 5)
    assert rows.tolist() == [[0, 5, 1, 1, 1], [0, 3, 5, 2, 1]]


def test_teacher_reaches_the_entropy_of_its_corpus_and_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "teacher"
    report = train_maze_teacher(load_maze("k4"), out, TINY)
    # Pinsker: TV <= sqrt(KL / 2), and KL is the loss above the entropy. What 120 steps reach
    # depends on rounding: MOST_EXCESS_NATS leaves room.
    excess = report.loss_nats - report.entropy_nats
    assert 0 <= excess < MOST_EXCESS_NATS
    assert report.total_variation_to_corpus <= math.sqrt(excess / 2) + 1e-6
    assert report.entropy_nats == pytest.approx(math.log(4), abs=0.01)
    model_probs = report.path_probabilities
    outside = 1 - sum(model_probs)
    assert 0 <= outside <= math.sqrt(MOST_EXCESS_NATS / 2)
    by_hand = (sum(abs(p - 1 / 4) for p in model_probs) + outside) / 2
    assert report.total_variation == pytest.approx(by_hand, abs=1e-9)

    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert train_maze_teacher(load_maze("k4"), out, TINY) == report
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(UsageError, match=r"config\.seed"):
        train_maze_teacher(load_maze("k4"), out, MazeTeacherConfig(**{**vars(TINY), "seed": 1}))

    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == model.config.vocab_size == 6
    with torch.no_grad():
        log_probs = row_log_probs(model, path_rows(load_maze("k4").paths(), 11))
    assert log_probs.exp().tolist() == pytest.approx(report.path_probabilities, abs=1e-5)
    artifact = json.loads((out / "maze.json").read_text())
    assert artifact["teacher_probabilities"] == pytest.approx(report.path_probabilities)


def test_training_is_deterministic(tmp_path: Path) -> None:
    maze = MazeLayout("hand", ("ST", ".."), max_moves=3)
    settings = MazeTeacherConfig(num_layers=1, num_heads=2, hidden_size=8, num_steps=4)
    torch.manual_seed(1)
    train_maze_teacher(maze, tmp_path / "a", settings)
    torch.manual_seed(2)
    train_maze_teacher(maze, tmp_path / "b", settings)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_minibatches_are_used_when_paths_outnumber_them(tmp_path: Path) -> None:
    settings = MazeTeacherConfig(
        num_layers=1, num_heads=2, hidden_size=8, num_steps=3, batch_size=5
    )
    report = train_maze_teacher(load_maze("m57"), tmp_path / "teacher", settings)
    assert len(report.path_probabilities) == 57


def test_a_folder_that_is_no_teacher_is_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="no maze teacher"):
        train_maze_teacher(load_maze("k4"), tmp_path, TINY)
    assert (tmp_path / "notes.txt").read_text() == "mine"
