"""From the options of ``gdistill-eval`` to functions that score one file of samples each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from evaluation.infilling import exact_match, filled_perplexity, filled_spans, read_infill_rows, rows_of_samples
from evaluation.maze import Maze, maze_success, moves_of_words
from evaluation.samples import SampleSet
from evaluation.score import PerSample, Score
from evaluation.text.distance import entropy_score, require_enough
from evaluation.text.reading import Judging
from evaluation.text.reference import ReferenceText, Ruler
from shards.errors import UsageError, safe_name
from trainer.students.folder import load_tokenizer

Scorer = Callable[[SampleSet], list[Score]]


def make_scorers(
    sets: Sequence[SampleSet],
    *,
    judge: str | None = None,
    reference: Path | None = None,
    maze: Path | None = None,
    infill: Path | None = None,
    tokenizer: Path | None = None,
    kept: Path | None = None,
    **reading: Any,
) -> tuple[list[Scorer], Judging | None]:
    """Entropy, and what the options ask for; each function scores a file.

    Files and models are read here, and every set is looked at, so that a last file's fault does
    not end the work that the others took.

    Args:
        sets: All samples that will be scored.
        judge: Causal language model for perplexity and the scores of its states: hub id or folder.
        reference: Text to hold samples against: a store, or a .jsonl file.
        maze: ``maze.json`` of a corpus.
        infill: Rows that ``gdistill-sample --infill`` filled, with the truth under the mask.
        tokenizer: Folder of the student's tokenizer for ``infill``; the model folder that the
            samples name unless given.
        kept: Folder for what a judge has read, so that an interrupted evaluation resumes; None
            keeps nothing.
        **reading: ``device``, ``max_tokens`` and ``stride`` of the judge.

    Raises:
        UsageError: For a model, device, file or limit that cannot be used, or too few samples for
            scores of their distribution.
        GdistillError: For a reference or maze file with something else in it, or samples without
            text where text is scored.
    """
    for name, value in reading.items():
        if judge is None and value is not None:
            where = f"--{name.replace('_', '-')}"
            raise UsageError("an option that needs a judge", where=where, remedy="add --judge")
    if judge is not None or maze is not None:
        for samples in sets:
            samples.require_texts()
    functions: list[Scorer] = [lambda samples: [entropy_score(samples.tokens, samples.indices)]]
    if all(samples.verifications is not None for samples in sets):
        functions.append(_acceptance)
    if maze is not None:
        functions.append(partial(_maze_scores, Maze.read(maze)))
    rows = [] if infill is None else read_infill_rows(infill)
    rows_of = {samples.source: rows_of_samples(rows, samples) for samples in sets} if rows else {}
    if rows:
        functions.append(lambda one: [exact_match(one.tokens, rows_of[one.source], one.indices)])
    text = None
    if reference is not None:
        length = max(len(row) for samples in sets for row in samples.tokens)
        most = max(len(samples.tokens) for samples in sets)
        text = ReferenceText.read(reference, 2 * most, length)
        for samples in sets:
            require_enough(len(samples.tokens), samples.source)
            text.rows_of(samples)
    judging = None
    if judge is not None:
        found = judging = Judging.load(judge, kept=kept, **reading)
        functions.append(lambda one: [found.perplexity(one.require_texts(), one.indices, one.source)])
        if rows:
            tokenizers = {one.source: _student_tokenizer(tokenizer, one) for one in sets}

            def filled(samples: SampleSet) -> list[Score]:
                """Perplexity of what was filled in, in the reading of the whole row."""
                texts, source = samples.require_texts(), samples.source
                spans = [
                    filled_spans(tokenizers[source], tokens, row.masked, text)
                    for tokens, row, text in zip(samples.tokens, rows_of[source], texts, strict=True)
                ]
                return [filled_perplexity(found, texts, spans, samples.indices)]

            functions.append(filled)
    if text is not None:
        rulers = {size: Ruler(text, size, judging) for size in {len(samples.tokens) for samples in sets}}
        functions.append(lambda samples: rulers[len(samples.tokens)].scores(samples))
    return functions, judging


def _acceptance(samples: SampleSet) -> list[Score]:
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
    intervals = [list(head.interval() or ()) if sum(map(bool, head.denominators)) >= 10 else None for head in heads]
    details = {
        "conditional_acceptance": [head.value() for head in heads],
        "conditional_acceptance_95": intervals,
        "teacher_passes": sum(one.passes for one in counted),
        "accepted_tokens": sum(sum(one.accepted) for one in counted),
    }
    return [Score.of("tokens_per_teacher_pass", per_pass, details=details)]


def _maze_scores(maze: Maze, samples: SampleSet) -> list[Score]:
    moves = [moves_of_words(text.split()) for text in samples.require_texts()]
    success = maze_success(maze, moves, {path: 1 / len(maze.paths) for path in maze.paths}, "uniform")
    # Beside the success in the table, because success alone does not show a lost mode.
    name = "total_variation_to_uniform"
    over = {"uniform over": f"the {len(maze.paths)} paths of the maze"}
    return [success, Score(name, success.details[name], success.num_samples, settings=over)]


def _student_tokenizer(folder: Path | None, samples: SampleSet) -> Any:
    """The tokenizer that wrote the samples' text.

    Raises:
        UsageError: When the samples name no model folder with one.
    """
    place, name = folder, samples.settings.get("checkpoint")
    if place is None:
        try:  # a stranger's settings reach no further than below here
            place = Path(safe_name(str(name)))
        except UsageError:
            place = None
    found = load_tokenizer(place) if place is not None and place.is_dir() else None
    if found is None:
        what, remedy = "no tokenizer to find the filled characters with", "name it with --tokenizer"
        where, expected = f"--tokenizer, {samples.source}", "the student's model folder"
        raise UsageError(what, where=where, got=place or name, expected=expected, remedy=remedy)
    return found
