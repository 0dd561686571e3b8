"""From the options of ``gdistill-eval`` to functions that score one file of samples each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evaluation.maze import Maze, maze_success, moves_of_words
from evaluation.samples import SampleSet, read_references
from evaluation.score import Score
from evaluation.text import entropy_score
from shards.base import UsageError

if TYPE_CHECKING:
    from evaluation.text import JudgeModel, ReadingLimits

Scorer = Callable[[SampleSet], list[Score]]
DEFAULT_MAX_TOKENS = 1024
"""Tokens of a text that are read: the length of the paper's samples."""


@dataclass(frozen=True)
class ScoreOptions:
    """What to score by.

    Attributes:
        judge: Causal language model for perplexity and MAUVE features: hub id or folder.
        reference: Reference texts for MAUVE.
        maze: ``maze.json`` of a corpus.
        max_tokens: Texts are truncated to this many judge tokens; None for
            :data:`DEFAULT_MAX_TOKENS` and, unless a stride is given, at most the judge's context.
        stride: Tokens between windows; None for half a window.
        device: Of the judge; None for ``auto``.
        kept: Folder for what a judge has read, so that an interrupted evaluation resumes; None
            keeps nothing.
    """

    judge: str | None = None
    reference: Path | None = None
    maze: Path | None = None
    max_tokens: int | None = None
    stride: int | None = None
    device: str | None = None
    kept: Path | None = None

    def __post_init__(self) -> None:
        if self.judge is not None:
            return
        for name in ("reference", "max_tokens", "stride", "device"):
            if getattr(self, name) is not None:
                raise UsageError(
                    "an option that needs a judge",
                    where=f"--{name.replace('_', '-')}",
                    got="no --judge",
                    remedy="add --judge (MAUVE takes its features from it)",
                )


def make_scorers(options: ScoreOptions, sets: Sequence[SampleSet]) -> list[Scorer]:
    """Entropy, and what the options ask for.

    Files and models are read here, and every set is looked at, so that a last file's fault does
    not end the work that the others took.

    Args:
        options: What to score by.
        sets: All samples that will be scored.

    Raises:
        UsageError: For a model, device, file or limit that cannot be used.
        GdistillError: For a reference or maze file with something else in it, or samples without
            text where text is scored.
    """
    scorers: list[Scorer] = [lambda samples: [entropy_score(samples.tokens, samples.indices)]]
    if options.judge is not None or options.maze is not None:
        for samples in sets:
            samples.require_texts()
    if options.maze is not None:
        scorers.append(_maze_scorer(options.maze))
    if options.judge is not None:
        scorers += _judge_scorers(options, options.judge, sets)
    return scorers


def _maze_scorer(file: Path) -> Scorer:
    maze = Maze.read(file)
    uniform = {path: 1 / len(maze.paths) for path in maze.paths}

    def score(samples: SampleSet) -> list[Score]:
        moves = [moves_of_words(text.split()) for text in samples.require_texts()]
        success = maze_success(maze, moves, uniform, "uniform")
        # Beside the success in the table, because success alone does not show a lost mode.
        variation = Score(
            name="total_variation_to_uniform",
            value=success.details["total_variation_to_uniform"],
            num_samples=success.num_samples,
            settings={"uniform over": f"the {len(maze.paths)} paths of the maze"},
        )
        return [success, variation]

    return score


def perplexity_scorer(options: ScoreOptions, sets: Sequence[SampleSet]) -> Scorer:
    """Generative perplexity alone, for commands that make more of it.

    Raises:
        UsageError: For a judge, device or limit that cannot be used.
        GdistillError: For samples without text.
    """
    from evaluation.text import load_judge

    for samples in sets:
        samples.require_texts()
    assert options.judge is not None
    return _perplexity(load_judge(options.judge, options.device or "auto"), options)


def _judge_scorers(options: ScoreOptions, name: str, sets: Sequence[SampleSet]) -> list[Scorer]:
    # Imported here, so that scores without a model do not wait for transformers.
    from evaluation.text import load_judge

    references = _references(options.reference, sets)
    judge = load_judge(name, options.device or "auto")
    perplexity = _perplexity(judge, options)
    if references is None:
        return [perplexity]
    shortest = min(judge_limits(judge, options).max_tokens, judge.context_length)
    return [perplexity, _mauve_scorer(judge, references, shortest, options.kept)]


def _perplexity(judge: JudgeModel, options: ScoreOptions) -> Scorer:
    from evaluation.text import JudgeMemory, generative_perplexity

    limits = judge_limits(judge, options)  # refused here, before the first file is scored
    memory = JudgeMemory(options.kept, {**judge.identity, **asdict(limits)})

    def score(samples: SampleSet) -> list[Score]:
        return [
            generative_perplexity(
                judge,
                samples.require_texts(),
                stride=limits.stride_tokens,
                max_tokens=limits.max_tokens,
                indices=samples.indices,
                memory=memory,
                where=samples.source,
            )
        ]

    return score


def judge_limits(judge: JudgeModel, options: ScoreOptions) -> ReadingLimits:
    """How the judge reads, by the options and the defaults that they tell of.

    Raises:
        UsageError: For a stride or limit of no use.
    """
    from evaluation.text import reading_limits

    limit = options.max_tokens
    if limit is None:
        within = judge.context_length if options.stride is None else DEFAULT_MAX_TOKENS
        limit = min(DEFAULT_MAX_TOKENS, within)
    return reading_limits(judge, options.stride, limit)


def _references(file: Path | None, sets: Sequence[SampleSet]) -> list[str] | None:
    """The reference texts, if any are asked for and every set can be compared with them."""
    from evaluation.text import check_counts

    if file is None:
        return None
    references = read_references(file)
    for samples in sets:
        check_counts(len(samples.texts), len(references), samples.source)
    return references


def _mauve_scorer(
    judge: JudgeModel, references: Sequence[str], max_tokens: int, kept: Path | None
) -> Scorer:
    from evaluation.text import mauve_score, text_features

    real = text_features(judge, references, max_tokens, kept)

    def score(samples: SampleSet) -> list[Score]:
        ours = text_features(judge, samples.require_texts(), max_tokens, kept)
        return [mauve_score(judge, ours, real, max_tokens=max_tokens)]

    return score
