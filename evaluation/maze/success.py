"""Do sampled moves walk from start to target, how many ways, and how often each?

Success alone is gameable: a model that always draws one valid path scores 100%. So the number of
distinct valid paths and the total-variation distance to a given path distribution (the teacher's,
or the uniform one the corpus is drawn from) stand beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.score import Score, wilson_interval
from shards.errors import GdistillError, UsageError

Path_ = tuple[str, ...]
BOS, EOS = "<bos>", "<eos>"
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


@dataclass(frozen=True)
class Maze:
    """The maze a corpus was made from, as its ``maze.json`` tells.

    Attributes:
        rows: The map from top to bottom; ``#`` is a wall.
        start: (row, column), counted from the upper left.
        target: (row, column).
        paths: Every path of the language, as tuples of move names.
        max_moves: Longest path in moves.

    Raises:
        ValueError: For a map, cells or paths that do not fit each other.
    """

    rows: tuple[str, ...]
    start: tuple[int, int]
    target: tuple[int, int]
    paths: tuple[Path_, ...]
    max_moves: int

    def __post_init__(self) -> None:
        if not self.rows or {len(row) for row in self.rows} != {len(self.rows[0])}:
            raise ValueError("rows of unequal length")
        for name, (row, column) in (("start", self.start), ("target", self.target)):
            if not (0 <= row < len(self.rows) and 0 <= column < len(self.rows[0])):
                raise ValueError(f"a {name} off the map")
        if not self.paths or any(move not in STEPS for path in self.paths for move in path):
            raise ValueError(f"paths that are not made of {', '.join(STEPS)}")

    @classmethod
    def read(cls, path: Path) -> Maze:
        """Read ``maze.json``.

        Raises:
            UsageError: When the file cannot be read.
            GdistillError: When it is no maze, with what is wrong in it.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                rows=tuple(value["rows"]),
                start=(int(value["start"][0]), int(value["start"][1])),
                target=(int(value["target"][0]), int(value["target"][1])),
                paths=tuple(tuple(moves) for moves in value["paths"]),
                max_moves=int(value["max_moves"]),
            )
        except OSError as error:
            raise _unreadable(UsageError, path, error.strerror) from error
        except KeyError as error:
            raise _unreadable(GdistillError, path, f"no {error} in it") from error
        except (ValueError, TypeError, IndexError) as error:
            raise _unreadable(GdistillError, path, error) from error

    def walk(self, moves: Sequence[str]) -> list[tuple[int, int]] | None:
        """The cells visited, or None where a move leaves the map or hits a wall."""
        cells = [self.start]
        for move in moves:
            row, column = cells[-1][0] + STEPS[move][0], cells[-1][1] + STEPS[move][1]
            inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[0])
            if not inside or self.rows[row][column] == "#":
                return None
            cells.append((row, column))
        return cells

    def is_success(self, moves: Path_ | None) -> bool:
        """True for a simple path from start to target of at most ``max_moves`` moves."""
        if moves is None or len(moves) > self.max_moves:
            return False
        cells = self.walk(moves)
        return cells is not None and cells[-1] == self.target and len(set(cells)) == len(cells)


def _unreadable(kind: type[GdistillError], path: Path, got: object) -> GdistillError:
    return kind(
        "cannot read the maze",
        where=path,
        got=got,
        expected="maze.json of a corpus",
        remedy="give STORE/corpus/maze.json of the extraction",
    )


def moves_of_words(row: Sequence[str]) -> Path_ | None:
    """The moves in front of the first end marker; None when the row is not ``<bos>? moves <eos>*``.

    Anything but an end marker behind one makes the sample invalid: a row with moves behind its
    end is not in the language.
    """
    words = list(row[1:] if row[:1] == [BOS] else row)
    end = words.index(EOS) if EOS in words else len(words)
    moves = words[:end]
    if any(word != EOS for word in words[end:]) or any(word not in STEPS for word in moves):
        return None
    return tuple(moves)


def total_variation(counts: Mapping[Any, int], reference: Mapping[Any, float]) -> float:
    """Half the L1 distance between an empirical and a given distribution; in [0, 1]."""
    total = sum(counts.values())
    keys = set(counts) | set(reference)
    return 0.5 * sum(abs(counts.get(key, 0) / total - reference.get(key, 0.0)) for key in keys)


def maze_success(
    maze: Maze,
    samples: Sequence[Path_ | None],
    reference: Mapping[Path_, float],
    reference_name: str,
) -> Score:
    """Share of samples that are valid paths, with coverage and total variation in the details.

    Args:
        maze: The maze.
        samples: Moves of each sample; None for a malformed one.
        reference: Probability of each path in the distribution to compare with.
        reference_name: Whose it is: the details hold ``total_variation_to_NAME``.
    """
    outcomes = Counter(moves if maze.is_success(moves) else None for moves in samples)
    num_success = len(samples) - outcomes[None]
    valid = {path: count for path, count in outcomes.items() if path is not None}
    return Score(
        name="maze_success",
        value=num_success / len(samples),
        num_samples=len(samples),
        interval=wilson_interval(num_success, len(samples)),
        details={
            "num_success": num_success,
            "num_distinct_paths": len(valid),
            "num_paths_in_language": len(maze.paths),
            f"total_variation_to_{reference_name}": total_variation(outcomes, reference),
            "most_common_path_share": max(valid.values(), default=0) / len(samples),
        },
    )
