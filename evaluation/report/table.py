"""A table of strings, as text, Markdown, CSV, LaTeX or HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shards.base import aligned, visible

FORMULA = re.compile(r"[=@\t\r]|[+-](?![0-9.]|$)")
"""What a spreadsheet would compute; a signed number and a dash are none."""
LATEX_ESCAPES = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


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

    def to_html(self) -> str:
        """The table as an HTML fragment, escaped."""
        kinds = self.kinds or ("",) * len(self.rows)
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(
            f'<tr class="{kind}">' + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>"
            for row, kind in zip(self.rows, kinds, strict=True)
        )
        notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in self.notes)
        # A wide table scrolls in its own box: the page itself never does, whatever the screen.
        return (
            f"<h2>{html.escape(self.title)}</h2>"
            f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>{notes}'
        )

    def to_csv(self) -> str:
        """Header and rows, quoted where needed (RFC 4180); no cell is a spreadsheet's formula."""
        text = io.StringIO()
        rows = [[_no_formula(cell) for cell in row] for row in (self.header, *self.rows)]
        csv.writer(text).writerows(rows)
        return text.getvalue()

    def to_latex(self) -> str:
        """A booktabs ``tabular``, escaped."""
        lines = [
            " & ".join(cell.translate(LATEX_ESCAPES) for cell in row) + r" \\" for row in self.rows
        ]
        head = " & ".join(cell.translate(LATEX_ESCAPES) for cell in self.header) + r" \\"
        return "\n".join(
            [
                rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}",
                r"\toprule",
                head,
                r"\midrule",
                *lines,
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )


def markdown_text(text: str) -> str:
    """Text that stays text: what looks like HTML in it is none."""
    return visible(text.replace("\n", " ")).replace("&", "&amp;").replace("<", "&lt;")


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(markdown_text(cell).replace("|", r"\|") for cell in cells) + " |"


def _no_formula(cell: str) -> str:
    return ("'" if FORMULA.match(cell) else "") + visible(cell)
