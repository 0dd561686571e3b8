"""The maze: paths that can be checked, enumerated and compared with an exact optimum.

In: ``maze.json`` of a corpus, its teacher, and sampled moves. Out, as scores: how many samples are
paths, how many of the paths are drawn, how far their shares are from the teacher's, and how many
samples are the teacher's own decode of the same noise. Success alone is gameable: a model that
always draws one valid path scores 100%.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from evaluation.score import Score, wilson_interval
from shards.console import without_library_bars
from shards.errors import GdistillError, UsageError
from shards.noise.kinds import Noise
from trainer.sampling.noise import sampling_noise

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
            start, target = (
                (int(value[name][0]), int(value[name][1])) for name in ("start", "target")
            )
            paths = tuple(map(tuple, value["paths"]))
            return cls(tuple(value["rows"]), start, target, paths, int(value["max_moves"]))
        except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
            kind = UsageError if isinstance(error, OSError) else GdistillError
            got = f"no {error} in it" if isinstance(error, KeyError) else error
            raise kind(
                "cannot read the maze",
                where=path,
                got=getattr(error, "strerror", got),
                expected="maze.json of a corpus",
                remedy="give STORE/corpus/maze.json of the extraction",
            ) from error

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


# The best any unconditioned masked diffusion model can do on a small language, exactly.
#
# At a step the model knows the revealed tokens and draws every token it reveals from that token's
# own conditional distribution, independently of the others revealed in the same step. The optimum
# predicts those conditionals exactly. Its chance of producing a sequence x is
#
#     P(x) = E_order [ product over steps, over i revealed in it, of p(x_i | x_revealed before) ]
#
# where each position is revealed in step 1..T with the probability the schedule gives,
# independently of the others. Sums run over subsets of positions, so this is for rows of at most
# about 12 tokens.


def step_probabilities(num_steps: int, time_end: float = 1e-5) -> Float[np.ndarray, "t"]:
    """P(a token is revealed in step k) for ancestral sampling on linspace(1, time_end, T + 1).

    The remainder ``time_end``, left to the final fill, is added to the last step.
    """
    times = np.linspace(1.0, time_end, num_steps + 1)
    shares = times[:-1] - times[1:]
    shares[-1] += time_end
    return shares


def conditional_table(
    language: Int[np.ndarray, "p l"], weights: Float[np.ndarray, "p"], target: Int[np.ndarray, "l"]
) -> Float[np.ndarray, "s l"]:
    """p(x_i | x_S) of ``target`` for every subset S of positions (bit mask) and every position i.

    Args:
        language: All sequences of the language.
        weights: Their probabilities.
        target: The sequence x; each x_S must occur in the language.
    """
    length = language.shape[1]
    agree = language == target[None]
    table = np.empty((2**length, length))
    for subset in range(2**length):
        members = [i for i in range(length) if subset >> i & 1]
        consistent = weights * agree[:, members].all(1)
        table[subset] = (consistent[:, None] * agree).sum(0) / consistent.sum()
    return table


def sequence_probabilities(
    tables: Float[np.ndarray, "p s l"], shares: Float[np.ndarray, "t"]
) -> Float[np.ndarray, "p"]:
    """P(x) of the module docstring for p sequences, by dynamic programming over subsets."""
    state, remaining = np.zeros(tables.shape[:2]), 1.0
    state[:, 0] = 1.0
    for share in shares:
        rate = min(1.0, share / remaining)
        remaining -= share
        result = np.zeros_like(state)
        for subset in np.flatnonzero(state.any(0)):
            # All supersets, grown one hidden position at a time: it stays masked or is revealed.
            targets, values = np.array([subset]), state[:, [subset]]
            for position in range(tables.shape[2]):
                if not subset >> position & 1:
                    revealed = values * rate * tables[:, subset, position, None]
                    targets = np.concatenate([targets, targets | (1 << position)])
                    values = np.concatenate([values * (1 - rate), revealed], axis=1)
            result[:, targets] += values
        state = result
    return state[:, -1]


def optimal_success(
    language: Int[np.ndarray, "p l"], weights: Float[np.ndarray, "p"], num_steps: int
) -> tuple[float, Float[np.ndarray, "p"]]:
    """The factorised optimum's chance to produce a sequence of the language, and of each one.

    Args:
        language: All sequences, one a row, without the position that is given.
        weights: Their probabilities.
        num_steps: T, the NFE budget of ancestral sampling.

    Raises:
        ValueError: For rows of more than 14 tokens (the sums are exponential in the length).
    """
    if language.shape[1] > 14:
        raise ValueError(f"rows of {language.shape[1]} tokens are too long to enumerate (max 14)")
    varying = [i for i in range(language.shape[1]) if len(set(language[:, i])) > 1]
    reduced = language[:, varying]
    tables = np.stack([conditional_table(reduced, weights, target) for target in reduced])
    each = sequence_probabilities(tables, step_probabilities(num_steps))
    return float(each.sum()), each


def rows_of_paths(
    paths: Sequence[Sequence[str]], length: int, ids: dict[str, int]
) -> Int[np.ndarray, "p l"]:
    """Paths as token rows of ``length``, padded with the end marker."""
    padded = [list(itertools.chain(path, [EOS] * (length - len(path)))) for path in paths]
    return np.array([[ids[word] for word in row] for row in padded])


# What the teacher itself writes from a student's noise, one token after the other: the conditioned
# student learns the map from noise to text, and is right where it writes the same in parallel.


@torch.no_grad()
def teacher_decode(
    model: Any, first_tokens: Int[Tensor, "b"], noise: Noise, row_length: int
) -> Int[Tensor, "b l"]:
    """Decode B rows by Gumbel-max, position 0 given.

    Args:
        model: A causal language model of transformers, float32.
        first_tokens: Token at position 0 of each row.
        noise: Arrival times of B * row_length positions, row by row; position 0 is unused.
        row_length: Tokens in a row.

    Raises:
        GdistillError: When noise and rows differ in number, or the model has no logit for an entry.
    """
    num_rows = first_tokens.shape[0]
    if noise.num_positions != num_rows * row_length:
        raise GdistillError(
            "the noise does not fit the rows",
            got=f"{noise.num_positions} positions",
            expected=f"{num_rows} x {row_length}",
        )
    tokens, cache = first_tokens[:, None], None
    for position in range(1, row_length):
        output = model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        log_probs = output.logits[:, -1].float().log_softmax(-1)[:, : noise.vocab_size]
        index = torch.arange(num_rows) * row_length + position
        arrivals = noise.select(index).tile(0, noise.vocab_size)
        tokens = torch.cat([tokens, (log_probs - arrivals.log()).argmax(-1)[:, None]], dim=1)
    return tokens


def teacher_agreement(samples: Sequence[Sequence[int]], teacher_rows: Int[Tensor, "b l"]) -> Score:
    """Share of samples that equal the teacher's decode token by token."""
    expected = teacher_rows.tolist()
    if len(expected) != len(samples):
        raise GdistillError(
            "one teacher row per sample is needed", got=len(expected), expected=len(samples)
        )
    num_equal = sum(list(ours) == theirs for ours, theirs in zip(samples, expected, strict=True))
    num, details = len(expected), {"num_equal": num_equal}
    interval = wilson_interval(num_equal, num)
    return Score("equal_to_teacher_decode", num_equal / num, num, interval, details=details)


