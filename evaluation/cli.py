"""``gdistill-eval``: score a folder of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from evaluation.report import Table, open_folder, write_report
from evaluation.samples import SampleSet, find_sample_files, read_samples
from evaluation.score import Score
from evaluation.scorers import ScoreOptions, make_scorers
from shards.base import run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
Scored = Sequence[tuple[SampleSet, Sequence[Score]]]


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
        Path | None,
        typer.Option(help="Reference texts for MAUVE, .jsonl with a text field; needs --judge."),
    ] = None,
    maze: Annotated[
        Path | None,
        typer.Option(help="STORE/corpus/maze.json: score sampled paths."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Truncate texts to this many judge tokens (1024; without --stride at most the "
            "judge's context)."
        ),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows (half the judge's context).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write; the sample folder unless told.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the judge: auto, cpu or cuda.")] = "auto",
) -> None:
    """Score samples: entropy always, more with --judge, --reference or --maze."""
    options = ScoreOptions(judge, reference, maze, max_tokens, stride, device)
    sets = [read_samples(file, _folder(samples)) for file in find_sample_files(samples)]
    directory = out or _folder(samples)
    open_folder(directory)
    scorers = make_scorers(options, sets)
    scored = [(one, [score for scorer in scorers for score in scorer(one)]) for one in sets]
    table = score_table(scored)
    page = write_report(
        directory,
        title="Scores",
        summary=f"{len(scored)} sample file(s) under {samples}.",
        tables=[table],
        figures=[],
        results=results_of(scored),
    )
    typer.echo(table.to_text())
    typer.echo(f"wrote {directory / 'results.json'} and {page}")


def _folder(samples: Path) -> Path:
    return samples if samples.is_dir() else samples.parent


def results_of(scored: Scored) -> dict[str, Any]:
    """Content of ``results.json``: file -> what is known of its samples, and their scores."""
    return {
        str(samples.source): {
            "settings": samples.settings,
            "nfe_mean": samples.nfe_mean,
            "scores": [score.to_json() for score in scores],
        }
        for samples, scores in scored
    }


def score_table(scored: Scored) -> Table:
    """One row per sample file, one column per score, intervals in brackets."""
    names = [score.name for score in scored[0][1]]
    rows = tuple(
        (samples.name, str(len(samples.tokens)), _nfe(samples), *map(_cell, scores))
        for samples, scores in scored
    )
    notes = tuple(
        f"{score.name}: " + ", ".join(f"{key} {value}" for key, value in score.settings.items())
        for score in scored[0][1]
        if score.settings
    )
    return Table("Scores", ("samples", "n", "NFE", *names), rows, notes=notes)


def _nfe(samples: SampleSet) -> str:
    return "-" if samples.nfe_mean is None else f"{samples.nfe_mean:.1f}"


def _cell(score: Score) -> str:
    text = f"{score.value:.3f}" if abs(score.value) < 100 else f"{score.value:.1f}"
    if score.interval:
        text += f" [{score.interval[0]:.3g}, {score.interval[1]:.3g}]"
    return text


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()
