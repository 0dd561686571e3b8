"""Rows with open positions and the truth that stood there: for ``gdistill-sample --infill``.

One JSON object a line: ``{"tokens": [...], "masked": [...]}``; under the mask stands the truth.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluation.samples.samples import DataRows, SampleSet, read_records, short
from shards.atomic import write_bytes_atomic
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
        raise UsageError(
            "the data do not hold such rows",
            where="--num, --masked",
            got=f"{num} rows, {num_masked} masked",
            expected=f"at most {len(data.rows)} rows, 1..{length - 1} masked",
        )
    generator = np.random.default_rng(seed)
    return [
        InfillRow(
            tuple(row.tolist()),
            tuple(sorted((1 + generator.permutation(length - 1)[:num_masked]).tolist())),
        )
        for row in data.rows[:num]
    ]


def write_infill_rows(rows: list[InfillRow], file: Path) -> None:
    """Write rows as ``gdistill-sample --infill`` reads them."""
    lines = [json.dumps({"tokens": row.tokens, "masked": row.masked}) for row in rows]
    write_bytes_atomic(file, ("\n".join(lines) + "\n").encode())


def read_infill_rows(file: Path) -> list[InfillRow]:
    """Rows with their truth; any pattern of masks.

    Raises:
        UsageError: When the file cannot be read.
        GdistillError: For a line without truth or positions, naming it.
    """
    return [_row(values, f"{file}:{line}") for line, values in read_records(file, "infill row")]


def _row(values: dict, where: str) -> InfillRow:
    tokens, masked = values.get("tokens"), values.get("masked")
    fine = (
        isinstance(tokens, list)
        and isinstance(masked, list)
        and bool(masked)
        and all(type(token) is int and 0 <= token < 2**31 for token in tokens)
        and all(type(place) is int and 0 < place < len(tokens) for place in masked)
    )
    if not fine:
        raise GdistillError(
            "an infill row without its truth",
            where=where,
            got=short(values),
            expected='{"tokens": [int, ...], "masked": [int, ...]}, the truth under the mask',
            remedy="write rows with gdistill-eval rows",
        )
    return InfillRow(tuple(tokens), tuple(sorted(set(masked))))  # type: ignore[arg-type]


def rows_of_samples(rows: list[InfillRow], samples: SampleSet) -> list[InfillRow]:
    """The row that each sample filled: sample i fills row i modulo their number.

    Raises:
        GdistillError: For a sample that differs from its row where the row was given.
    """
    found = []
    for index, tokens, line in zip(samples.indices, samples.tokens, samples.lines, strict=True):
        row = rows[index % len(rows)]
        given = set(range(len(row.tokens))) - set(row.masked)
        same = len(tokens) == len(row.tokens) and all(tokens[i] == row.tokens[i] for i in given)
        if not same:
            raise GdistillError(
                "a sample does not fill its row",
                where=f"{samples.source}:{line}",
                got=f"{len(tokens)} tokens that differ where the row was given",
                expected=f"row {index % len(rows)} of the file",
                remedy="give the file that gdistill-sample --infill was given",
            )
        found.append(row)
    return found
