"""The maze: its paths, enumerated; its corpus, drawn; its teacher, trained to its entropy."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import maze as mazes
from pipeline.maze import MOVES, MazeLayout, MazeTeacherConfig, load_maze, path_rows
from shards.errors import UsageError
from tests.pipeline.extract_cases import times


def train(maze: MazeLayout, out: Path, config: MazeTeacherConfig) -> dict[str, Any]:
    """What the record of the training says."""
    mazes.train_maze_teacher(maze, out, config)
    return json.loads((out / "training.json").read_text())["report"]


TINY = MazeTeacherConfig(2, num_heads=2, hidden_size=32, num_steps=120, learning_rate=1e-2)
MOST_EXCESS_NATS = 0.1


@pytest.mark.parametrize(("layout", "lengths"), [("k4", {9: 4}), ("m57", {5: 2, 7: 11, 9: 44})], ids=["k4", "m57"])
def test_built_in_layouts_have_the_known_paths(layout: str, lengths: dict[int, int]) -> None:
    maze = load_maze(layout)
    paths = maze.paths()
    assert Counter(map(len, paths)) == lengths and len(set(paths)) == len(paths)
    order = list(MOVES)
    keys = [(len(path), [order.index(move) for move in path]) for path in paths]
    assert keys == sorted(keys)
    for path in paths:
        cells = [maze.start]
        for down, right in (MOVES[move] for move in path):
            cells.append((cells[-1][0] + down, cells[-1][1] + right))
        assert all(maze.is_free(cell) for cell in cells)
        assert len(set(cells)) == len(cells) and cells[-1] == maze.target


def test_layouts_from_files_worked_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S T over two free cells: straight right, or down right up."""
    text = tmp_path / "plain.txt"
    text.write_text("ST\n..\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in (text, "~/plain.txt"):
        assert load_maze(place).paths() == [("right",), ("down", "right", "up")]
    assert MazeLayout("hand", ("ST", ".."), max_moves=2).paths() == [("right",)]
    maze = MazeLayout("hand", ("ST", ".."), max_moves=3)
    assert (maze.start, maze.target, maze.row_length) == ((0, 0), (0, 1), 5)
    assert path_rows(maze.paths(), 5).tolist() == [[0, 5, 1, 1, 1], [0, 3, 5, 2, 1]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "ST\n.\n", "rectangle"),
        ("a.txt", "SX\n.T\n", "unknown cell"),
        ("a.txt", "S.\n..\n", "exactly one T"),
        ("a.txt", "S#\n#T\n", "no way through"),
        ("a.txt", "", "rectangle"),
        ("m75", None, "did you mean 'm57'"),
    ],
)
def test_bad_layouts_are_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_maze(name if text is None else path).paths()


def test_documents_are_drawn_uniformly_and_reproducibly() -> None:
    maze = load_maze("m57")
    documents = mazes.draw_documents(maze, 20_000, 0, "train")
    assert documents == mazes.draw_documents(maze, 20_000, 0, "train")
    assert documents != mazes.draw_documents(maze, 20_000, 1, "train")
    assert documents[:500] != mazes.draw_documents(maze, 500, 0, "validation")
    counts = Counter(documents)
    assert len(counts) == 57
    # Pearson statistic with 56 degrees of freedom: mean 56, standard deviation sqrt(112).
    expected = 20_000 / 57
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    assert statistic < 56 + 6 * math.sqrt(112)


def test_tokenizer_and_artifact(tmp_path: Path) -> None:
    maze = load_maze("k4")
    mazes.maze_tokenizer(maze.row_length).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (6, 0, 1)
    assert tokenizer("up down left right", add_special_tokens=False)["input_ids"] == [2, 3, 4, 5]
    assert tokenizer.decode([0, 2, 5, 1, 1], skip_special_tokens=True) == "up right"
    artifact = json.loads(json.dumps(maze.artifact()))
    assert artifact["start"] == [3, 1] and artifact["target"] == [3, 4]
    assert artifact["rows"] == list(mazes.LAYOUTS["k4"]) and len(artifact["paths"]) == 4
    assert artifact["max_moves"] == 9


