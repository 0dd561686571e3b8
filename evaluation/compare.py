"""``gdistill-eval compare``: evaluated runs side by side, with intervals that know their pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from evaluation.report import Table, write_report
from evaluation.samples import named_folder, read_object, short
from evaluation.score import Score, bootstrap_draws, percentile_interval
from shards.atomic import require_writable, write_bytes_atomic
from shards.errors import GdistillError, UsageError
from shards.provenance import code_version

MUST_MATCH: Mapping[str, tuple[str, ...]] = {
    "generative_perplexity": (
        "judge", "judge_sha256", "context_tokens", "stride_tokens", "max_tokens", "precision",
        "borders", "aggregate",
    ),
    "entropy_nats": ("tokens_per_sample",),
    "mauve": (
        "judge", "judge_sha256", "num_references", "max_tokens", "scaling", "seeds", "buckets",
    ),
    "total_variation_to_uniform": ("uniform over",),
}  # fmt: skip
"""Settings of each score that decide its number; those not named here must match in all."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class RecordedRun:
    """One file of samples and its scores.

    Attributes:
        name: For tables.
        run: Name of the folder it was scored in; its other files may be other NFE.
        nfe: Mean number of forward passes; None where unknown.
        drawn_with: How the samples were drawn.
        code_version: Of the code that scored them.
        scores: By name.
        source: The ``results.json``.
    """

    name: str
    run: str
    nfe: float | None
    drawn_with: Mapping[str, Any]
    code_version: str
    scores: Mapping[str, Score]
    source: Path


def read_run(text: str) -> list[RecordedRun]:
    """``FOLDER`` or ``NAME=FOLDER``: what ``gdistill-eval`` wrote there, a run per file of samples.

    The fewest passes come first.

    Raises:
        UsageError: When nothing was evaluated there.
        GdistillError: For a ``results.json`` of something else, or one without values by sample.
    """
    name, path = named_folder(text)
    file = path / "results.json" if path.is_dir() else path
    if not file.is_file():
        what, remedy = "no scores there", f"run gdistill-eval {path} first"
        expected = "a folder that gdistill-eval has scored"
        raise UsageError(what, where=path, got="no results.json", expected=expected, remedy=remedy)
    try:
        found = read_object(file)
        runs = []
        for part in found.values():
            own, nfe = _typed(part, "name", str), _typed(part, "nfe_mean", float, int, type(None))
            drawn, version = _typed(part, "drawn_with", dict), _typed(part, "code_version", str)
            scores = {score.name: score for score in map(Score.from_json, part["scores"])}
            full = name if len(found) == 1 else f"{name}/{own}"
            runs.append(RecordedRun(full, name, nfe, drawn, version, scores, file))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what, remedy = "the scores cannot be read", "evaluate the samples again with this version"
        got, expected = f"{type(error).__name__}: {error}", "results.json of gdistill-eval"
        raise GdistillError(what, where=file, got=got, expected=expected, remedy=remedy) from error
    if not runs:
        raise UsageError("no scores there", where=file, got="an empty record")
    return sorted(runs, key=lambda run: math.inf if run.nfe is None else run.nfe)


def _typed(value: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A field of one of these types; JSON's true and false are no numbers."""
    if type(value[name]) not in kinds:
        raise ValueError(f"{name} is {short(value[name])}")
    return value[name]


def require_one_kind(name: str, runs: Sequence[RecordedRun]) -> None:
    """Refuse to set numbers of one score beside each other that were measured differently.

    Args:
        name: The score.
        runs: All that have it.

    Raises:
        UsageError: Naming the first field that differs, and both runs.
    """
    first = runs[0].scores[name].settings
    for run in runs[1:]:
        ours = run.scores[name].settings
        for field in MUST_MATCH.get(name, tuple(dict.fromkeys([*first, *ours]))):
            if ours.get(field) != first.get(field):
                what, got = f"{name} was measured differently", ours.get(field)
                where, expected = f"{run.name}: {field}", f"{first.get(field)} as in {runs[0].name}"
                remedy = "evaluate both alike, or leave the score out with --scores"
                raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)


@dataclass(frozen=True)
class Comparison:
    """One score of one run against the baseline's.

    Attributes:
        difference: Value minus the baseline's.
        interval: 95% bootstrap interval of the difference; None where values by sample lack.
        change_percent: 100 x difference / baseline; None for a baseline of 0.
        change_interval: Its 95% interval.
        num_pairs: Samples of equal index that were resampled together; 0 if the runs were
            resampled each on its own.
    """

    difference: float
    interval: Interval | None
    change_percent: float | None
    change_interval: Interval | None
    num_pairs: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference leaves 0 out."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "difference": self.difference,
            "difference_interval_95": self.interval,
            "change_percent": self.change_percent,
            "change_interval_95": self.change_interval,
            "num_pairs": self.num_pairs,
        }


def compare_scores(score: Score, baseline: Score, *, is_paired: bool) -> Comparison:
    """A run's score against the baseline's.

    Args:
        score: The run's.
        baseline: The baseline's.
        is_paired: Whether sample i of both belongs together (same seed, prompts or rows). Only
            indices that both have are paired, and only when they are all; else each run is
            resampled on its own.
    """
    difference = score.value - baseline.value
    change = 100 * difference / baseline.value if baseline.value else None
    ours, theirs = score.per_sample, baseline.per_sample
    if ours is None or theirs is None or min(len(ours.indices), len(theirs.indices)) < 2:
        return Comparison(difference, None, change, None, 0)
    num_pairs = 0
    if is_paired and set(ours.indices) == set(theirs.indices):
        common = sorted(ours.indices)
        num_pairs = len(common)
        draws = bootstrap_draws(num_pairs)
        drawn, base = (part.select(common).resampled(draws) for part in (ours, theirs))
    else:
        drawn = ours.resampled(bootstrap_draws(len(ours.indices), seed=1))
        base = theirs.resampled(bootstrap_draws(len(theirs.indices), seed=2))
    ratios = 100 * (drawn - base) / np.where(base == 0, np.nan, base)
    is_known = change is not None and np.isfinite(ratios).all()
    change_interval = percentile_interval(ratios) if is_known else None
    interval = percentile_interval(drawn - base)
    return Comparison(difference, interval, change, change_interval, num_pairs)


