"""What ``gdistill-eval`` writes of scored files: tables, notes, cautions, ``results.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from evaluation.report import MAX_ROWS, ShownSample, Table, browser_section, write_report
from evaluation.samples.samples import SampleSet, drawn_with
from evaluation.score import Score
from shards.errors import visible
from shards.provenance import code_version

Scored = Sequence[tuple[SampleSet, Sequence[Score]]]
Pieces = Callable[[str], Sequence[tuple[str, float | None]]]
"""A text in tokens with their surprise, nats."""
BESIDE: Mapping[str, Mapping[str, str]] = {
    "entropy_nats": {"distinct_2": "distinct-2", "repeated_4": "repeated 4-grams"},
    "generative_perplexity": {"per_sample_mean": "mean per sample"},
    "tokens_per_teacher_pass": {"conditional_acceptance": "accepted by distance"},
    "mauve": {"spread_over_seeds": "spread"},
}
"""Details that stand in columns of their own, because their score alone can mislead."""


def write_scores(
    directory: Path, title: str, summary: str, scored: Scored, pieces: Pieces | None = None
) -> Path:
    """Write the report of scored files, and show its tables and cautions; the page."""
    tables, cautions = tables_of(scored), cautions_of(scored)
    page = write_report(
        directory,
        title=title,
        summary=summary,
        tables=tables,
        results=results_of(scored),
        cautions=cautions,
        sections=[browser_of(scored, pieces)],
    )
    for table in tables:
        typer.echo(table.to_text() + "\n")
    for caution in cautions:
        typer.echo(f"caution: {visible(caution)}", err=True)
    return page


def results_of(scored: Scored) -> dict[str, Any]:
    """Content of ``results.json``: file -> what is known of its samples, and their scores."""
    return {
        visible(str(samples.source)): {
            "name": samples.name,
            "settings": samples.settings,
            "drawn_with": drawn_with(samples),
            "nfe_mean": samples.nfe_mean,
            "code_version": code_version(),
            "scores": [score.to_json() for score in scores],
        }
        for samples, scores in scored
    }


def tables_of(scored: Scored) -> list[Table]:
    """The scores, and beside them how the samples were drawn."""
    return [score_table(scored), drawn_table([samples for samples, _ in scored])]


def score_table(scored: Scored) -> Table:
    """One row per sample file, one column per score, intervals in brackets."""
    header = [name for score in scored[0][1] for name in _columns(score)]
    rows = tuple(
        (
            samples.name,
            str(len(samples.tokens)),
            _nfe(samples),
            *(cell for score in scores for cell in _cells(score)),
        )
        for samples, scores in scored
    )
    notes = ("In brackets: 95% intervals over samples.", *_settings_notes(scored))
    return Table("Scores", ("samples", "n", "NFE", *header), rows, notes=notes)


def drawn_table(sets: Sequence[SampleSet]) -> Table:
    """Student, sampler and its settings of every file; what all files share stands below."""
    each = [drawn_with(samples) for samples in sets]
    names = list(dict.fromkeys(name for drawn in each for name in drawn))
    shared = {n: each[0][n] for n in names if all(d.get(n) == each[0].get(n) for d in each)}
    own = [name for name in names if name not in shared] or ["nfe"]
    rows = tuple(
        (samples.name, *(_short(drawn.get(name, "-")) for name in own))
        for samples, drawn in zip(sets, each, strict=True)
    )
    text = ", ".join(f"{name} {_short(value)}" for name, value in shared.items() if name not in own)
    return Table(
        "How the samples were drawn",
        ("samples", *own),
        rows,
        notes=(f"All files: {text}.",) if text else (),
    )


def browser_of(scored: Scored, pieces: Pieces | None) -> str:
    """HTML of the samples themselves; empty where they have no text.

    Args:
        scored: The files.
        pieces: None without a judge.
    """
    columns = {
        samples.name: {
            index: ShownSample(
                _facts(samples, scores, index), [(text, None)] if pieces is None else pieces(text)
            )
            for index, text in list(zip(samples.indices, samples.texts, strict=True))[:MAX_ROWS]
            if text is not None
        }
        for samples, scores in scored
    }
    return browser_section(columns) if any(columns.values()) else ""


def _facts(samples: SampleSet, scores: Sequence[Score], index: int) -> str:
    """What is known of one sample: its forward passes, and its own part of every score."""
    nfe = samples.nfe[samples.indices.index(index)]
    told = [] if nfe is None else [f"NFE {nfe}"]
    names = {"generative_perplexity": "perplexity", "entropy_nats": "entropy"}
    for score in scores:
        parts = score.per_sample
        if parts is not None and score.name in names and index in parts.indices:
            told.append(f"{names[score.name]} {_number(parts.select([index]).value())}")
    return ", ".join(told)


def cautions_of(scored: Scored) -> list[str]:
    """Why numbers should not be trusted as they stand, each with the files it is about."""
    found: dict[str, list[str]] = {}
    for samples, scores in scored:
        for score in scores:
            for caution in score.cautions:
                found.setdefault(f"{score.name}: {caution}", []).append(samples.name)
    return [f"{text} ({_files(names, len(scored))})" for text, names in found.items()]


def _columns(score: Score) -> Iterator[str]:
    yield score.name
    yield from BESIDE.get(score.name, {}).values()


def _cells(score: Score) -> Iterator[str]:
    text = _number(score.value)
    if score.interval:
        text += f" [{_number(score.interval[0])}, {_number(score.interval[1])}]"
    yield text
    for name in BESIDE.get(score.name, {}):
        found = score.details[name]
        yield " ".join(map(_number, found)) if isinstance(found, list) else _number(found)


def _number(value: float) -> str:
    """Four digits or so, without an exponent."""
    return (
        f"{value:.3f}"
        if abs(value) < 10
        else f"{value:.1f}"
        if abs(value) < 1e4
        else f"{value:.0f}"
    )


def _nfe(samples: SampleSet) -> str:
    return "-" if samples.nfe_mean is None else f"{samples.nfe_mean:.1f}"


def _settings_notes(scored: Scored) -> Iterator[str]:
    """What each score depends on, once where it is the same for all files."""
    for number, score in enumerate(scored[0][1]):
        told: dict[str, list[str]] = {}
        for samples, scores in scored:
            settings = scores[number].settings
            text = ", ".join(f"{key} {_short(value)}" for key, value in settings.items())
            told.setdefault(text, []).append(samples.name)
        for text, names in told.items():
            if text:
                of = "" if len(told) == 1 else f" of {', '.join(names)}"
                yield f"{score.name}{of}: {text}"


def _files(names: Sequence[str], total: int) -> str:
    return "all files" if len(names) == total else ", ".join(names)


def _short(value: Any) -> str:
    """A value for people: numbers short, hashes to twelve digits."""
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    is_hash = len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)
    return text[:12] if is_hash else text
