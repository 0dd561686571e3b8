"""``gdistill-eval``: score a folder of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from evaluation.diversity import entropy_score
from evaluation.report import Table, write_report
from evaluation.samples import SampleSet, find_sample_files, read_samples
from evaluation.score import Score
from shards.console import run_command
from shards.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
Scorer = Callable[[SampleSet], list[Score]]


@app.command()
def evaluate(
    samples: Annotated[
        Path, typer.Argument(help="Folder or .jsonl file written by gdistill-sample.")
    ],
    judge: Annotated[
        str | None,
        typer.Option(help="Causal LM for generative perplexity: hub id or local folder."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Reference texts for MAUVE, .jsonl with a text field.")
    ] = None,
    maze: Annotated[Path | None, typer.Option(help="maze.json: score sampled paths.")] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Truncate texts to this many judge tokens.")
    ] = 1024,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows (half a window).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write; the sample folder unless told.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the judge.")] = "cpu",
) -> None:
    """Score samples: entropy always, more with --judge, --reference or --maze."""
    files = find_sample_files(samples)
    scorers: list[Scorer] = [lambda samples: [entropy_score(samples.tokens)]]
    if judge:
        scorers += _text_scorers(judge, reference, max_tokens, stride, device)
    elif reference:
        raise UsageError(
            "MAUVE needs a model for its features", where="--reference", remedy="add --judge"
        )
    if maze:
        scorers.append(_maze_scorer(maze))
    scored = []
    for file in files:
        sample_set = read_samples(file)
        scored.append((sample_set, [score for scorer in scorers for score in scorer(sample_set)]))
    directory = out or (samples if samples.is_dir() else samples.parent)
    table = score_table(scored)
    results = {
        str(sample_set.source): {
            "settings": sample_set.settings,
            "nfe_mean": sum(sample_set.nfe) / len(sample_set.nfe),
            "scores": [score.to_json() for score in scores],
        }
        for sample_set, scores in scored
    }
    page = write_report(
        directory,
        title="Scores",
        summary=f"{len(scored)} sample file(s) under {samples}.",
        tables=[table],
        figures=[],
        results=results,
    )
    typer.echo(table.to_text())
    typer.echo(f"wrote {directory / 'results.json'} and {page}")


def score_table(scored: Sequence[tuple[SampleSet, Sequence[Score]]]) -> Table:
    """One row per sample file, one column per score, intervals in brackets."""
    names = [score.name for score in scored[0][1]]
    rows = []
    for sample_set, scores in scored:
        nfe = sum(sample_set.nfe) / len(sample_set.nfe)
        rows.append(
            (sample_set.name, str(len(sample_set.tokens)), f"{nfe:.1f}", *map(_cell, scores))
        )
    notes = tuple(
        f"{score.name}: " + ", ".join(f"{key} {value}" for key, value in score.settings.items())
        for score in scored[0][1]
        if score.settings
    )
    return Table("Scores", ("samples", "n", "NFE", *names), tuple(rows), notes=notes)


def _cell(score: Score) -> str:
    text = f"{score.value:.3f}" if abs(score.value) < 100 else f"{score.value:.1f}"
    if score.interval:
        text += f" [{score.interval[0]:.3g}, {score.interval[1]:.3g}]"
    return text


def _text_scorers(
    name: str, reference: Path | None, max_tokens: int, stride: int | None, device: str
) -> list[Scorer]:
    from evaluation.generative_perplexity import generative_perplexity
    from evaluation.judge_model import load_judge
    from evaluation.mauve_score import mauve_score

    judge = load_judge(name, device)
    limit = min(max_tokens, judge.context_length) if stride is None else max_tokens
    scorers: list[Scorer] = [
        lambda samples: [
            generative_perplexity(judge, samples.texts, stride=stride, max_tokens=limit)
        ]
    ]
    if reference:
        references = read_samples(reference).texts
        scorers.append(
            lambda samples: [mauve_score(judge, samples.texts, references, max_tokens=limit)]
        )
    return scorers


def _maze_scorer(file: Path) -> Scorer:
    from evaluation.maze_success import Maze, maze_success, moves_of_words

    maze = Maze.read(file)
    uniform = {path: 1 / len(maze.paths) for path in maze.paths}
    return lambda samples: [
        maze_success(maze, [moves_of_words(text.split()) for text in samples.texts], uniform)
    ]


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()
