"""The comparison as a table: value, interval, difference and change for every run and score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.compare.difference import Comparison
from evaluation.compare.recorded import RecordedRun
from evaluation.report import Table

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
                    name: _score(run, name, comparisons.get((run.name, name)))
                    for name in scores
                    if name in run.scores
                },
            }
            for run in runs
        },
    }


def _score(run: RecordedRun, name: str, comparison: Comparison | None) -> dict[str, Any]:
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
