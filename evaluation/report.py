"""Results for machines (results.json) and for people (tables, one self-contained HTML page)."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.base import UsageError, write_bytes_atomic, write_json_atomic

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.3rem .7rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}
tr.ours td{background:#eef5fb}tr.paper td{color:#777}
img{max-width:100%}p.note{color:#555;max-width:48rem}
"""


@dataclass(frozen=True)
class Table:
    """A table of strings: ``rows[i][0]`` names the row; ``kinds[i]`` is "", "ours" or "paper"."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        """The table as GitHub markdown, right-aligned but for the first column."""
        lines = [
            "| " + " | ".join(self.header) + " |",
            "|---" + "|---:" * (len(self.header) - 1) + "|",
            *("| " + " | ".join(row) + " |" for row in self.rows),
        ]
        return "\n".join(lines)

    def to_text(self) -> str:
        """The table in aligned plain text, for a terminal."""
        widths = [
            max(len(row[i]) for row in (self.header, *self.rows)) for i in range(len(self.header))
        ]

        def line(row: Sequence[str]) -> str:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            return "  ".join(cells).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        body = [self.title, rule, line(self.header), rule, *map(line, self.rows), rule]
        return "\n".join([*body, *self.notes])

    def to_html(self) -> str:
        """The table as an HTML fragment, escaped."""
        kinds = self.kinds or ("",) * len(self.rows)
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(
            f'<tr class="{kind}">' + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>"
            for row, kind in zip(self.rows, kinds, strict=True)
        )
        notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in self.notes)
        return f"<h2>{html.escape(self.title)}</h2><table><tr>{head}</tr>{body}</table>{notes}"


def open_folder(directory: Path) -> None:
    """Make sure that results can be written there, before the work that leads to them.

    Raises:
        UsageError: When it is no folder, or nothing can be written into it.
    """
    got = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        got = error.strerror or repr(error)
    if not got and not os.access(directory, os.W_OK):
        got = "no right to write"
    if got:
        raise UsageError(
            "cannot write the results there",
            where=directory,
            got=got,
            expected="a folder, or a name for one",
            remedy="give another --out",
        )


def write_report(
    directory: Path,
    *,
    title: str,
    summary: str,
    tables: Iterable[Table],
    figures: Iterable[tuple[str, Path]],
    results: dict[str, Any],
) -> Path:
    """Write ``results.json``, ``tables.md`` and ``report.html`` into ``directory``.

    Args:
        directory: Where to write.
        title: Heading of the page.
        summary: One paragraph in front.
        tables: Shown in order.
        figures: (caption, PNG file); embedded, so that the page stands alone.
        results: Every number, JSON-ready.
    """
    tables = list(tables)
    write_json_atomic(directory / "results.json", results)
    markdown = "\n\n".join(
        "\n\n".join([f"### {table.title}", table.to_markdown(), *table.notes]) for table in tables
    )
    write_bytes_atomic(directory / "tables.md", markdown.encode() + b"\n")
    images = "".join(
        f'<h2>{html.escape(caption)}</h2><img alt="{html.escape(caption)}" '
        f'src="data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}">'
        for caption, file in figures
    )
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1><p>{html.escape(summary)}</p>"
        + "".join(table.to_html() for table in tables)
        + images
    )
    write_bytes_atomic(directory / "report.html", page.encode())
    return directory / "report.html"
