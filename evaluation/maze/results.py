"""What the maze's samples say, gathered into results and set beside the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from evaluation.maze.optimum import optimal_success, rows_of_paths
from evaluation.maze.success import BOS, Maze, Path_, maze_success, moves_of_words
from evaluation.maze.teacher_decode import teacher_agreement, teacher_decode
from evaluation.samples.samples import SampleSet, read_samples
from evaluation.score import Score, wilson_interval
from shards.errors import GdistillError
from trainer.sampling.noise import sampling_noise

PLAIN = "none"
"""Of the kinds of student, the one that sees no noise."""


def natural_rule(kind: str) -> str:
    """The plain model draws from its prediction; given the noise the map is deterministic."""
    return "categorical" if kind == PLAIN else "argmax"


def display_name(kind: str) -> str:
    """What tables call a kind of student."""
    names = {PLAIN: "MDLM", "gumbel": "MDLM + Gumbel"}
    return names.get(kind, f"MDLM + Gumbel, {kind}")


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
        decodes: The teacher's rows found so far, by sampling seed, indices and first tokens.
    """

    maze: Maze
    words: tuple[str, ...]
    row_length: int
    teacher: Any
    path_probabilities: Mapping[Path_, float]
    optimum: Mapping[int, float]
    decodes: dict[Any, Tensor] = field(default_factory=dict)


def load_task(home: Path, nfe: Sequence[int]) -> MazeTask:
    """Read a layout's maze, vocabulary and teacher; enumerate its paths and its optimum."""
    maze = Maze.read(home / "store" / "corpus" / "maze.json")
    words = read_words(home / "store" / "tokenizer")
    ids = {word: index for index, word in enumerate(words)}
    row_length = maze.max_moves + 2
    transformers_logging.disable_progress_bar()  # one bar per stage, and it is ours
    teacher = AutoModelForCausalLM.from_pretrained(
        home / "teacher", dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    rows = rows_of_paths(maze.paths, row_length - 1, ids)
    uniform = np.full(len(rows), 1 / len(rows))
    full = torch.from_numpy(np.insert(rows, 0, ids[BOS], axis=1))
    probabilities = row_probabilities(teacher, full)
    return MazeTask(
        maze=maze,
        words=words,
        row_length=row_length,
        teacher=teacher,
        path_probabilities=dict(zip(maze.paths, probabilities, strict=True)),
        optimum={steps: optimal_success(rows, uniform, steps)[0] for steps in nfe},
    )


def read_words(tokenizer: Path) -> tuple[str, ...]:
    """The words of a word-level tokenizer by id, without a chat or byte layer in between."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(
        tokenizer, local_files_only=True, trust_remote_code=False
    )
    return tuple(loaded.convert_ids_to_tokens(range(len(loaded))))


@torch.no_grad()
def row_probabilities(teacher: Any, rows: Int[Tensor, "p l"]) -> list[float]:
    """The teacher's probability of each row behind its first token."""
    log_probs = teacher(input_ids=rows).logits[:, :-1].double().log_softmax(-1)
    return log_probs.gather(-1, rows[:, 1:, None])[..., 0].sum(1).exp().tolist()


def moves_of(words: Sequence[str], samples: SampleSet) -> list[Path_ | None]:
    """Moves of every sample, from its token ids."""
    return [
        moves_of_words([words[token] if token < len(words) else "?" for token in row])
        for row in samples.tokens
    ]


def score_samples(task: MazeTask, samples: SampleSet) -> tuple[Score, Score]:
    """Success, and agreement with the teacher's own decode of the same noise."""
    moves = moves_of(task.words, samples)
    success = maze_success(task.maze, moves, task.path_probabilities, "teacher")
    decoded = teacher_rows(task, samples)
    return success, teacher_agreement(samples.tokens, decoded)


def teacher_rows(task: MazeTask, samples: SampleSet) -> Int[Tensor, "n l"]:
    """The teacher's decode of the samples' noise; the same for every model, NFE and rule."""
    first = tuple(row[0] for row in samples.tokens)
    key = (samples.seed, tuple(samples.indices), first)
    if key not in task.decodes:
        indices = torch.tensor(samples.indices)
        noise = sampling_noise(samples.seed, indices, task.row_length, len(task.words))
        task.decodes[key] = teacher_decode(
            task.teacher, torch.tensor(first), noise, task.row_length
        )
    return task.decodes[key]


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


def sample_file(directory: Path, nfe: int) -> Path:
    """The jsonl file that gdistill-sample wrote for one NFE.

    Raises:
        GdistillError: When there is none.
    """
    file, only = directory / f"samples-nfe{nfe}.jsonl", directory / "samples.jsonl"
    if file.is_file():
        return file
    if not only.is_file():  # the sampler's name when one budget was asked for
        raise GdistillError("samples are missing", where=file, remedy="run the walk again")
    return only


def score_cell(task: MazeTask, files: Sequence[Path]) -> dict[str, Any]:
    """Score the files of one table cell (one model kind, rule and NFE; several seeds)."""
    pairs = [score_samples(task, read_samples(file)) for file in files]
    return pool([success for success, _ in pairs], [agreement for _, agreement in pairs])


def sampling_floor(task: MazeTask, num_samples: int, num_trials: int = 200) -> float:
    """Mean total variation that ``num_samples`` draws from the teacher itself would show."""
    shares = np.array([*task.path_probabilities.values()])
    shares = np.append(shares, max(0.0, 1 - shares.sum()))
    shares /= shares.sum()
    counts = np.random.default_rng(0).multinomial(num_samples, shares, size=num_trials)
    return float(0.5 * np.abs(counts / num_samples - shares).sum(1).mean())