@dataclass(frozen=True)
class MazeTask:
    """One layout with everything its samples are judged by.

    Attributes:
        maze: The maze.
        words: Word of each token id.
        row_length: Tokens in a row, the given first one included.
        teacher: The teacher, a causal language model.
        path_probabilities: The teacher's probability of each path.
        optimum: NFE -> success of the exact Bayes-optimal unconditioned model.
        decodes: The teacher's rows found so far, by sampling seed and number.
    """

    maze: Maze
    words: tuple[str, ...]
    row_length: int
    teacher: Any
    path_probabilities: Mapping[Path_, float]
    optimum: Mapping[int, float]
    decodes: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def noise(self, seed: int, num: int, codec: Any = None) -> Noise:
        """Of the samples 0 .. num - 1 of a seed, row by row, as the samplers draw it."""
        ids = torch.arange(num)
        return sampling_noise(seed, ids, self.row_length, len(self.words), codec=codec)

    def teacher_rows(self, seed: int, num: int) -> Int[Tensor, "n l"]:
        """The teacher's decode of that noise; the same for every model, NFE and rule."""
        if (seed, num) not in self.decodes:
            first, noise = torch.full((num,), self.words.index(BOS)), self.noise(seed, num)
            rows = teacher_decode(self.teacher, first, noise, self.row_length)
            self.decodes[seed, num] = rows
        return self.decodes[seed, num]

    def moves(self, row: Sequence[int]) -> Path_ | None:
        """The moves of a row of token ids, a mask among them too; None when it is malformed."""
        known = len(self.words)
        return moves_of_words([self.words[token] if token < known else "?" for token in row])

    def score(self, rows: Int[Tensor, "n l"], seed: int) -> tuple[Score, Score]:
        """Success, and agreement with the teacher's own decode of the same noise.

        Args:
            rows: The samples 0 .. n - 1 of a seed.
            seed: The seed.
        """
        tokens = rows.tolist()
        moves = [self.moves(row) for row in tokens]
        success = maze_success(self.maze, moves, self.path_probabilities, "teacher")
        return success, teacher_agreement(tokens, self.teacher_rows(seed, len(tokens)))


