"""A table of strings, as text, Markdown, CSV, LaTeX or HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

from shards.base import aligned

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
        header, *rows = aligned([self.header, *self.rows])
        rule = "-" * max(map(len, [header, *rows]))
        return "\n".join([self.title, rule, header, rule, *rows, rule, *self.notes])

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
        """Header and rows, quoted where needed (RFC 4180)."""
        text = io.StringIO()
        csv.writer(text).writerows([self.header, *self.rows])
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


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"
