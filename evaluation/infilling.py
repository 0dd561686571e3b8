"""Infilling: is the filled part the truth, and how likely is it where it stands?

The judge reads the whole row, and its tokens that overlap the filled characters count: the
perplexity of the filled part in its context on the left. Beside it stand the perplexity of the
whole row and the share of positions that hold the very token that was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from evaluation.bootstrap import PerSample
from evaluation.samples.infill_rows import make_infill_rows, write_infill_rows
from evaluation.samples.samples import read_data_rows
from evaluation.score import Score, range_text
from evaluation.text.reading import JudgedText, JudgeModel, token_spans
from shards.errors import GdistillError


def exact_match(
    tokens: Sequence[Sequence[int]],
    truths: Sequence[Sequence[int]],
    masked: Sequence[Sequence[int]],
    indices: Sequence[int],
) -> Score:
    """Share of filled positions that hold the true token.

    Args:
        tokens: The samples.
        truths: The rows as they were.
        masked: The filled positions of each.
        indices: Sample indices.
    """
    hits = tuple(
        float(sum(ours[i] == true[i] for i in places))
        for ours, true, places in zip(tokens, truths, masked, strict=True)
    )
    kept = PerSample(tuple(indices), hits, tuple(float(len(places)) for places in masked))
    return Score(
        name="infill_exact_match",
        value=kept.value(),
        num_samples=len(hits),
        interval=kept.interval(),
        settings={
            "masked": range_text(map(len, masked)),
            "tokens_per_row": range_text(map(len, tokens)),
        },
        per_sample=kept,
    )


def filled_perplexity(
    judge: JudgeModel,
    texts: Sequence[str],
    readings: Sequence[JudgedText],
    spans: Sequence[Sequence[tuple[int, int]]],
    indices: Sequence[int],
    settings: dict[str, Any],
) -> Score:
    """Perplexity of the judge's tokens that overlap the filled characters.

    Args:
        judge: Whose tokens they are; it needs a fast tokenizer.
        texts: The rows as text.
        readings: What the judge made of them.
        spans: Filled characters of each text, as (start, end).
        indices: Sample indices.
        settings: Of the whole row's perplexity.

    Raises:
        GdistillError: When no counted token overlaps a filled character.
    """
    kept: list[tuple[int, float, float]] = []
    for index, text, reading, filled in zip(indices, texts, readings, spans, strict=True):
        nats = [
            value
            for start, end, value in token_spans(judge, text, reading)
            if value is not None and any(start < stop and begin < end for begin, stop in filled)
        ]
        if nats:
            kept.append((index, sum(nats), float(len(nats))))
    if not kept:
        raise GdistillError("no filled part has a token that counts", where=judge.name)
    per_sample = PerSample(
        tuple(index for index, _, _ in kept),
        tuple(total for _, total, _ in kept),
        tuple(count for _, _, count in kept),
        is_exponential=True,
    )
    return Score(
        name="infill_perplexity",
        value=per_sample.value(),
        num_samples=len(kept),
        interval=per_sample.interval(),
        settings={**settings, "counted": "tokens over the filled characters"},
        details={"num_tokens": int(sum(per_sample.denominators))},
        per_sample=per_sample,
    )


def filled_spans(
    tokenizer: Any, tokens: Sequence[int], masked: Sequence[int], text: str
) -> list[tuple[int, int]]:
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
        raise GdistillError(
            "the tokenizer does not give the samples' text",
            where="--tokenizer",
            got=tokenizer.decode(tokens[1:])[:40],
            expected=text[:40],
            remedy="name the student's model folder",
        )
    ends = {
        place: len(tokenizer.decode(tokens[first : place + 1]))
        for p in masked
        for place in (p - 1, p)
    }
    return [(ends[place - 1], ends[place]) for place in masked]


# ``gdistill-eval rows``: rows of real text with open positions, to be filled and scored.


def rows(
    data: Annotated[Path, typer.Argument(help="Store or tokens/ folder of gdistill-extract.")],
    out: Annotated[Path, typer.Option(help="File for gdistill-sample --infill.")] = Path(
        "infill.jsonl"
    ),
    num: Annotated[int, typer.Option(help="Rows.")] = 300,
    masked: Annotated[int, typer.Option(help="Positions masked in each, uniformly.")] = 32,
    split: Annotated[str, typer.Option(help="Split of the data.")] = "validation",
    seed: Annotated[int, typer.Option(help="Of the positions.")] = 0,
) -> None:
    """Write rows to fill: 300 of the validation split with 32 positions masked, as in the paper."""
    made = make_infill_rows(read_data_rows(data, split, num), num, masked, seed)
    write_infill_rows(made, out)
    typer.echo(f"wrote {len(made)} rows to {out}; fill them with gdistill-sample --infill {out}")