def load_task(home: Path, nfe: Sequence[int]) -> MazeTask:
    """Read an extraction's maze, vocabulary and teacher; enumerate its paths and its optimum.

    Args:
        home: The ``--out`` of ``gdistill-extract --corpus maze:LAYOUT``.
        nfe: Budgets that the optimum is wanted for.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    maze = Maze.read(home / "store" / "corpus" / "maze.json")
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(home / "store" / "tokenizer", **here)
    words = tuple(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    with without_library_bars():
        teacher = AutoModelForCausalLM.from_pretrained(
            home / "teacher", dtype=torch.float32, **here
        )
    row_length = maze.max_moves + 2
    ids = {word: index for index, word in enumerate(words)}
    rows = rows_of_paths(maze.paths, row_length - 1, ids)
    uniform = np.full(len(rows), 1 / len(rows))
    full = torch.from_numpy(np.insert(rows, 0, ids[BOS], axis=1))
    return MazeTask(
        maze=maze,
        words=words,
        row_length=row_length,
        teacher=teacher.eval(),
        path_probabilities=dict(zip(maze.paths, row_probabilities(teacher, full), strict=True)),
        optimum={steps: optimal_success(rows, uniform, steps)[0] for steps in nfe},
    )


@torch.no_grad()
def row_probabilities(teacher: Any, rows: Int[Tensor, "p l"]) -> list[float]:
    """The teacher's probability of each row behind its first token."""
    log_probs = teacher(input_ids=rows).logits[:, :-1].double().log_softmax(-1)
    return log_probs.gather(-1, rows[:, 1:, None])[..., 0].sum(1).exp().tolist()


def pool(scores: Sequence[Score], agreements: Sequence[Score]) -> dict[str, Any]:
    """One cell of the table: all seeds together, with each seed's success beside it."""
    num_success = sum(score.details["num_success"] for score in scores)
    num_equal = sum(score.details["num_equal"] for score in agreements)
    num_samples = sum(score.num_samples for score in scores)
    details = [score.details for score in scores]
    return {
        "success": num_success / num_samples,
        "interval_95": list(wilson_interval(num_success, num_samples)),
        "num_samples": num_samples,
        "success_by_run": [score.value for score in scores],
        "num_distinct_paths": min(detail["num_distinct_paths"] for detail in details),
        "num_paths_in_language": details[0]["num_paths_in_language"],
        "total_variation_to_teacher": float(
            np.mean([detail["total_variation_to_teacher"] for detail in details])
        ),
        "equal_to_teacher_decode": num_equal / num_samples,
        "equal_interval_95": list(wilson_interval(num_equal, num_samples)),
    }
