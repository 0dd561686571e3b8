"""``gdistill-eval``: score a folder of samples, and what is made of scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from evaluation.frontier import check_scores, frontier
from evaluation.infilling import rows
from evaluation.likelihood_command import perplexity
from evaluation.passes import passes
from evaluation.report import write_scores
from evaluation.samples import find_sample_files, read_samples
from evaluation.scorers import make_scorers
from evaluation.served_certificate import certify
from evaluation.text.reading import readings_folder
from shards.atomic import require_writable
from shards.console import command_app, run_command


class DefaultGroup(TyperGroup):
    """``gdistill-eval SAMPLES`` is ``gdistill-eval score SAMPLES``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["score", *args]
        return super().parse_args(ctx, args)


app = command_app(
    cls=DefaultGroup,
    no_args_is_help=True,
    help="Score samples. Without a command's name: score. A folder of that name is ./NAME.",
)


@app.command("score")
def evaluate(
    samples: Annotated[Path, typer.Argument(help="Folder or .jsonl file written by gdistill-sample.")],
    judge: Annotated[
        str | None, typer.Option(help="Causal LM for perplexity and scores of its states: hub id or folder.")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            help="Text to hold samples against, by distances, repetition and (with --judge) MAUVE: "
            "a store, or a .jsonl file with a text field."
        ),
    ] = None,
    maze: Annotated[Path | None, typer.Option(help="STORE/corpus/maze.json: score sampled paths.")] = None,
    infill: Annotated[
        Path | None, typer.Option(help="Rows that were filled, with the truth: exact match, filled part.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The student's model folder, for --infill with a judge.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Truncate texts to this many judge tokens (1024; without --stride at most the judge's context)."
        ),
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens between windows (half the judge's context).")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; the sample folder unless given.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the judge: cpu or cuda (a GPU if there is one).")
    ] = None,
) -> None:
    """Score samples: entropy always, more with --judge, --reference or --maze.

    Interrupted, the same command goes on: what a judge has read is kept in ~/.cache/gdistill.
    """
    folder = samples if samples.is_dir() else samples.parent
    directory = out or folder
    sets = [read_samples(file, folder) for file in find_sample_files(samples)]
    require_writable(directory)
    scorers, judging = make_scorers(
        sets,
        judge=judge,
        reference=reference,
        maze=maze,
        infill=infill,
        tokenizer=tokenizer,
        kept=readings_folder(directory),
        device=device,
        max_tokens=max_tokens,
        stride=stride,
    )
    scored = [(one, [score for scorer in scorers for score in scorer(one)]) for one in sets]
    summary = f"{len(scored)} sample file(s) of {samples.resolve().name}."
    page = write_scores(directory, summary, scored, None if judging is None else judging.pieces)
    typer.echo(f"wrote {directory / 'results.json'} and {page}")


app.command("certify")(certify)
app.command("frontier")(frontier)
app.command("check-scores")(check_scores)
app.command("rows")(rows)
app.command("passes")(passes)
app.command("perplexity")(perplexity)


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()
