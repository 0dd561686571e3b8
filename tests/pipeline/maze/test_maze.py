from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.maze import (
    LAYOUTS,
    MOVES,
    MazeLayout,
    draw_documents,
    load_maze,
    maze_tokenizer,
)
from shards.errors import UsageError


@pytest.mark.parametrize(
    ("layout", "lengths"), [("k4", {9: 4}), ("m57", {5: 2, 7: 11, 9: 44})], ids=["k4", "m57"]
)
def test_built_in_layouts_have_the_known_paths(layout: str, lengths: dict[int, int]) -> None:
    paths = load_maze(layout).paths()
    assert Counter(map(len, paths)) == lengths
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_path_walks_free_cells_once_from_start_to_target(layout: str) -> None:
    maze = load_maze(layout)
    for path in maze.paths():
        cells = [maze.start]
        for move in path:
            down, right = MOVES[move]
            cells.append((cells[-1][0] + down, cells[-1][1] + right))
        assert all(maze.is_free(cell) for cell in cells)
        assert len(set(cells)) == len(cells)
        assert cells[-1] == maze.target


def test_a_grid_worked_by_hand() -> None:
    """S T over two free cells: straight right, or down right up."""
    maze = MazeLayout("hand", ("ST", ".."), max_moves=3)
    assert maze.paths() == [("right",), ("down", "right", "up")]
    assert MazeLayout("hand", ("ST", ".."), max_moves=2).paths() == [("right",)]
    assert (maze.start, maze.target, maze.row_length) == ((0, 0), (0, 1), 5)


def test_documents_are_drawn_uniformly_and_reproducibly() -> None:
    maze = load_maze("m57")
    documents = draw_documents(maze, 20_000, 0, "train")
    assert documents == draw_documents(maze, 20_000, 0, "train")
    assert documents != draw_documents(maze, 20_000, 1, "train")
    assert documents[:500] != draw_documents(maze, 500, 0, "validation")
    counts = Counter(documents)
    assert len(counts) == 57
    # Pearson statistic with 56 degrees of freedom: mean 56, standard deviation sqrt(112).
    expected = 20_000 / 57
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    assert statistic < 56 + 6 * math.sqrt(112)


def test_tokenizer_and_artifact(tmp_path: Path) -> None:
    maze = load_maze("k4")
    maze_tokenizer(maze.row_length).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (6, 0, 1)
    assert tokenizer("up down left right", add_special_tokens=False)["input_ids"] == [2, 3, 4, 5]
    assert tokenizer.decode([0, 2, 5, 1, 1], skip_special_tokens=True) == "up right"
    artifact = json.loads(json.dumps(maze.artifact()))
    assert artifact["start"] == [3, 1] and artifact["target"] == [3, 4]
    assert artifact["rows"] == list(LAYOUTS["k4"]) and len(artifact["paths"]) == 4
    assert artifact["max_moves"] == 9


def test_layouts_from_files(tmp_path: Path) -> None:
    text, toml = tmp_path / "plain.txt", tmp_path / "short.toml"
    text.write_text("ST\n..\n")
    toml.write_text('rows = ["ST", ".."]\nmax_moves = 1\n')
    assert load_maze(text).paths() == [("right",), ("down", "right", "up")]
    assert load_maze(toml).paths() == [("right",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ST\n.\n", "rectangle"),
        ("SX\n.T\n", "unknown cell"),
        ("S.\n..\n", "exactly one T"),
        ("S#\n#T\n", "no way through"),
        ("", "rectangle"),
    ],
)
def test_malformed_layouts_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "layout.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_maze(path).paths()


def test_an_unknown_layout_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'm57'"):
        load_maze("m75")