Comparisons = Mapping[tuple[str, str], Comparison]
"""(run, score) -> against the baseline."""


def _table(runs: Sequence[RecordedRun], scores: Sequence[str], comparisons: Comparisons, baseline: str) -> Table:
    """A row per run: each score with its interval and its change against the baseline."""
    rows = []
    for run in runs:
        sizes = {len(s.per_sample.indices) for s in run.scores.values() if s.per_sample}
        row = [run.name, "-" if run.nfe is None else f"{run.nfe:g}"]
        row.append("/".join(map(str, sorted(sizes))) or "-")
        for name in scores:
            score, comparison = run.scores.get(name), comparisons.get((run.name, name))
            row.append("-" if score is None else _with(score.value, score.interval))
            if comparison is None:
                row += ["baseline", ""] if run.run == baseline and score else ["-", "-"]
                continue
            mark, change = "*" if comparison.is_clear else "", comparison.change_percent
            row.append(_with(comparison.difference, comparison.interval, "+") + mark)
            row.append("-" if change is None else f"{change:+.1f}%")
        rows.append(tuple(row))
    pairs = {c.num_pairs for c in comparisons.values() if c.interval}
    paired = "paired by sample index" if pairs and min(pairs) else "runs resampled independently"
    note = (
        f"Against {baseline} at the same NFE. In brackets: 95% bootstrap intervals over samples, "
        f"{paired}; * marks a difference whose interval leaves 0 out."
    )
    header = ["run", "NFE", "n"]
    for name in scores:
        header += [name, "difference", "change"]
    return Table("Comparison", tuple(header), tuple(rows), notes=(note,))


def _with(value: float, interval: Interval | None, sign: str = "") -> str:
    text = f"{value:{sign}.4g}"
    if interval is not None:
        text += f" [{interval[0]:{sign}.4g}, {interval[1]:{sign}.4g}]"
    return text


def compare(
    runs: Annotated[list[str], typer.Argument(help="Folders that gdistill-eval has scored: FOLDER or NAME=FOLDER.")],
    baseline: Annotated[
        str | None, typer.Option(help="Name of the run to compare with; the first unless given.")
    ] = None,
    scores: Annotated[str | None, typer.Option(help="Only these, separated by commas; all that are shared.")] = None,
    paired: Annotated[
        bool, typer.Option(help="Resample equal sample indices together (same seed, prompts or rows).")
    ] = True,
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("comparison"),
) -> None:
    """Bootstrap intervals, paired differences and changes against a baseline.

    Refuses to put numbers of different judges, lengths or windows into one column.
    """
    read = [run for text in runs for run in read_run(text)]
    names = [run.name for run in read]
    if len(names) < 2 or len(set(names)) < len(names):
        what = "runs of one name" if len(names) > 1 else "one run cannot be compared"
        expected, remedy = "at least two runs of different names", "give NAME=FOLDER for each"
        raise UsageError(what, where=", ".join(names), expected=expected, remedy=remedy)
    chosen = read[0].run if baseline is None else baseline
    base = [run for run in read if run.run == chosen]
    if not base:
        known = ", ".join(dict.fromkeys(run.run for run in read))
        raise UsageError("no such run", where="--baseline", got=baseline, expected=known)
    shared = [name for name in read[0].scores if all(name in run.scores for run in read)]
    wanted = shared if scores is None else [name.strip() for name in scores.split(",")]
    if not wanted:
        raise UsageError("the runs share no score", where=", ".join(names))
    for name in wanted:
        if name not in shared:
            what = "not every run has this score"
            raise UsageError(what, where="--scores", got=name, expected=shared)
        require_one_kind(name, read)
    require_writable(out)
    comparisons = {}
    for run in (run for run in read if run not in base):
        # The baseline's file of the same NFE, or its only one.
        alike = base if len(base) == 1 else [other for other in base if other.nfe == run.nfe]
        for other in alike[:1]:
            is_paired = paired and run.drawn_with.get("seed") == other.drawn_with.get("seed")
            for name in wanted:
                ours, theirs = run.scores[name], other.scores[name]
                comparison = compare_scores(ours, theirs, is_paired=is_paired)
                comparisons[run.name, name] = comparison
    table = _table(read, wanted, comparisons, chosen)
    results = {
        run.name: {
            "nfe": run.nfe,
            "drawn_with": run.drawn_with,
            "code_version": run.code_version,
            "source": str(run.source),
            "scores": {
                name: {
                    "value": run.scores[name].value,
                    "interval_95": run.scores[name].interval,
                    "settings": run.scores[name].settings,
                    **(found.to_json() if (found := comparisons.get((run.name, name))) else {}),
                }
                for name in wanted
            },
        }
        for run in read
    }
    page = write_report(
        out,
        title="Comparison",
        summary=f"{len(read)} runs against {chosen}.",
        tables=[table],
        results={"baseline": chosen, "runs": results, "code_version": code_version()},
    )
    write_bytes_atomic(out / "comparison.csv", table.to_csv().encode())
    typer.echo(table.to_text())
    typer.echo(f"wrote {page}, results.json, tables.md and comparison.csv")
