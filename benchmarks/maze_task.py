"""What a maze's students are judged by beside their own samples: teacher and exact optimum.

In: an extraction of a maze and the samples of its students. Out: success, agreement with the
teacher's own decode of the same noise, and the best that any unconditioned student can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from evaluation.maze import BOS, EOS, Maze, Path_, maze_success, moves_of_words, teacher_decode
from evaluation.score import Score, wilson_interval
from shards.console import without_library_bars
from shards.errors import GdistillError
from shards.noise.embedding import Noise
from trainer.sampling.noise import sampling_noise

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

    ``language`` has all sequences, ``weights`` their probabilities; each x_S must occur in it.
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

    ``language`` has all sequences without the position that is given, ``weights`` their
    probabilities; ``num_steps`` is T, the NFE budget of ancestral sampling.

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


def rows_of_paths(paths: Sequence[Sequence[str]], length: int, ids: dict[str, int]) -> Int[np.ndarray, "p l"]:
    """Paths as token rows of ``length``, padded with the end marker."""
    padded = [[*path, *[EOS] * (length - len(path))] for path in paths]
    return np.array([[ids[word] for word in row] for row in padded])


def teacher_agreement(samples: Sequence[Sequence[int]], teacher_rows: Int[Tensor, "b l"]) -> Score:
    """Share of samples that equal the teacher's decode token by token."""
    expected, num = teacher_rows.tolist(), len(samples)
    if len(expected) != num:
        raise GdistillError("one teacher row per sample is needed", got=len(expected), expected=num)
    equal = sum(list(ours) == theirs for ours, theirs in zip(samples, expected, strict=True))
    found = (equal / num, num, wilson_interval(equal, num))
    return Score("equal_to_teacher_decode", *found, details={"num_equal": equal})


@dataclass(frozen=True)
class MazeTask:
    """One layout with everything its samples are judged by.

    ``words`` are those of the token ids; a row of ``row_length`` tokens includes the given first
    one; ``optimum`` is the success of the exact Bayes-optimal unconditioned model by NFE;
    ``decodes`` are the teacher's rows found so far, by sampling seed and number.
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
            self.decodes[seed, num] = teacher_decode(self.teacher, first, noise, self.row_length)
        return self.decodes[seed, num]

    def moves(self, row: Sequence[int]) -> Path_ | None:
        """The moves of a row of token ids, a mask among them too; None when it is malformed."""
        known = len(self.words)
        return moves_of_words([self.words[token] if token < known else "?" for token in row])

    def score(self, rows: Int[Tensor, "n l"], seed: int) -> tuple[Score, Score]:
        """Success of a seed's samples 0 .. n - 1; agreement with the teacher's decode of it."""
        tokens = rows.tolist()
        moves = [self.moves(row) for row in tokens]
        success = maze_success(self.maze, moves, self.path_probabilities, "teacher")
        return success, teacher_agreement(tokens, self.teacher_rows(seed, len(tokens)))


def load_task(home: Path, nfe: Sequence[int]) -> MazeTask:
    """Read maze, vocabulary and teacher of ``gdistill-extract --corpus maze:LAYOUT --out home``.

    Its paths are enumerated, and its optimum at each of ``nfe``.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    maze = Maze.read(home / "store" / "corpus" / "maze.json")
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(home / "store" / "tokenizer", **here)
    words = tuple(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    with without_library_bars():
        load = AutoModelForCausalLM.from_pretrained
        teacher = load(home / "teacher", dtype=torch.float32, **here)
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
    details, num_samples = [s.details for s in scores], sum(s.num_samples for s in scores)
    num_success = sum(detail["num_success"] for detail in details)
    num_equal = sum(score.details["num_equal"] for score in agreements)
    variation = [detail["total_variation_to_teacher"] for detail in details]
    return {
        "success": num_success / num_samples,
        "interval_95": list(wilson_interval(num_success, num_samples)),
        "num_samples": num_samples,
        "success_by_run": [score.value for score in scores],
        "num_distinct_paths": min(detail["num_distinct_paths"] for detail in details),
        "num_paths_in_language": details[0]["num_paths_in_language"],
        "total_variation_to_teacher": float(np.mean(variation)),
        "equal_to_teacher_decode": num_equal / num_samples,
        "equal_interval_95": list(wilson_interval(num_equal, num_samples)),
    }
