"""``gdistill-eval compare``: evaluated runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evaluation.compare import (
    Comparison,
    RecordedRun,
    compare_scores,
    comparison_results,
    comparison_table,
    read_run,
    require_one_kind,
)
from evaluation.report import write_report
from shards.base import UsageError, code_version, require_writable, write_bytes_atomic


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(help="Folders that gdistill-eval has scored: FOLDER or NAME=FOLDER."),
    ],
    baseline: Annotated[
        str | None, typer.Option(help="Name of the run to compare with; the first unless told.")
    ] = None,
    scores: Annotated[
        str | None, typer.Option(help="Only these, separated by commas; all that are shared.")
    ] = None,
    paired: Annotated[
        bool,
        typer.Option(help="Resample equal sample indices together (same seed, prompts or rows)."),
    ] = True,
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("comparison"),
) -> None:
    """Bootstrap intervals, paired differences and changes against a baseline.

    Refuses to put numbers of different judges, lengths or windows into one column.
    """
    read = [run for text in runs for run in read_run(text)]
    names = [run.name for run in read]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(
            "runs of one name" if len(names) > 1 else "one run cannot be compared",
            where=", ".join(names),
            expected="at least two runs of different names",
            remedy="give NAME=FOLDER for each",
        )
    base = _baseline(read, baseline)
    against = {run.name: _same_budget(run, base) for run in read if run not in base}
    wanted = _wanted(read, scores)
    for name in wanted:
        require_one_kind(name, [run for run in read if name in run.scores])
    require_writable(out)
    comparisons = {
        (run.name, name): _compare(run, other, name, paired)
        for run in read
        for name in wanted
        if (other := against.get(run.name)) is not None
    }
    table = comparison_table(read, wanted, comparisons, base[0].run)
    results = comparison_results(read, wanted, comparisons, base[0].run)
    page = write_report(
        out,
        title="Comparison",
        summary=f"{len(read)} runs against {base[0].run}.",
        tables=[table],
        results=results | {"code_version": code_version()},
    )
    write_bytes_atomic(out / "comparison.csv", table.to_csv().encode())
    write_bytes_atomic(out / "comparison.tex", table.to_latex().encode())
    typer.echo(table.to_text())
    typer.echo(f"wrote {page}, results.json, tables.md, comparison.csv and comparison.tex")


def _compare(run: RecordedRun, base: RecordedRun, name: str, paired: bool) -> Comparison:
    same_seed = run.drawn_with.get("seed") == base.drawn_with.get("seed")
    return compare_scores(run.scores[name], base.scores[name], is_paired=paired and same_seed)


def _baseline(runs: list[RecordedRun], name: str | None) -> list[RecordedRun]:
    """All files of the baseline."""
    chosen = runs[0].run if name is None else name
    found = [run for run in runs if run.run == chosen]
    if not found:
        raise UsageError(
            "no such run",
            where="--baseline",
            got=name,
            expected=", ".join(dict.fromkeys(run.run for run in runs)),
        )
    return found


def _same_budget(run: RecordedRun, baseline: list[RecordedRun]) -> RecordedRun | None:
    """The baseline's file of the same NFE, or its only one."""
    if len(baseline) == 1:
        return baseline[0]
    return next((other for other in baseline if other.nfe == run.nfe), None)


def _wanted(runs: list[RecordedRun], scores: str | None) -> list[str]:
    shared = [name for name in runs[0].scores if all(name in run.scores for run in runs)]
    if scores is None:
        if not shared:
            raise UsageError("the runs share no score", where=", ".join(run.name for run in runs))
        return shared
    wanted = [name.strip() for name in scores.split(",")]
    for name in wanted:
        if name not in shared:
            raise UsageError(
                "not every run has this score", where="--scores", got=name, expected=shared
            )
    return wanted
