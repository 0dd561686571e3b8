"""From the options of ``gdistill-eval`` to functions that score one file of samples each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.acceptance import acceptance_score
from evaluation.maze import Maze, maze_success, moves_of_words
from evaluation.samples.infill_rows import InfillRow, read_infill_rows, rows_of_samples
from evaluation.samples.samples import SampleSet, read_references
from evaluation.score import Score
from evaluation.text.diversity import entropy_score
from shards.errors import UsageError, safe_name

if TYPE_CHECKING:
    from evaluation.text.reading import JudgeMemory, JudgeModel, Piece, ReadingLimits

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
        infill: Rows that ``gdistill-sample --infill`` filled, with the truth under the mask.
        tokenizer: Folder of the student's tokenizer for ``infill``; the model folder that the
            samples name unless told.
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
    infill: Path | None = None
    tokenizer: Path | None = None

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


@dataclass(frozen=True)
class Judging:
    """A judge with how it reads and what it has read.

    Attributes:
        judge: The model and its tokenizer.
        limits: Windows and longest text.
        memory: Texts that it has read before.
    """

    judge: JudgeModel
    limits: ReadingLimits
    memory: JudgeMemory

    @classmethod
    def start(cls, options: ScoreOptions, sets: Sequence[SampleSet]) -> Judging:
        """Load the judge and check what it will be asked to read.

        Raises:
            UsageError: For a judge, device or limit that cannot be used.
            GdistillError: For samples without text.
        """
        # Imported here, so that scores without a model do not wait for transformers.
        from evaluation.text.reading import JudgeMemory, load_judge

        for samples in sets:
            samples.require_texts()
        assert options.judge is not None
        judge = load_judge(options.judge, options.device or "auto")
        limits = judge_limits(judge, options)  # refused here, before the first file is scored
        identity = {**judge.identity, **asdict(limits)}
        return cls(judge, limits, JudgeMemory(options.kept, identity))

    def perplexity(self, samples: SampleSet) -> Score:
        """Generative perplexity of a file."""
        from evaluation.text.perplexity import generative_perplexity

        return generative_perplexity(
            self.judge,
            samples.require_texts(),
            stride=self.limits.stride_tokens,
            max_tokens=self.limits.max_tokens,
            indices=samples.indices,
            memory=self.memory,
            where=samples.source,
        )

    def pieces(self, text: str) -> list[Piece]:
        """A text that was read, in tokens with their surprise."""
        from evaluation.text.reading import surprise_pieces

        return surprise_pieces(self.judge, text, self.memory[text])


@dataclass(frozen=True)
class Scorers:
    """What the options ask for, ready to run.

    Attributes:
        functions: Each scores a file.
        judging: The judge among them, if there is one.
    """

    functions: Sequence[Scorer]
    judging: Judging | None

    def __call__(self, samples: SampleSet) -> list[Score]:
        """All scores of a file."""
        return [score for function in self.functions for score in function(samples)]


def make_scorers(options: ScoreOptions, sets: Sequence[SampleSet]) -> Scorers:
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
    functions: list[Scorer] = [lambda samples: [entropy_score(samples.tokens, samples.indices)]]
    if all(samples.verifications is not None for samples in sets):
        functions.append(_acceptance)
    if options.maze is not None:
        for samples in sets:
            samples.require_texts()
        functions.append(_maze_scorer(options.maze))
    rows = None if options.infill is None else read_infill_rows(options.infill)
    if rows is not None:
        for samples in sets:
            rows_of_samples(rows, samples)
        functions.append(lambda samples: [_exact_match(rows, samples)])
    if options.judge is None:
        return Scorers(functions, None)
    references = _references(options.reference, sets)
    judging = Judging.start(options, sets)
    functions.append(lambda samples: [judging.perplexity(samples)])
    if rows is not None:
        tokenizers = {one.source: _student_tokenizer(options.tokenizer, one) for one in sets}
        functions.append(
            lambda samples: [_filled(judging, rows, samples, tokenizers[samples.source])]
        )
    if references is not None:
        functions.append(_mauve_scorer(judging, references, options.kept))
    return Scorers(functions, judging)


def _acceptance(samples: SampleSet) -> list[Score]:
    counted = samples.verifications or []
    accepted, reached = [one.accepted for one in counted], [one.reached for one in counted]
    passes = [one.passes for one in counted]
    return [acceptance_score(accepted, reached, passes, samples.indices)]


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


def _exact_match(rows: list[InfillRow], samples: SampleSet) -> Score:
    from evaluation.infilling import exact_match

    own = rows_of_samples(rows, samples)
    truths, masked = [row.tokens for row in own], [row.masked for row in own]
    return exact_match(samples.tokens, truths, masked, samples.indices)


def _filled(judging: Judging, rows: list[InfillRow], samples: SampleSet, tokenizer: Any) -> Score:
    """Perplexity of what was filled in, in the reading of the whole row."""
    from evaluation.infilling import filled_perplexity, filled_spans
    from evaluation.text.reading import read_texts

    texts = samples.require_texts()
    own = rows_of_samples(rows, samples)
    return filled_perplexity(
        judging.judge,
        texts,
        read_texts(judging.judge, texts, judging.limits, judging.memory),
        [
            filled_spans(tokenizer, tokens, row.masked, text)
            for tokens, row, text in zip(samples.tokens, own, texts, strict=True)
        ],
        samples.indices,
        {**judging.judge.identity, **asdict(judging.limits)},
    )


def _student_tokenizer(folder: Path | None, samples: SampleSet) -> Any:
    """The tokenizer that wrote the samples' text.

    Raises:
        UsageError: When the samples name no model folder with one.
    """
    from trainer import load_tokenizer

    place = folder or _named_folder(samples.settings.get("checkpoint"))
    found = load_tokenizer(place) if place is not None and place.is_dir() else None
    if found is None:
        raise UsageError(
            "no tokenizer to find the filled characters with",
            where=f"--tokenizer, {samples.source}",
            got=place or samples.settings.get("checkpoint"),
            expected="the student's model folder",
            remedy="name it with --tokenizer",
        )
    return found


def _named_folder(name: object) -> Path | None:
    """The folder that the samples' settings name; a stranger's reach no further than below here."""
    try:
        return Path(safe_name(str(name)))
    except UsageError:
        return None


def judge_limits(judge: JudgeModel, options: ScoreOptions) -> ReadingLimits:
    """How the judge reads, by the options and the defaults that they tell of.

    Raises:
        UsageError: For a stride or limit of no use.
    """
    from evaluation.text.reading import reading_limits

    limit = options.max_tokens
    if limit is None:
        within = judge.context_length if options.stride is None else DEFAULT_MAX_TOKENS
        limit = min(DEFAULT_MAX_TOKENS, within)
    return reading_limits(judge, options.stride, limit)


def _references(file: Path | None, sets: Sequence[SampleSet]) -> list[str] | None:
    """The reference texts, if any are asked for and every set can be compared with them."""
    from evaluation.text.mauve_divergence import check_counts

    if file is None:
        return None
    references = read_references(file)
    for samples in sets:
        check_counts(len(samples.texts), len(references), samples.source)
    return references


def _mauve_scorer(judging: Judging, references: Sequence[str], kept: Path | None) -> Scorer:
    from evaluation.text.mauve_divergence import mauve_score, text_features

    judge = judging.judge
    max_tokens = min(judging.limits.max_tokens, judge.context_length)
    real = text_features(judge, references, max_tokens, kept)

    def score(samples: SampleSet) -> list[Score]:
        ours = text_features(judge, samples.require_texts(), max_tokens, kept)
        return [mauve_score(judge, ours, real, max_tokens=max_tokens)]

    return score
