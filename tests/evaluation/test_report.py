"""The report: what a table says in each form, no code in it, and samples to look at."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evaluation.report import MAX_ROWS, ShownSample, Table, browser_section, write_report
from evaluation.text.reading import load_judge, read_texts, reading_limits, surprise_pieces

EVIL = '</div><script>document.title="owned"</script>'
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


def shown(text: str) -> str:
    """A fragment's text as a reader sees it."""
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def test_html_shows_every_cell_as_text() -> None:
    page = Cells(TABLE.to_html())
    assert page.rows == [list(TABLE.header), *map(list, TABLE.rows)]
    assert not [tag for tag, _ in page.tags if tag == "script"]
    kinds = [attrs.get("class") for tag, attrs in page.tags if tag == "tr"]
    assert kinds == [None, "", "ours"]


def test_markdown_text_and_csv_hold_every_cell() -> None:
    lines = TABLE.to_markdown().splitlines()
    assert lines[0] == "| model | NFE 4 | NFE 8 |" and lines[3].endswith(r"c\|d |")
    assert re.fullmatch(r"\|-+\|-+:\|-+:\|", lines[1])
    assert {len(re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines} == {3}
    text = TABLE.to_text().splitlines()
    header, row = (next(line for line in text if line.startswith(w)) for w in ("model", "plain"))
    assert row.index("1.5") + 3 == header.index("NFE 4") + 5  # columns end together
    assert text[-2:] == list(TABLE.notes)
    rows = list(csv.reader(io.StringIO(TABLE.to_csv())))
    assert rows == [list(TABLE.header), *map(list, TABLE.rows)]


def test_the_page_stands_alone(tmp_path: Path) -> None:
    picture = tmp_path / "figure.png"
    picture.write_bytes(b"\x89PNG....")
    tables = [TABLE, *(Table(f"table {n}", ("name", "x"), (("row", "1"),)) for n in (1, 2))]
    page = write_report(
        tmp_path,
        title=f"Title {EVIL}",
        summary=f"Summary {EVIL}",
        tables=tables,
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
    assert "<script" not in text and text.count("Caption &lt;/div&gt;&lt;script&gt;") == 2
    order = ("Careful", "<table", "data:image", "table 1", "table 2", "own<")
    assert sorted(order, key=text.index) == list(order)
    assert json.loads((tmp_path / "results.json").read_text()) == {"value": 1.5}
    assert (tmp_path / "tables.md").read_text().startswith("### Numbers & names\n\n| model |")


def test_shades_are_nats_and_the_text_is_whole() -> None:
    pieces = [("Once", 0.2), (" upon", 3.9), (" <b>&", 25.0), (" rest", None)]
    section = browser_section({"nfe4": {7: ShownSample("NFE 4", pieces)}})
    assert "Once upon <b>& rest" in shown(section)
    shades = re.findall(r'<i class="(\w+)"(?: title="([\d.]+) nats")?>([^<]*)</i>', section)
    assert shades[-4:] == [
        ("s0", "0.20", "Once"),
        ("s3", "3.90", " upon"),
        ("s9", "25.00", " &lt;b&gt;&amp;"),
        ("none", "", " rest"),
    ]
    assert "Sample 7" in section and "Surprise under the judge" in section
    assert "Surprise" not in browser_section({"a": {0: ShownSample("", [("x", None)])}})


def test_files_stand_side_by_side_by_index() -> None:
    columns = {
        f"nfe{nfe}": {index: ShownSample("", [(f"{nfe}-{index}.", None)]) for index in indices}
        for nfe, indices in ((4, (0, 1)), (8, (1, 2)))
    }
    rows = [shown(part) for part in browser_section(columns).split("<details")[1:]]
    assert [re.findall(r"\d-\d\.", row) for row in rows] == [["4-0."], ["4-1.", "8-1."], ["8-2."]]
    many = {"a": {index: ShownSample("", [("x", None)]) for index in range(100)}}
    assert browser_section(many).count("<details") == MAX_ROWS


def test_pieces_join_to_the_text_and_carry_the_judges_nats(judge_folder: Path) -> None:
    judge = load_judge(str(judge_folder))
    text = "a  b <eos> a\nb"
    (reading,) = read_texts(judge, [text], reading_limits(judge, None, 5))
    pieces = surprise_pieces(judge, text, reading)
    assert "".join(piece for piece, _ in pieces) == text
    values = [value for _, value in pieces]
    assert values == [*reading.nll_nats[:2], None, reading.nll_nats[3], None]
    assert [piece.strip() for piece, _ in pieces] == ["a", "b", "<eos>", "a", "b"]


def inspect(chromium: str, page: Path, width: int, is_dark: bool) -> list[str]:
    """What a browser makes of the page in a frame of some width: widths, colours, title."""
    frame = page.with_name("frame.html")
    measured = (
        "const d=f.contentDocument,e=d.documentElement,s=f.contentWindow.getComputedStyle(d.body);"
        "document.title=[e.scrollWidth,e.clientWidth,s.backgroundColor,s.color,d.title,"
        "d.querySelectorAll('details[open]').length,d.querySelectorAll('script').length].join('|')"
    )
    frame.write_text(
        f'<meta charset="utf-8"><iframe id="f" width="{width}" height="800" style="border:0" '
        f'srcdoc="{html.escape(page.read_text())}" onload="{html.escape(measured)}"></iframe>'
    )
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={page.parent / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stdout[:300]
    return html.unescape(title.group(1)).split("|")


@pytest.mark.parametrize(("width", "is_dark"), [(360, True), (1200, False)])
def test_a_browser_shows_it_at_any_width_and_in_the_dark(
    tmp_path: Path, width: int, is_dark: bool
) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed")
    cell = "a rather long cell that never wraps " * 3
    table = Table("Wide", ("x", *map(str, range(8))), ((EVIL, *([cell] * 8)),))
    sample = ShownSample(EVIL, [("word " * 40, 2.0), ("w" * 300, 9.0), (EVIL, None)])
    section = browser_section({"one": {0: sample, 1: sample}, "two": {0: sample}})
    page = write_report(
        tmp_path, title="Scores", summary="s", tables=[table], results={}, sections=[section]
    )
    found = inspect(chromium, page, width, is_dark)
    scroll, client, background, colour, title, num_open, num_scripts = found
    assert int(scroll) <= int(client) <= width  # nothing sticks out to the side
    bright = [sum(map(float, re.findall(r"[\d.]+", c)[:3])) / 3 for c in (background, colour)]
    assert (bright[0] < 60) == is_dark and abs(bright[0] - bright[1]) > 120
    assert (title, num_open, num_scripts) == ("Scores", "2", "0")