def test_teacher_reaches_the_entropy_of_its_corpus_and_is_left_alone(tmp_path: Path) -> None:
    maze, out = load_maze("k4"), tmp_path / "teacher"
    report = train(maze, out, TINY)
    # What 120 steps reach depends on rounding: MOST_EXCESS_NATS leaves room.
    assert 0 <= report["loss_nats"] - report["entropy_nats"] < MOST_EXCESS_NATS
    assert report["entropy_nats"] == pytest.approx(math.log(4), abs=0.01)
    model_probs = report["path_probabilities"]
    counts = Counter(mazes.draw_documents(maze, TINY.num_documents, 0, "train"))
    shares = [counts[" ".join(path)] / TINY.num_documents for path in maze.paths()]
    for name, probs in (("entropy", shares), ("loss", model_probs)):
        by_hand = -sum(share * math.log(p) for share, p in zip(shares, probs, strict=True))
        assert report[f"{name}_nats"] == pytest.approx(by_hand, rel=1e-6)
    outside = 1 - sum(model_probs)
    # Pinsker: TV <= sqrt(KL / 2), and KL is the loss above the entropy.
    assert 0 <= outside <= math.sqrt(MOST_EXCESS_NATS / 2)
    by_hand = (sum(abs(p - 1 / 4) for p in model_probs) + outside) / 2
    assert report["total_variation"] == pytest.approx(by_hand, abs=1e-9)

    before = times(out)
    assert train(maze, out, TINY) == report
    assert times(out) == before
    with pytest.raises(UsageError, match="no maze teacher"):
        train(maze, tmp_path, TINY)
    for layout, seed, match in (("k4", 1, r"config\.seed"), ("m57", 0, r"maze\.name")):
        with pytest.raises(UsageError, match=match):
            train(load_maze(layout), out, MazeTeacherConfig(**{**vars(TINY), "seed": seed}))

    model = AutoModelForCausalLM.from_pretrained(out)
    assert len(AutoTokenizer.from_pretrained(out)) == model.config.vocab_size == 6
    with torch.no_grad():
        log_probs = mazes.row_log_probs(model, path_rows(maze.paths(), 11))
    assert log_probs.exp().tolist() == pytest.approx(report["path_probabilities"], abs=1e-5)
    artifact = json.loads((out / "maze.json").read_text())
    assert artifact["teacher_probabilities"] == pytest.approx(report["path_probabilities"])


def test_training_is_deterministic_and_may_be_in_minibatches(tmp_path: Path) -> None:
    settings = MazeTeacherConfig(1, num_heads=2, hidden_size=8, num_steps=4, batch_size=5)
    for name in "ab":
        state = torch.manual_seed(ord(name)).get_state()
        report = train(load_maze("m57"), tmp_path / name, settings)
        assert len(report["path_probabilities"]) == 57
        assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are left alone"
    for seed in (0, 1):  # weights before the first step, and documents, are of the seed
        untrained = replace(settings, num_steps=0, num_documents=20, seed=seed)
        report = train(load_maze("m57"), tmp_path / str(seed), untrained)
        counts = Counter(mazes.draw_documents(load_maze("m57"), 20, seed, "train")).values()
        assert report["entropy_nats"] == pytest.approx(-sum(n / 20 * math.log(n / 20) for n in counts))
    first, second, *untrained = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab01")
    assert first == second and untrained[0] != untrained[1]
    rows = torch.tensor([[0, 2, 1], [0, 3, 1], [0, 2, 1], [0, 2, 1]])
    distinct, weights = mazes._batch(rows, 2, torch.Generator())
    assert (distinct.tolist(), weights.tolist()) == ([[0, 2, 1], [0, 3, 1]], [0.75, 0.25])
    assert len(mazes._batch(rows, 1, torch.Generator())[0]) == 1
