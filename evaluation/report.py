"""Tables of strings (text, Markdown, HTML), the page, and what is written of scored files."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from jinja2 import Environment, FileSystemLoader

from evaluation.samples import SampleSet, drawn_with
from evaluation.score import Score
from evaluation.text.distance import RANKING
from shards.atomic import write_bytes_atomic, write_json_atomic
from shards.errors import visible
from shards.settings import code_version


@dataclass(frozen=True)
class Table:
    """A table of strings: ``rows[i][0]`` names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        """The table as GitHub markdown, right-aligned but for the first column."""
        lines = [
            _markdown_row(self.header),
            "|---" + "|---:" * (len(self.header) - 1) + "|",
            *map(_markdown_row, self.rows),
        ]
        return "\n".join(lines)

    def to_text(self) -> str:
        """The table in aligned plain text, for a terminal."""
        rows = [tuple(map(visible, row)) for row in (self.header, *self.rows)]
        header, *rows = aligned(rows)
        rule = "-" * max(map(len, [header, *rows]))
        notes = map(visible, self.notes)
        return "\n".join([visible(self.title), rule, header, rule, *rows, rule, *notes])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: its first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def markdown_text(text: str) -> str:
    """Text that stays text: what looks like HTML in it is none."""
    return visible(text.replace("\n", " ")).replace("&", "&amp;").replace("<", "&lt;")


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(markdown_text(cell).replace("|", r"\|") for cell in cells) + " |"


# The page: tables, figures and samples in one file that loads nothing from outside.


PAGE = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True).get_template("report.html")
MAX_ROWS, MAX_COLUMNS = 24, 8
"""Sample indices and files of the page."""


@dataclass(frozen=True)
class ShownSample:
    """One sample of one file.

    Attributes:
        facts: What stands above it (perplexity, entropy).
        pieces: Its text in pieces, each with nats or None; the page has a shade per nat.
    """

    facts: str
    pieces: Sequence[tuple[str, float | None]]


def write_report(
    directory: Path,
    *,
    title: str,
    summary: str,
    tables: Iterable[Table],
    results: dict[str, Any],
    figures: Iterable[tuple[str, Path]] = (),
    cautions: Iterable[str] = (),
    samples: Mapping[str, Mapping[int, ShownSample]] | None = None,
) -> Path:
    """Write ``results.json``, ``tables.md`` and ``report.html`` into ``directory``.

    Args:
        directory: Where to write.
        title: Heading of the page.
        summary: One paragraph in front.
        tables: Shown in order.
        figures: (caption, PNG file), behind the first table; embedded: the page stands alone.
        results: Every number, JSON-ready.
        cautions: Shown in front of everything.
        samples: File name -> sample index -> sample: shown last, files of one index beside each
            other, at most 8 files and 24 indices.
    """
    tables = list(tables)
    write_json_atomic(directory / "results.json", results)
    markdown = "\n\n".join(
        "\n\n".join([f"### {table.title}", table.to_markdown(), *map(markdown_text, table.notes)]) for table in tables
    )
    write_bytes_atomic(directory / "tables.md", markdown.encode() + b"\n")
    samples = samples or {}
    shown = dict(list(samples.items())[:MAX_COLUMNS])
    page = PAGE.render(
        title=title,
        summary=summary,
        tables=tables,
        figures=[(caption, base64.b64encode(file.read_bytes()).decode()) for caption, file in figures],
        cautions=cautions,
        samples=shown,
        indices=sorted({index for file in shown.values() for index in file})[:MAX_ROWS],
        has_nats=any(nats is not None for file in shown.values() for one in file.values() for _, nats in one.pieces),
        num_left=len(samples) - len(shown),
    )
    write_bytes_atomic(directory / "report.html", page.encode(errors="backslashreplace"))
    return directory / "report.html"


# What ``gdistill-eval`` writes of scored files: tables, notes, cautions, ``results.json``.


Scored = Sequence[tuple[SampleSet, Sequence[Score]]]
Pieces = Callable[[str], Sequence[tuple[str, float | None]]]
"""A text in tokens with their surprise, nats."""
BESIDE: Mapping[str, Mapping[str, str]] = {
    "entropy_nats": {"distinct_2": "distinct-2", "repeated_4": "repeated 4-grams"},
    "generative_perplexity": {"per_sample_mean": "mean per sample"},
    "tokens_per_teacher_pass": {"conditional_acceptance": "accepted by distance"},
}
"""Details that stand in columns of their own, because their score alone can mislead."""


def write_scores(directory: Path, summary: str, scored: Scored, pieces: Pieces | None) -> Path:
    """Write the report of scored files, and show its tables and cautions; the page."""
    tables = [_score_table(scored), _drawn_table([samples for samples, _ in scored])]
    if any("floor" in score.details for _, scores in scored for score in scores):
        tables.insert(1, _distance_table(scored))
    found: dict[str, list[str]] = {}
    for samples, scores in scored:
        for score in scores:
            for caution in score.cautions:
                found.setdefault(f"{score.name}: {caution}", []).append(samples.name)
    of = {text: "all files" if len(names) == len(scored) else ", ".join(names) for text, names in found.items()}
    cautions = [f"{text} ({files})" for text, files in of.items()]
    page = write_report(
        directory,
        title="Scores",
        summary=summary,
        tables=tables,
        results={
            visible(str(samples.source)): {
                "name": samples.name,
                "settings": samples.settings,
                "drawn_with": drawn_with(samples),
                "nfe_mean": samples.nfe_mean,
                "processor_seconds_mean": samples.processor_seconds_mean,
                "code_version": code_version(),
                "scores": [score.to_json() for score in scores],
            }
            for samples, scores in scored
        },
        cautions=cautions,
        samples={
            samples.name: {
                index: ShownSample(_facts(samples, scores, index), [(text, None)] if pieces is None else pieces(text))
                for index, text in list(zip(samples.indices, samples.texts, strict=True))[:MAX_ROWS]
                if text is not None
            }
            for samples, scores in scored
        },
    )
    for table in tables:
        typer.echo(table.to_text() + "\n")
    for caution in cautions:
        typer.echo(f"caution: {visible(caution)}", err=True)
    return page


