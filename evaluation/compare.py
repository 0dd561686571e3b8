"""Scores read back from ``results.json``, and which of them may share a column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from evaluation.bootstrap import PerSample, bootstrap_draws, percentile_interval
from evaluation.report import Table, write_report
from evaluation.samples.samples import named_folder, read_object, short
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


@dataclass(frozen=True)
class RecordedScore:
    """A score as ``results.json`` has it.

    Attributes:
        name: What was measured.
        value: The number.
        interval: As recorded.
        settings: What it depends on.
        per_sample: Its values sample by sample; None where it has none (MAUVE).
    """

    name: str
    value: float
    interval: tuple[float, float] | None
    settings: Mapping[str, Any]
    per_sample: PerSample | None


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
    scores: Mapping[str, RecordedScore]
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
        raise UsageError(
            "no scores there",
            where=path,
            got="no results.json",
            expected="a folder that gdistill-eval has scored",
            remedy=f"run gdistill-eval {path} first",
        )
    try:
        found = read_object(file)
        parts = [_run(name, part, file, len(found)) for part in found.values()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise GdistillError(
            "the scores cannot be read",
            where=file,
            got=f"{type(error).__name__}: {error}",
            expected="results.json of gdistill-eval",
            remedy="evaluate the samples again with this version",
        ) from error
    if not parts:
        raise UsageError("no scores there", where=file, got="an empty record")
    return sorted(parts, key=lambda part: math.inf if part.nfe is None else part.nfe)


def _run(name: str, part: Mapping[str, Any], file: Path, num_files: int) -> RecordedRun:
    scores = [_score(value) for value in part["scores"]]
    own, nfe = _typed(part, "name", str), _typed(part, "nfe_mean", float, int, type(None))
    return RecordedRun(
        name=name if num_files == 1 else f"{name}/{own}",
        run=name,
        nfe=nfe,
        drawn_with=_typed(part, "drawn_with", dict),
        code_version=_typed(part, "code_version", str),
        scores={score.name: score for score in scores},
        source=file,
    )


def _score(value: Mapping[str, Any]) -> RecordedScore:
    interval = value["interval_95"]
    low_high = None if interval is None else tuple(map(float, interval))
    if low_high is not None and len(low_high) != 2:
        raise ValueError(f"interval_95 of {len(low_high)} numbers")
    return RecordedScore(
        name=_typed(value, "name", str),
        value=float(_typed(value, "value", float, int)),
        interval=low_high,
        settings=_typed(value, "settings", dict),
        per_sample=PerSample.from_json(value["per_sample"]) if value["per_sample"] else None,
    )


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
                raise UsageError(
                    f"{name} was measured differently",
                    where=f"{run.name}: {field}",
                    got=ours.get(field),
                    expected=f"{first.get(field)} as in {runs[0].name}",
                    remedy="evaluate both alike, or leave the score out with --scores",
                )


# Differences between runs, with intervals that know which samples belong together.


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
    interval: tuple[float, float] | None
    change_percent: float | None
    change_interval: tuple[float, float] | None
    num_pairs: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference leaves 0 out."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def compare_scores(score: RecordedScore, baseline: RecordedScore, *, is_paired: bool) -> Comparison:
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
    drawn, base, num_pairs = _drawn(ours, theirs, is_paired)
    ratios = 100 * (drawn - base) / np.where(base == 0, np.nan, base)
    return Comparison(
        difference,
        percentile_interval(drawn - base),
        change,
        percentile_interval(ratios) if change is not None and np.isfinite(ratios).all() else None,
        num_pairs,
    )


def _drawn(
    ours: PerSample, theirs: PerSample, is_paired: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Both scores in every bootstrap draw, and the number of pairs."""
    if is_paired and set(ours.indices) == set(theirs.indices):
        common = sorted(ours.indices)
        draws = bootstrap_draws(len(common))
        one, other = (part.select(common).resampled(draws) for part in (ours, theirs))
        return one, other, len(common)
    return (
        ours.resampled(bootstrap_draws(len(ours.indices), seed=1)),
        theirs.resampled(bootstrap_draws(len(theirs.indices), seed=2)),
        0,
    )


# The comparison as a table: value, interval, difference and change for every run and score.


Comparisons = Mapping[tuple[str, str], Comparison]
"""(run, score) -> against the baseline."""


def comparison_table(
    runs: Sequence[RecordedRun], scores: Sequence[str], comparisons: Comparisons, baseline: str
) -> Table:
    """A row per run: each score with its interval and its change against the baseline."""
    header = ["run", "NFE", "n"]
    for score in scores:
        header += [score, "difference", "change"]
    rows = [
        (run.name, _nfe(run), _num(run), *_row(run, scores, comparisons, baseline)) for run in runs
    ]
    pairs = {c.num_pairs for c in comparisons.values() if c.interval}
    paired = "paired by sample index" if pairs and min(pairs) else "runs resampled independently"
    notes = (
        f"Against {baseline} at the same NFE. In brackets: 95% bootstrap intervals over samples, "
        f"{paired}; * marks a difference whose interval leaves 0 out.",
    )
    return Table("Comparison", tuple(header), tuple(rows), notes=notes)


def comparison_results(
    runs: Sequence[RecordedRun], scores: Sequence[str], comparisons: Comparisons, baseline: str
) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "baseline": baseline,
        "runs": {
            run.name: {
                "nfe": run.nfe,
                "drawn_with": dict(run.drawn_with),
                "code_version": run.code_version,
                "source": str(run.source),
                "scores": {
                    name: _table_score(run, name, comparisons.get((run.name, name)))
                    for name in scores
                    if name in run.scores
                },
            }
            for run in runs
        },
    }


def _table_score(run: RecordedRun, name: str, comparison: Comparison | None) -> dict[str, Any]:
    score = run.scores[name]
    told: dict[str, Any] = {
        "value": score.value,
        "interval_95": _list(score.interval),
        "settings": dict(score.settings),
    }
    if comparison is not None:
        told["difference"] = comparison.difference
        told["difference_interval_95"] = _list(comparison.interval)
        told["change_percent"] = comparison.change_percent
        told["change_interval_95"] = _list(comparison.change_interval)
        told["num_pairs"] = comparison.num_pairs
    return told


def _list(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else list(interval)


def _row(
    run: RecordedRun, scores: Sequence[str], comparisons: Comparisons, baseline: str
) -> list[str]:
    cells: list[str] = []
    for name in scores:
        score, comparison = run.scores.get(name), comparisons.get((run.name, name))
        cells.append("-" if score is None else _with(score.value, score.interval))
        if comparison is None:
            cells += ["baseline", ""] if run.run == baseline and score else ["-", "-"]
            continue
        mark = "*" if comparison.is_clear else ""
        cells.append(_with(comparison.difference, comparison.interval, "+") + mark)
        change = comparison.change_percent
        cells.append("-" if change is None else f"{change:+.1f}%")
    return cells


def _with(value: float, interval: tuple[float, float] | None, sign: str = "") -> str:
    text = f"{value:{sign}.4g}"
    return (
        text if interval is None else f"{text} [{interval[0]:{sign}.4g}, {interval[1]:{sign}.4g}]"
    )


def _nfe(run: RecordedRun) -> str:
    return "-" if run.nfe is None else f"{run.nfe:g}"


def _num(run: RecordedRun) -> str:
    sizes = {len(s.per_sample.indices) for s in run.scores.values() if s.per_sample}
    return "/".join(map(str, sorted(sizes))) or "-"


# ``gdistill-eval compare``: evaluated runs side by side.


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
