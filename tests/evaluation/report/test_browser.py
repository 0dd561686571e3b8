"""Samples on the page: every character is there, shades mean nats, and a real browser agrees."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from evaluation.report import MAX_ROWS, ShownSample, Table, browser_section, write_report
from evaluation.text.reading import load_judge, read_texts, reading_limits, surprise_pieces

EVIL = '</div><script>document.title="owned"</script>'


def shown(text: str) -> str:
    """A fragment's text as a reader sees it."""
    return html.unescape(re.sub(r"<[^>]*>", "", text))


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


@pytest.fixture(scope="module")
def chromium() -> str:
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    return found or pytest.skip("no Chromium is installed")


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


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


@pytest.mark.parametrize(("width", "is_dark"), [(360, True), (1200, False)])
def test_a_browser_shows_it_at_any_width_and_in_the_dark(
    tmp_path: Path, chromium: str, width: int, is_dark: bool
) -> None:
    cell = "a rather long cell that never wraps " * 3
    table = Table("Wide", ("x", *map(str, range(8))), ((EVIL, *([cell] * 8)),))
    sample = ShownSample(EVIL, [("word " * 40, 2.0), ("w" * 300, 9.0), (EVIL, None)])
    page = write_report(
        tmp_path,
        title="Scores",
        summary="s",
        tables=[table],
        figures=[],
        results={},
        sections=[browser_section({"one": {0: sample, 1: sample}, "two": {0: sample}})],
    )
    scroll, client, background, colour, title, num_open, num_scripts = inspect(
        chromium, page, width, is_dark
    )
    assert int(scroll) <= int(client) <= width  # nothing sticks out to the side
    assert (brightness(background) < 60) == is_dark
    assert abs(brightness(background) - brightness(colour)) > 120
    assert (title, num_open, num_scripts) == ("Scores", "2", "0")
