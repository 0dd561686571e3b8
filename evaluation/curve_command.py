"""``gdistill-eval curve``: models compared at one entropy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from evaluation.curve import (
    Curve,
    Run,
    curve_figure,
    curve_results,
    curves_of,
    match,
    matched_table,
    points_table,
    read_run,
    require_comparable,
)
from evaluation.report import write_report
from evaluation.samples import read_data_rows
from evaluation.scorers import Judging, ScoreOptions
from evaluation.text import entropy_score, readings_folder, unigram_entropy_nats
from shards.base import UsageError, code_version, require_writable, write_bytes_atomic

MAX_DATA_ROWS = 2000


def curve(
    runs: Annotated[
        list[str],
        typer.Argument(help="Folders of a sweep, one per model: FOLDER or NAME=FOLDER."),
    ],
    judge: Annotated[str, typer.Option(help="Causal LM: hub id or local folder.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Store or tokens/ folder: H is the mean entropy of its rows."),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of --data.")] = "validation",
    entropy: Annotated[float | None, typer.Option(help="H in nats, instead of the data's.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Truncate texts to this many judge tokens (1024).")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows (half the judge's context).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("curve"),
    device: Annotated[str | None, typer.Option(help="Device of the judge.")] = None,
) -> None:
    """Perplexity at one entropy: model x NFE, from samples of gdistill-sample --sweep.

    Interrupted, the same command goes on.
    """
    read = [read_run(text) for text in runs]
    names = [run.name for run in read]
    if len(set(names)) < len(names):
        raise UsageError("two runs of one name", where=", ".join(names), remedy="use NAME=FOLDER")
    require_comparable(read)
    wanted, source = _target(read, data, split, entropy)
    require_writable(out)
    kept = readings_folder(out)
    options = ScoreOptions(judge, None, None, max_tokens, stride, device, kept=kept)
    curves = _score(read, options)
    matched = match(curves, wanted)
    tables = [matched_table(matched, wanted, source), points_table(curves)]
    figure = curve_figure(curves, matched, wanted, out / "curve.png")
    results = curve_results(curves, matched, wanted, source)
    page = write_report(
        out,
        title="Perplexity at equal entropy",
        summary=f"{len(read)} models; {_judged(curves)}.",
        tables=tables,
        figures=[("Perplexity against entropy, and against NFE at one entropy", figure)],
        results=results | {"code_version": code_version()},
    )
    write_bytes_atomic(out / "curve.csv", tables[0].to_csv().encode())
    for table in tables:
        typer.echo(table.to_text() + "\n")
    typer.echo(f"wrote {page}, results.json, curve.png and curve.csv")


def _score(runs: list[Run], options: ScoreOptions) -> list[Curve]:
    files = [samples for run in runs for samples in run.files]
    judging = Judging.start(options, files)
    return [
        line
        for run in runs
        for line in curves_of(
            run,
            entropy=lambda samples: entropy_score(samples.tokens, samples.indices),
            perplexity=judging.perplexity,
        )
    ]


def _judged(curves: list[Curve]) -> str:
    settings = curves[0].perplexities[0].settings
    return (
        f"judge {settings['judge']} ({str(settings['judge_sha256'])[:12]}), at most "
        f"{settings['max_tokens']} tokens, windows of {settings['context_tokens']} every "
        f"{settings['stride_tokens']}, corpus aggregate"
    )


def _target(
    runs: list[Run], data: Path | None, split: str, entropy: float | None
) -> tuple[float, str]:
    """H and where it comes from.

    Raises:
        UsageError: Unless exactly one source is named, or for data of another tokenizer or of
            shorter rows than the samples.
    """
    if (data is None) == (entropy is None):
        raise UsageError(
            "no entropy to compare at" if data is None else "two entropies to compare at",
            where="--data, --entropy",
            expected="one of them",
            remedy="--data STORE measures the data's, at the samples' length",
        )
    if entropy is not None:
        if not 0 < entropy < 20:
            raise UsageError("no such entropy", where="--entropy", got=entropy, expected="nats > 0")
        return entropy, "as told"
    assert data is not None
    rows = read_data_rows(data, split, MAX_DATA_ROWS)
    samples = runs[0].files[0]
    length = max(len(tokens) for tokens in samples.tokens)
    known = samples.settings.get("vocab_size")
    if isinstance(known, int) and known != rows.vocab_size:
        raise UsageError(
            "the data are of another tokenizer than the samples",
            where=f"--data {data}",
            got=f"{rows.vocab_size} entries",
            expected=f"{known}, as the samples' student",
        )
    if rows.rows.shape[1] < length:
        raise UsageError(
            "the data's rows are shorter than the samples",
            where=f"--data {data}",
            got=f"{rows.rows.shape[1]} tokens",
            expected=f"at least {length}: entropy grows with length",
        )
    values = [unigram_entropy_nats(row) for row in rows.rows[:, :length].tolist()]
    return float(np.mean(values)), f"{rows.name}, first {length} tokens of each"