def _score_table(scored: Scored) -> Table:
    """One row per sample file, one column per score that needs no reference."""
    own = [[score for score in scores if "floor" not in score.details] for _, scores in scored]
    header = ["samples", "n", "passes", "CPU s"]
    notes = ["In brackets: 95% intervals over samples."]
    for number, score in enumerate(own[0]):
        header += [score.name, *BESIDE.get(score.name, {}).values()]
        notes += _settings_notes(score.name, scored, [scores[number] for scores in own])
    notes.append(
        "Passes (of the verifier, where there is one) and CPU s: forward passes and processor seconds per sequence."
    )
    rows = []
    for (samples, _), scores in zip(scored, own, strict=True):
        seconds = samples.processor_seconds_mean
        nfe = "-" if samples.nfe_mean is None else f"{samples.nfe_mean:.1f}"
        row = [samples.name, str(len(samples.tokens)), nfe]
        row.append("-" if seconds is None else f"{seconds:.3g}")
        for score in scores:
            low_high = map(_number, score.interval or ())
            row.append(_number(score.value) + (f" [{', '.join(low_high)}]" if score.interval else ""))
            for name in BESIDE.get(score.name, {}):
                value = score.details[name]
                row.append(" ".join(map(_number, value if isinstance(value, list) else [value])))
        rows.append(tuple(row))
    return Table("Scores", tuple(header), tuple(rows), notes=tuple(notes))


def _distance_table(scored: Scored) -> Table:
    """A row per file and score of its distribution, beside what the text itself scores."""
    rows, notes = [], []
    for samples, scores in scored:
        for score in scores:
            if "floor" not in score.details:
                continue
            low, high = score.interval or (score.value, score.value)
            bounds = score.details["floor_interval_95"]
            cells = [f"{low:.3g}, {high:.3g}", f"{score.details['floor']:.3g}"]
            cells += [", ".join(f"{bound:.3g}" for bound in bounds)]
            counts = score.num_samples, score.details["floor_samples"]
            cells += [*map(str, counts), str(score.details["least_samples"])]
            ranks = "yes" if score.name in RANKING else "no"
            rows.append((samples.name, score.name, f"{score.value:.3g}", *cells, ranks))
    shown = [[score for score in scores if "floor" in score.details] for _, scores in scored]
    for number, score in enumerate(shown[0]):
        notes += _settings_notes(score.name, scored, [scores[number] for scores in shown])
    notes = [
        "Floor: what other rows of the text itself score, as many as stand under 'rows'. Below "
        "'least' samples a score says nothing. MAUVE is better where it is higher, the distances "
        "where they are lower; what does not rank is won by samplers without a parameter.",
        *dict.fromkeys(notes),
    ]
    header = ("samples", "score", "value", "95%", "floor", "95% of floor", "n", "rows", "least")
    return Table("Against the text", (*header, "ranks"), tuple(rows), notes=tuple(notes))


def _drawn_table(sets: Sequence[SampleSet]) -> Table:
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
    notes = (f"All files: {text}.",) if text else ()
    return Table("How the samples were drawn", ("samples", *own), rows, notes=notes)


def _facts(samples: SampleSet, scores: Sequence[Score], index: int) -> str:
    """What is known of one sample: its forward passes, and its own part of every score."""
    nfe = samples.nfe[samples.indices.index(index)]
    facts = [] if nfe is None else [f"passes {nfe}"]
    names = {"generative_perplexity": "perplexity", "entropy_nats": "entropy"}
    for score in scores:
        parts = score.per_sample
        if parts is not None and score.name in names and index in parts.indices:
            facts.append(f"{names[score.name]} {_number(parts.select([index]).value())}")
    return ", ".join(facts)


def _number(value: float) -> str:
    """Four digits or so, without an exponent."""
    digits = 3 if abs(value) < 10 else 1 if abs(value) < 1e4 else 0
    return f"{value:.{digits}f}"


def _settings_notes(name: str, scored: Scored, scores: Sequence[Score]) -> Iterator[str]:
    """What a score depends on, once where it is the same for all files."""
    files: dict[str, list[str]] = {}
    for (samples, _), score in zip(scored, scores, strict=True):
        text = ", ".join(f"{key} {_short(value)}" for key, value in score.settings.items())
        files.setdefault(text, []).append(samples.name)
    for text, names in files.items():
        if text:
            of = "" if len(files) == 1 else f" of {', '.join(names)}"
            yield f"{name}{of}: {text}"


def _short(value: Any) -> str:
    """A value for people: numbers short, hashes to twelve digits."""
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    is_hash = len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)
    return text[:12] if is_hash else text
