"""The maze's scores against hand-worked cases and simulation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evaluation.maze.optimum import optimal_success, rows_of_paths, step_probabilities
from evaluation.maze.success import Maze, maze_success, moves_of_words, total_variation
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


def test_always_drawing_one_path_scores_full_success_and_bad_variation() -> None:
    other = ("up", "right", "down", "right")
    maze = Maze(("...", "S.T"), (1, 0), (1, 2), (PATH, other), 4)
    score = maze_success(maze, [PATH] * 100, {PATH: 0.5, other: 0.5}, "teacher")
    assert score.value == 1.0
    assert score.details["num_distinct_paths"] == 1
    assert score.details["total_variation_to_teacher"] == pytest.approx(0.5)
    assert score.interval is not None and score.interval[0] < 1.0 <= score.interval[1]


def test_maze_file_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "maze.json"
    file.write_text(json.dumps({"rows": ["."]}))
    with pytest.raises(GdistillError, match=r"cannot read the maze.*maze\.json"):
        Maze.read(file)


VALID_MAZE = {
    "rows": ["...", "S#T"],
    "start": [1, 0],
    "target": [1, 2],
    "paths": [PATH],
    "max_moves": 4,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ["...", "S#"]}, "unequal length"),
        ({"rows": []}, "unequal length"),
        ({"target": [1, 7]}, "target off the map"),
        ({"paths": []}, "not made of up, down"),
        ({"paths": [["north"]]}, "not made of up, down"),
    ],
)
def test_a_maze_that_does_not_fit_itself_is_refused(
    tmp_path: Path, change: dict, message: str
) -> None:
    file = tmp_path / "maze.json"
    file.write_text(json.dumps(VALID_MAZE))
    assert Maze.read(file) == MAZE
    file.write_text(json.dumps(VALID_MAZE | change))
    with pytest.raises(GdistillError, match=message):
        Maze.read(file)


def test_a_missing_maze_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Maze.read(tmp_path / "maze.json")


def test_optimum_by_hand() -> None:
    """Two equally likely sequences 00 and 11: one step gives 1/2; two steps can use the first."""
    language, weights = np.array([[0, 0], [1, 1]]), np.array([0.5, 0.5])
    one, _ = optimal_success(language, weights, 1)
    assert one == pytest.approx(0.5)
    two, each = optimal_success(language, weights, 2)
    # Both tokens in the same step with chance 1/2 (success 1/2), else the second one is certain.
    assert two == pytest.approx(0.75, abs=1e-4)
    assert each == pytest.approx([two / 2, two / 2])


def test_optimum_of_a_factorised_language_is_one() -> None:
    language = np.array([[a, b] for a in range(2) for b in range(3)])
    value, _ = optimal_success(language, np.full(6, 1 / 6), 1)
    assert value == pytest.approx(1.0)


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
