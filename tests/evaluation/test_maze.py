"""The maze's scores against hand-worked cases and simulation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.dense_noise import DenseNoise
from benchmarks.maze_task import (
    MazeTask,
    optimal_success,
    pool,
    row_probabilities,
    rows_of_paths,
    step_probabilities,
    teacher_agreement,
)
from evaluation.maze import Maze, maze_success, moves_of_words, teacher_decode, total_variation
from evaluation.score import wilson_interval
from shards.errors import GdistillError, UsageError

MAZE = Maze(
    rows=("...", "S#T"),
    start=(1, 0),
    target=(1, 2),
    paths=(("up", "right", "right", "down"),),
    max_moves=4,
)
PATH = MAZE.paths[0]


def test_success_needs_a_simple_path_that_ends_on_the_target() -> None:
    assert MAZE.is_success(PATH)
    assert not MAZE.is_success(PATH[:-1])
    assert not MAZE.is_success(("right", "right"))  # through the wall
    assert not MAZE.is_success(("down",))  # off the map
    assert not MAZE.is_success(None)
    wide = Maze(("..", "ST"), (1, 0), (1, 1), (("right",),), 5)
    assert not wide.is_success(("up", "down", "right"))  # comes back to its own cell


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("<bos> up right <eos> <eos>", ("up", "right")),
        ("up right", ("up", "right")),
        ("<bos> <eos>", ()),
        ("<bos> up <eos> right", None),
        ("<bos> up <bos> <eos>", None),
    ],
)
def test_moves_of_words(text: str, moves: tuple[str, ...] | None) -> None:
    assert moves_of_words(text.split()) == moves


def test_total_variation_counts_invalid_mass() -> None:
    assert total_variation({"a": 5, "b": 5}, {"a": 0.5, "b": 0.5}) == 0
    assert total_variation({"a": 10}, {"a": 0.5, "b": 0.5}) == 0.5
    assert total_variation({None: 10}, {"a": 1.0}) == 1.0


VALID = {"rows": ["...", "S#T"], "start": [1, 0], "target": [1, 2], "paths": [PATH], "max_moves": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ["...", "S#"]}, "unequal length"),
        ({"rows": []}, "unequal length"),
        ({"target": [1, 7]}, "target off the map"),
        ({"paths": []}, "not made of up, down"),
        ({"paths": [["north"]]}, "not made of up, down"),
        ({"start": [1]}, r"cannot read the maze.*maze\.json"),
        ({"max_moves": None}, r"cannot read the maze.*maze\.json"),
    ],
)
def test_a_maze_that_does_not_fit_itself_is_refused(
    tmp_path: Path, change: dict, message: str
) -> None:
    file = tmp_path / "maze.json"
    file.write_text(json.dumps(VALID))
    assert Maze.read(file) == MAZE
    file.write_text(json.dumps(VALID | change))
    with pytest.raises(GdistillError, match=message):
        Maze.read(file)
    file.write_text(json.dumps({"rows": ["."]}))
    with pytest.raises(GdistillError, match=r"no 'start' in it"):
        Maze.read(file)
    with pytest.raises(UsageError, match="No such file"):
        Maze.read(tmp_path / "none.json")


def test_optimum_by_hand() -> None:
    """Two equally likely sequences 00 and 11: one step gives 1/2; two steps can use the first."""
    language, weights = np.array([[0, 0], [1, 1]]), np.array([0.5, 0.5])
    one, _ = optimal_success(language, weights, 1)
    assert one == pytest.approx(0.5)
    two, each = optimal_success(language, weights, 2)
    # Both tokens in the same step with chance 1/2 (success 1/2), else the second one is certain.
    assert two == pytest.approx(0.75, abs=1e-4)
    assert each == pytest.approx([two / 2, two / 2])
    factorised = np.array([[a, b] for a in range(2) for b in range(3)])
    assert optimal_success(factorised, np.full(6, 1 / 6), 1)[0] == pytest.approx(1.0)


def test_optimum_against_simulation() -> None:
    """Monte Carlo of the definition; the bound is 4.5 standard errors of a proportion."""
    generator = np.random.default_rng(3)
    language = np.array([[0, 1, 2, 0], [0, 2, 1, 1], [1, 1, 1, 0], [2, 1, 2, 2], [2, 0, 1, 2]])
    weights = np.array([0.1, 0.2, 0.3, 0.25, 0.15])
    num_steps, num_samples = 3, 40_000
    exact, _ = optimal_success(language, weights, num_steps)
    steps = generator.choice(num_steps, p=step_probabilities(num_steps), size=(num_samples, 4))
    members = {tuple(row) for row in language.tolist()}
    hits = sum(_simulate(row, language, weights, generator) in members for row in steps)
    error = np.sqrt(exact * (1 - exact) / num_samples)
    assert abs(hits / num_samples - exact) < 4.5 * error


def _simulate(
    steps: np.ndarray, language: np.ndarray, weights: np.ndarray, generator: np.random.Generator
) -> tuple[int, ...]:
    known: dict[int, int] = {}
    for step in sorted(set(steps.tolist())):
        agree = np.all([language[:, i] == token for i, token in known.items()], axis=0)
        mass = weights * agree
        if mass.sum() == 0:
            return ()
        revealed = {
            i: int(generator.choice(language[:, i], p=mass / mass.sum()))
            for i in np.flatnonzero(steps == step)
        }
        known |= revealed
    return tuple(known[i] for i in range(len(steps)))


def test_rows_of_paths_pads_with_eos() -> None:
    ids = {"<eos>": 1, "up": 2, "down": 3, "left": 4, "right": 5}
    assert rows_of_paths([("up", "left")], 4, ids).tolist() == [[2, 4, 1, 1]]


ROUND = ("up", "right", "right", "down")
OTHER = ("up", "right", "down", "right")
TWO_WAYS = Maze(("...", "S.T"), (1, 0), (1, 2), (ROUND, OTHER), 4)
TEACHER = {ROUND: 0.75, OTHER: 0.25}


def test_details_of_success_by_hand() -> None:
    """4 of 8 valid: three of one path, one of the other; the rest is mass off the paths."""
    samples = [ROUND] * 3 + [OTHER] + [None, ("up",), ("left",), None]
    details = maze_success(TWO_WAYS, samples, TEACHER, "teacher").details
    assert details["num_success"] == 4 and details["num_distinct_paths"] == 2
    assert details["most_common_path_share"] == 3 / 8
    variation = 0.5 * (abs(3 / 8 - 0.75) + abs(1 / 8 - 0.25) + 4 / 8)
    assert details["total_variation_to_teacher"] == pytest.approx(variation)
    always = maze_success(TWO_WAYS, [ROUND] * 100, {ROUND: 0.5, OTHER: 0.5}, "teacher")
    assert always.value == 1.0 and always.details["num_distinct_paths"] == 1
    assert always.details["total_variation_to_teacher"] == pytest.approx(0.5)
    assert always.interval is not None and always.interval[0] < 1.0 <= always.interval[1]


def test_a_cell_pools_samples_not_runs() -> None:
    """2 of 2 and 1 of 8 samples: 3 of 10, not the mean of 1.0 and 0.125."""
    scores = [
        maze_success(TWO_WAYS, [ROUND, OTHER], TEACHER, "teacher"),
        maze_success(TWO_WAYS, [ROUND] + [None] * 7, TEACHER, "teacher"),
    ]
    rows = torch.tensor([[0, 1], [0, 2]])
    agreements = [
        teacher_agreement([[0, 1], [0, 1]], rows),
        teacher_agreement([[0, 2]] * 8, torch.tensor([[0, 2]] * 6 + [[0, 1]] * 2)),
    ]
    cell = pool(scores, agreements)
    assert cell["success"] == pytest.approx(0.3) and cell["num_samples"] == 10
    assert cell["interval_95"] == pytest.approx(wilson_interval(3, 10))
    assert cell["success_by_run"] == [1.0, 0.125]
    assert cell["num_distinct_paths"] == 1  # the least that any run shows
    assert cell["num_paths_in_language"] == 2
    assert cell["equal_to_teacher_decode"] == pytest.approx(0.7)
    assert cell["equal_interval_95"] == pytest.approx(wilson_interval(7, 10))
    first, second = 0.5 * (0.25 + 0.25), 0.5 * (abs(1 / 8 - 0.75) + 0.25 + 7 / 8)
    assert cell["total_variation_to_teacher"] == pytest.approx((first + second) / 2)


def test_agreement_counts_whole_rows() -> None:
    rows = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 2, 2]])
    score = teacher_agreement([[0, 1, 2], [0, 1, 2], [0, 2, 2]], rows)
    assert score.value == pytest.approx(2 / 3) and score.details["num_equal"] == 2
    assert score.interval == pytest.approx(wilson_interval(2, 3))
    with pytest.raises(GdistillError, match="one teacher row per sample"):
        teacher_agreement([[0, 1, 2]], rows)


class Bigram:
    """A teacher of three tokens whose next token depends on the last one alone."""

    log_probs = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]).log()

    def __call__(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.log_probs[input_ids], past_key_values=None)


def test_the_teacher_decodes_by_the_first_arrival() -> None:
    """argmax(log p - log t) is the token whose t / p is smallest: by hand from [0] and [1].

    Row 0: from token 0, t / p = 1/.1, 1.5/.6, 1/.3 -> token 1; from 1: 3/.5, 1/.25, 2/.25 -> 1.
    Row 1: from token 1, t / p = 1/.5, 2/.25, 9/.25 -> token 0; from 0: 2/.1, 9/.6, 1/.3 -> 2.
    """
    ones = [1.0, 1.0, 1.0]
    rows = [ones, [1.0, 1.5, 1.0], [3.0, 1.0, 2.0], ones, [1.0, 2.0, 9.0], [2.0, 9.0, 1.0]]
    found = teacher_decode(Bigram(), torch.tensor([0, 1]), DenseNoise(torch.tensor(rows)), 3)
    assert found.tolist() == [[0, 1, 1], [1, 0, 2]]


def test_a_rows_probability_is_the_product_behind_its_first_token() -> None:
    shares = row_probabilities(Bigram(), torch.tensor([[0, 1, 0], [2, 2, 2]]))
    assert shares == pytest.approx([0.6 * 0.5, 0.6 * 0.6])


def test_rows_are_scored_against_the_teachers_decode_of_their_own_noise() -> None:
    """The teacher's own rows agree with it; under another seed they are other rows."""
    words = ("<bos>", "<eos>", "up", "right", "down", "left")
    teacher = Uniform(len(words))
    task = MazeTask(TWO_WAYS, words, 6, teacher, TEACHER, {})
    rows = task.teacher_rows(5, 64)
    assert rows.shape == (64, 6) and bool((rows[:, 0] == 0).all())
    success, agreement = task.score(rows, 5)
    reached = sum(TWO_WAYS.is_success(task.moves(row)) for row in rows.tolist())
    assert success.details["num_success"] == reached
    assert agreement.value == 1.0
    assert task.score(rows, 6)[1].value < 0.5
    assert task.moves([0, 2, len(words), 1, 1, 1]) is None  # a mask is no move


class Uniform:
    """A teacher that finds every token equally likely."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        return SimpleNamespace(logits=logits, past_key_values=None)
