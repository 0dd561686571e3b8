"""From the options of ``gdistill-eval`` to functions that score one file of samples each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.infilling import InfillRow, read_infill_rows, rows_of_samples
from evaluation.maze import Maze, maze_success, moves_of_words
from evaluation.samples import SampleSet
from evaluation.score import PerSample, Score
from evaluation.text.distance import entropy_score, require_enough
from evaluation.text.reference import ReferenceText, Ruler
from shards.errors import UsageError, safe_name

if TYPE_CHECKING:
    from evaluation.text.reading import Judging

Scorer = Callable[[SampleSet], list[Score]]


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What to score by.

    Attributes:
        judge: Causal language model for perplexity and the scores of its states: hub id or folder.
        reference: Text to hold samples against: a store, or a .jsonl file.
        maze: ``maze.json`` of a corpus.
        infill: Rows that ``gdistill-sample --infill`` filled, with the truth under the mask.
        tokenizer: Folder of the student's tokenizer for ``infill``; the model folder that the
            samples name unless given.
        max_tokens: Texts are truncated to this many judge tokens; None for 1024 and, unless a
            stride is given, at most the judge's context.
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
        for name in ("max_tokens", "stride", "device"):
            if self.judge is None and getattr(self, name) is not None:
                where = f"--{name.replace('_', '-')}"
                raise UsageError("an option that needs a judge", where=where, remedy="add --judge")


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
        UsageError: For a model, device, file or limit that cannot be used, or too few samples for
            scores of their distribution.
        GdistillError: For a reference or maze file with something else in it, or samples without
            text where text is scored.
    """
    functions: list[Scorer] = [lambda samples: [entropy_score(samples.tokens, samples.indices)]]
    if all(samples.verifications is not None for samples in sets):
        functions.append(lambda samples: [_acceptance(samples)])
    if options.maze is not None:
        for samples in sets:
            samples.require_texts()
        functions.append(_maze_scorer(options.maze))
    rows = None if options.infill is None else read_infill_rows(options.infill)
    if rows is not None:
        for samples in sets:
            rows_of_samples(rows, samples)
        functions.append(lambda samples: [_exact_match(rows, samples)])
    text = None
    if options.reference is not None:
        length = max(len(row) for samples in sets for row in samples.tokens)
        most = max(len(samples.tokens) for samples in sets)
        text = ReferenceText.read(options.reference, 2 * most, length)
        for samples in sets:
            require_enough(len(samples.tokens), samples.source)
            text.rows_of(samples)
    judging = None
    if options.judge is not None:
        # Imported here, so that scores without a model do not wait for transformers.
        from evaluation.text.reading import Judging

        for samples in sets:
            samples.require_texts()
        windows = {"max_tokens": options.max_tokens, "stride": options.stride}
        judging = Judging.load(options.judge, options.device, options.kept, **windows)
        functions.append(
            lambda samples: [
                judging.perplexity(
                    samples.require_texts(), indices=samples.indices, where=samples.source
                )
            ]
        )
        if rows is not None:
            tokenizers = {one.source: _student_tokenizer(options.tokenizer, one) for one in sets}
            functions.append(
                lambda samples: [_filled(judging, rows, samples, tokenizers[samples.source])]
            )
    if text is not None:
        sizes = {len(samples.tokens) for samples in sets}
        rulers = {size: Ruler(text, size, judging, options.kept) for size in sizes}
        functions.append(lambda samples: rulers[len(samples.tokens)].scores(samples))
    return Scorers(functions, judging)


def _acceptance(samples: SampleSet) -> Score:
    """Tokens per pass of the teacher: those accepted and the one that each pass adds.

    The details hold, by distance (Medusa: by head), the share of proposals that were accepted
    where all before them had been, with 95% bootstrap intervals over samples, and the passes.
    """
    counted, indices = samples.verifications or [], tuple(samples.indices)
    gained = tuple(float(sum(one.accepted) + one.passes) for one in counted)
    per_pass = PerSample(indices, gained, tuple(float(one.passes) for one in counted))
    heads = []
    for column in range(len(counted[0].reached)):
        reached = tuple(float(one.reached[column]) for one in counted)
        if not sum(reached):
            break
        accepted = tuple(float(one.accepted[column]) for one in counted)
        heads.append(PerSample(indices, accepted, reached))
    # A set of samples drawn again may miss the few that reached a far distance: no interval there.
    intervals = [
        list(head.interval() or ()) if sum(map(bool, head.denominators)) >= 10 else None
        for head in heads
    ]
    details = {
        "conditional_acceptance": [head.value() for head in heads],
        "conditional_acceptance_95": intervals,
        "teacher_passes": sum(one.passes for one in counted),
        "accepted_tokens": sum(sum(one.accepted) for one in counted),
    }
    return Score.of("tokens_per_teacher_pass", per_pass, details=details)


def _maze_scorer(file: Path) -> Scorer:
    maze = Maze.read(file)
    uniform = {path: 1 / len(maze.paths) for path in maze.paths}

    def score(samples: SampleSet) -> list[Score]:
        moves = [moves_of_words(text.split()) for text in samples.require_texts()]
        success = maze_success(maze, moves, uniform, "uniform")
        # Beside the success in the table, because success alone does not show a lost mode.
        value = success.details["total_variation_to_uniform"]
        over = {"uniform over": f"the {len(maze.paths)} paths of the maze"}
        name = "total_variation_to_uniform"
        return [success, Score(name, value, success.num_samples, settings=over)]

    return score


def _exact_match(rows: list[InfillRow], samples: SampleSet) -> Score:
    from evaluation.infilling import exact_match

    return exact_match(samples.tokens, rows_of_samples(rows, samples), samples.indices)


def _filled(judging: Judging, rows: list[InfillRow], samples: SampleSet, tokenizer: Any) -> Score:
    """Perplexity of what was filled in, in the reading of the whole row."""
    from evaluation.infilling import filled_perplexity, filled_spans
    from evaluation.text.reading import read_texts

    texts = samples.require_texts()
    own = rows_of_samples(rows, samples)
    readings = read_texts(judging.judge, texts, judging.limits, judging.memory)
    spans = [
        filled_spans(tokenizer, tokens, row.masked, text)
        for tokens, row, text in zip(samples.tokens, own, texts, strict=True)
    ]
    settings = {**judging.judge.identity, **asdict(judging.limits)}
    return filled_perplexity(judging.judge, texts, readings, spans, samples.indices, settings)


def _student_tokenizer(folder: Path | None, samples: SampleSet) -> Any:
    """The tokenizer that wrote the samples' text.

    Raises:
        UsageError: When the samples name no model folder with one.
    """
    from trainer import load_tokenizer

    place, name = folder, samples.settings.get("checkpoint")
    if place is None:
        try:  # a stranger's settings reach no further than below here
            place = Path(safe_name(str(name)))
        except UsageError:
            place = None
    found = load_tokenizer(place) if place is not None and place.is_dir() else None
    if found is None:
        raise UsageError(
            "no tokenizer to find the filled characters with",
            where=f"--tokenizer, {samples.source}",
            got=place or name,
            expected="the student's model folder",
            remedy="name it with --tokenizer",
        )
    return found
