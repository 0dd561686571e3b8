"""The maze: how many samples are paths, how many of the paths are drawn, and how evenly.

In: ``maze.json`` of a corpus and sampled moves. Success alone is gameable: a model that always
draws one valid path scores 100%.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from evaluation.score import Score, wilson_interval
from shards.errors import GdistillError, UsageError
from shards.noise.embedding import Noise

Path_ = tuple[str, ...]
BOS, EOS = "<bos>", "<eos>"
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


@dataclass(frozen=True)
class Maze:
    """The maze a corpus was made from, as its ``maze.json`` says.

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
            start, target = ((int(value[name][0]), int(value[name][1])) for name in ("start", "target"))
            paths = tuple(map(tuple, value["paths"]))
            return cls(tuple(value["rows"]), start, target, paths, int(value["max_moves"]))
        except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
            kind = UsageError if isinstance(error, OSError) else GdistillError
            got = f"no {error} in it" if isinstance(error, KeyError) else error
            got, expected = getattr(error, "strerror", got), "STORE/corpus/maze.json of a corpus"
            raise kind("cannot read the maze", where=path, got=got, expected=expected) from error

    def is_success(self, moves: Path_ | None) -> bool:
        """True for a simple path from start to target of at most ``max_moves`` moves."""
        return moves in self.paths


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
    maze: Maze, samples: Sequence[Path_ | None], reference: Mapping[Path_, float], reference_name: str
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


# What the teacher itself writes from a student's noise, one token after the other: the conditioned
# student learns the map from noise to text, and is right where it writes the same in parallel.


@torch.no_grad()
def teacher_decode(model: Any, first_tokens: Int[Tensor, "b"], noise: Noise, row_length: int) -> Int[Tensor, "b l"]:
    """Decode B rows by Gumbel-max, position 0 given.

    Args:
        model: A causal language model of transformers, float32.
        first_tokens: Token at position 0 of each row.
        noise: Arrival times of B * row_length positions, row by row; position 0 is unused.
        row_length: Tokens in a row.
    """
    num_rows = first_tokens.shape[0]
    tokens, cache = first_tokens[:, None], None
    for position in range(1, row_length):
        output = model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        log_probs = output.logits[:, -1].float().log_softmax(-1)[:, : noise.vocab_size]
        index = torch.arange(num_rows) * row_length + position
        arrivals = noise.select(index).tile(0, noise.vocab_size)
        tokens = torch.cat([tokens, (log_probs - arrivals.log()).argmax(-1)[:, None]], dim=1)
    return tokens
