"""Samples to look at: a row per sample index, files side by side, tokens coloured by surprise."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_ROWS = 24
MAX_COLUMNS = 8
LEVELS = 10
"""A shade per nat; the last one is for more."""

PICTURE_STYLE = "".join(
    [
        "div.row{display:grid;gap:1rem;margin:.5rem 0 1.5rem;"
        "grid-template-columns:repeat(auto-fit,minmax(min(15rem,100%),1fr))}",
        "div.sample{border:1px solid var(--line);border-radius:.4rem;padding:.6rem .8rem;"
        "overflow-wrap:anywhere;white-space:pre-wrap}",
        "div.sample b{display:block;color:var(--quiet);font-weight:500;font-size:.85em}",
        "summary{cursor:pointer;font-weight:600}i{font-style:normal;border-radius:2px}",
        "i.none{opacity:.55}",
        *(f"i.s{n}{{background:rgba(var(--hot),{0.07 * n:.2f})}}" for n in range(LEVELS)),
    ]
)


@dataclass(frozen=True)
class ShownSample:
    """One sample of one file.

    Attributes:
        facts: What stands above it (perplexity, entropy).
        pieces: Its text in pieces, each with nats or None; see ``evaluation.text``.
    """

    facts: str
    pieces: Sequence[tuple[str, float | None]]


def browser_section(columns: Mapping[str, Mapping[int, ShownSample]]) -> str:
    """HTML of the first samples of every file, files of one index beside each other.

    Args:
        columns: File name -> sample index -> sample; at most 8 files and 24 indices are shown.
    """
    shown = dict(list(columns.items())[:MAX_COLUMNS])
    indices = sorted({index for samples in shown.values() for index in samples})[:MAX_ROWS]
    rows = "".join(_row(index, shown, is_open=number < 2) for number, index in enumerate(indices))
    coloured = any(
        value is not None
        for samples in shown.values()
        for sample in samples.values()
        for _, value in sample.pieces
    )
    legend = "".join(
        f'<i class="s{n}"> {n}{"+" if n == LEVELS - 1 else ""} </i>' for n in range(LEVELS)
    )
    told = f"<p>Surprise under the judge, nats per token: {legend}</p>" if coloured else ""
    left = len(columns) - len(shown)
    more = f'<p class="note">{left} further files are not shown.</p>' if left else ""
    return f"<style>{PICTURE_STYLE}</style><h2>Samples</h2>{told}{rows}{more}"


def _row(index: int, columns: Mapping[str, Mapping[int, ShownSample]], *, is_open: bool) -> str:
    cells = "".join(
        f'<div class="sample"><b>{html.escape(name)}: {html.escape(samples[index].facts)}</b>'
        f"{''.join(map(_piece, samples[index].pieces))}</div>"
        for name, samples in columns.items()
        if index in samples
    )
    state = " open" if is_open else ""
    return (
        f'<details{state}><summary>Sample {index}</summary><div class="row">{cells}</div></details>'
    )


def _piece(piece: tuple[str, float | None]) -> str:
    text, nats = piece
    escaped = html.escape(text.replace("\0", "\ufffd"))
    if nats is None:
        return f'<i class="none">{escaped}</i>'
    level = min(LEVELS - 1, max(0, int(nats)))
    return f'<i class="s{level}" title="{nats:.2f} nats">{escaped}</i>'
