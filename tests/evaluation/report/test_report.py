"""The report writer: what a table says in each form, and that nothing in it is code."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evaluation.report import Table, write_report
from shards.atomic import require_writable
from shards.errors import UsageError

EVIL = '<script>alert("x")</script>'
TABLE = Table(
    "Numbers & names",
    ("model", "NFE 4", "NFE 8"),
    (("plain", "1.5", "2"), (EVIL, "a,b", "c|d")),
    kinds=("", "ours"),
    notes=("a note", f"note {EVIL}"),
)


class Cells(HTMLParser):
    """Rows of a page's tables as a browser sees them, and every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and getattr(self, "inside", False):
            self.rows[-1][-1] += data


def test_html_shows_every_cell_as_text() -> None:
    page = Cells(TABLE.to_html())
    assert page.rows == [list(TABLE.header), *map(list, TABLE.rows)]
    assert not [tag for tag, _ in page.tags if tag == "script"]
    kinds = [attrs.get("class") for tag, attrs in page.tags if tag == "tr"]
    assert kinds == [None, "", "ours"]


def test_markdown_has_a_rule_and_one_cell_per_column() -> None:
    lines = TABLE.to_markdown().splitlines()
    assert lines[0] == "| model | NFE 4 | NFE 8 |"
    assert re.fullmatch(r"\|-+\|-+:\|-+:\|", lines[1])
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert {len(row) for row in cells} == {3}
    assert lines[3].endswith(r"c\|d |")


def test_plain_text_aligns_its_columns() -> None:
    lines = TABLE.to_text().splitlines()
    ends = {line.index(word) + len(word) for line, word in zip(lines[2:], ("NFE 4",), strict=False)}
    (row,) = (line for line in lines if line.startswith("plain"))
    assert row.index("1.5") + 3 in ends
    assert lines[-2:] == list(TABLE.notes)


def test_csv_round_trips_what_it_quotes() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.to_csv())))
    assert rows == [list(TABLE.header), *map(list, TABLE.rows)]


def test_the_page_stands_alone(tmp_path: Path) -> None:
    picture = tmp_path / "figure.png"
    picture.write_bytes(b"\x89PNG....")
    page = write_report(
        tmp_path,
        title=f"Title {EVIL}",
        summary=f"Summary {EVIL}",
        tables=[TABLE],
        figures=[(f"Caption {EVIL}", picture)],
        results={"value": 1.5},
        cautions=[f"Careful {EVIL}"],
        sections=["<p id='own'>own</p>"],
    )
    text = page.read_text()
    seen = Cells(text)
    links = [a.get("src") or a.get("href") for _, a in seen.tags if "src" in a or "href" in a]
    assert links and all(link.startswith("data:") for link in links)
    assert "script" not in {tag for tag, _ in seen.tags} and "url(" not in text
    assert "<script" not in text and text.count("Caption &lt;script&gt;") == 2
    assert (
        text.index("Careful") < text.index("<table") < text.index("data:image") < text.index("own")
    )
    assert json.loads((tmp_path / "results.json").read_text()) == {"value": 1.5}
    assert (tmp_path / "tables.md").read_text().startswith("### Numbers & names\n\n| model |")


def test_a_figure_stands_behind_the_first_of_all_tables(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"png")
    tables = [Table(f"table {number}", ("name", "x"), (("row", "1"),)) for number in range(3)]
    page = write_report(
        tmp_path, title="T", summary="", tables=tables, results={}, figures=[("figure", picture)]
    )
    order = re.findall(r"<h2>(.*?)</h2>", page.read_text())
    assert order == ["table 0", "figure", "table 1", "table 2"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for taken in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot write there"):
            require_writable(taken)
    require_writable(tmp_path / "new" / "one")
