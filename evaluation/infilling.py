"""Infilling: rows with open positions and their truth, and how well they were filled.

A row is ``{"tokens": [...], "masked": [...]}`` in a file for ``gdistill-sample --infill``; under
the mask stands the truth. The judge reads the whole row, and its tokens that overlap the filled
characters count: the perplexity of the filled part in its context on the left. Beside it stands the
share of positions that hold the very token that was there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from evaluation.samples import DataRows, SampleSet, read_data_rows, read_records, short
from evaluation.score import PerSample, Score, range_text
from evaluation.text.reading import Judging
from shards.atomic import require_writable, write_bytes_atomic
from shards.errors import GdistillError, UsageError


@dataclass(frozen=True)
class InfillRow:
    """A row of real text with the positions that a student fills."""

    tokens: tuple[int, ...]
    masked: tuple[int, ...]


def make_infill_rows(data: DataRows, num: int, num_masked: int, seed: int) -> list[InfillRow]:
    """The first ``num`` rows, each with ``num_masked`` positions masked uniformly, never the first.

    Raises:
        UsageError: When there are fewer rows, or a row has fewer positions to mask.
    """
    length = data.rows.shape[1]
    if num > len(data.rows) or not 1 <= num_masked < length:
        what, got = "the data do not hold such rows", f"{num} rows, {num_masked} masked"
        expected = f"at most {len(data.rows)} rows, 1..{length - 1} masked"
        raise UsageError(what, where="--num, --masked", got=got, expected=expected)
    generator = np.random.default_rng(seed)
    masks = [1 + generator.permutation(length - 1)[:num_masked] for _ in range(num)]
    return [
        InfillRow(tuple(row.tolist()), tuple(sorted(mask.tolist())))
        for row, mask in zip(data.rows[:num], masks, strict=True)
    ]


def read_infill_rows(file: Path) -> list[InfillRow]:
    """Rows with their truth; any pattern of masks.

    Raises:
        UsageError: When the file cannot be read.
        GdistillError: For a line without truth or positions, naming it.
    """
    rows = []
    for line, values in read_records(file, "infill row"):
        tokens, masked = values.get("tokens"), values.get("masked")
        fine = (
            isinstance(tokens, list)
            and isinstance(masked, list)
            and bool(masked)
            and all(type(token) is int and 0 <= token < 2**31 for token in tokens)
            and all(type(place) is int and 0 < place < len(tokens) for place in masked)
        )
        if not fine:
            what, remedy = "an infill row without its truth", "write rows with gdistill-eval rows"
            where, got = f"{file}:{line}", short(values)
            expected = '{"tokens": [int, ...], "masked": [int, ...]}, the truth under the mask'
            raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
        rows.append(InfillRow(tuple(tokens), tuple(sorted(set(masked)))))  # type: ignore[arg-type]
    return rows


def rows_of_samples(rows: list[InfillRow], samples: SampleSet) -> list[InfillRow]:
    """The row that each sample filled: sample i fills row i modulo their number.

    Raises:
        GdistillError: For a sample that differs from its row where the row was given.
    """
    found = [rows[index % len(rows)] for index in samples.indices]
    for place, (row, tokens) in enumerate(zip(found, samples.tokens, strict=True)):
        given = set(range(len(row.tokens))) - set(row.masked)
        if len(tokens) != len(row.tokens) or any(tokens[i] != row.tokens[i] for i in given):
            what, where = ("a sample does not fill its row", f"{samples.source}:{samples.lines[place]}")
            got = f"{len(tokens)} tokens that differ where the row was given"
            expected = f"row {samples.indices[place] % len(rows)} of the file"
            remedy = "give the file that gdistill-sample --infill was given"
            raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
    return found


def exact_match(tokens: Sequence[Sequence[int]], rows: Sequence[InfillRow], indices: Sequence[int]) -> Score:
    """Share of filled positions that hold the true token.

    Args:
        tokens: The samples.
        rows: What each filled.
        indices: Sample indices.
    """
    hits = tuple(
        float(sum(ours[i] == row.tokens[i] for i in row.masked)) for ours, row in zip(tokens, rows, strict=True)
    )
    kept = PerSample(tuple(indices), hits, tuple(float(len(row.masked)) for row in rows))
    masked = range_text(len(row.masked) for row in rows)
    settings = {"masked": masked, "tokens_per_row": range_text(map(len, tokens))}
    return Score.of("infill_exact_match", kept, settings=settings)


def filled_perplexity(
    judging: Judging, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]], indices: Sequence[int]
) -> Score:
    """Perplexity of the judge's tokens that overlap the filled characters.

    Args:
        judging: Whose tokens they are; it needs a fast tokenizer.
        texts: The rows as text.
        spans: Filled characters of each text, as (start, end).
        indices: Sample indices.

    Raises:
        GdistillError: When no counted token overlaps a filled character.
    """
    judging.read(texts)
    kept: list[tuple[int, float, float]] = []
    for index, text, filled in zip(indices, texts, spans, strict=True):
        nats = [
            value
            for start, end, value in judging.spans(text)
            if value is not None and any(start < stop and begin < end for begin, stop in filled)
        ]
        if nats:
            kept.append((index, sum(nats), float(len(nats))))
    if not kept:
        raise GdistillError("no filled part has a token that counts", where=judging.judge.name)
    per_sample = PerSample(*zip(*kept, strict=True), is_exponential=True)
    limits = asdict(judging.limits)
    settings = {**judging.judge.identity, **limits, "counted": "tokens over the filled characters"}
    details = {"num_tokens": int(sum(per_sample.denominators))}
    return Score.of("infill_perplexity", per_sample, settings=settings, details=details)


def filled_spans(tokenizer: Any, tokens: Sequence[int], masked: Sequence[int], text: str) -> list[tuple[int, int]]:
    """Characters of the text that each filled position wrote.

    Args:
        tokenizer: The student's.
        tokens: A sample; its first token is no part of the text unless it decodes with it.
        masked: Filled positions.
        text: The sample's text.

    Raises:
        GdistillError: When the tokenizer does not give the text back.
    """
    first = next((n for n in (1, 0) if tokenizer.decode(tokens[n:]) == text), None)
    if first is None:
        what = "the tokenizer does not give the samples' text"
        got, remedy = tokenizer.decode(tokens[1:])[:40], "name the student's model folder"
        raise GdistillError(what, where="--tokenizer", got=got, expected=text[:40], remedy=remedy)

    def end(place: int) -> int:
        return len(tokenizer.decode(tokens[first : place + 1]))

    return [(end(place - 1), end(place)) for place in masked]


def rows(
    data: Annotated[Path, typer.Argument(help="Store or tokens/ folder of gdistill-extract.")],
    out: Annotated[Path, typer.Option(help="File for gdistill-sample --infill.")] = Path("infill.jsonl"),
    num: Annotated[int, typer.Option(min=1, help="Rows.")] = 300,
    masked: Annotated[int, typer.Option(help="Positions masked in each, uniformly.")] = 32,
    split: Annotated[str, typer.Option(help="Split of the data.")] = "validation",
    seed: Annotated[int, typer.Option(min=0, help="Of the positions.")] = 0,
) -> None:
    """Write rows to fill: 300 of the validation split with 32 positions masked, as in the paper."""
    require_writable(out.parent)
    made = make_infill_rows(read_data_rows(data, split, num), num, masked, seed)
    lines = (json.dumps({"tokens": row.tokens, "masked": row.masked}) + "\n" for row in made)
    write_bytes_atomic(out, "".join(lines).encode())
    typer.echo(f"wrote {len(made)} rows to {out}; fill them with gdistill-sample --infill {out}")
