"""The report: what a table says in each form, no code in it, samples and figures."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from evaluation.figures import PALETTE, figure_file, look
from evaluation.report import MAX_COLUMNS, MAX_ROWS, ShownSample, Table, write_report
from evaluation.text.reading import JudgeModel, Judging
from tests.evaluation.kit import Page

EVIL = '</div><script>document.title="owned"</script>'
TABLE = Table(
    "Numbers & names",
    ("model", "NFE 4", "NFE 8"),
    (("plain", "1.5", "2"), (EVIL, "a,b", "c|d")),
    notes=("a note", f"note {EVIL}"),
)


def page_of(folder: Path, samples: dict[str, dict[int, ShownSample]]) -> str:
    """The page of some samples, from their heading on."""
    page = write_report(folder, title="t", summary="s", tables=[TABLE], results={}, samples=samples).read_text()
    return page.partition("<h2>Samples</h2>")[2]


def shown(text: str) -> str:
    """A fragment's text as a reader sees it."""
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def test_markdown_and_text_hold_every_cell() -> None:
    lines = TABLE.to_markdown().splitlines()
    assert lines[0] == "| model | NFE 4 | NFE 8 |" and lines[3].endswith(r"c\|d |")
    assert re.fullmatch(r"\|-+\|-+:\|-+:\|", lines[1])
    assert {len(re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines} == {3}
    text = TABLE.to_text().splitlines()
    header, row = (next(line for line in text if line.startswith(word)) for word in ("model", "plain"))
    assert row.index("1.5") + 3 == header.index("NFE 4") + 5  # columns end together
    assert text[-2:] == list(TABLE.notes)


def test_the_page_stands_alone(tmp_path: Path) -> None:
    picture = tmp_path / "figure.png"
    picture.write_bytes(b"\x89PNG....")
    tables = [TABLE, *(Table(f"table {n}", ("name", "x"), (("row", "1"),)) for n in (1, 2))]
    parts = {"tables": tables, "results": {"value": 1.5}, "samples": {EVIL: {0: ShownSample("own", [(EVIL, 1.0)])}}}
    parts |= {"summary": f"Summary {EVIL}", "cautions": [f"Careful {EVIL}"]}
    parts |= {"figures": [(f"Caption {EVIL}", picture)]}
    text = write_report(tmp_path, title=f"Title {EVIL}", **parts).read_text()
    seen = Page(text)
    assert seen.rows[:3] == [list(TABLE.header), *map(list, TABLE.rows)]
    links = [a.get("src") or a.get("href") for _, a in seen.tags if "src" in a or "href" in a]
    assert links and all(link.startswith("data:") for link in links)
    assert "script" not in {tag for tag, _ in seen.tags} and "url(" not in text
    assert "<script" not in text and text.count("Caption &lt;/div&gt;&lt;script&gt;") == 2
    order = ("Careful", "<table", "data:image", "table 1", "table 2", "own</b>")
    assert sorted(order, key=text.index) == list(order)
    assert json.loads((tmp_path / "results.json").read_text()) == {"value": 1.5}
    assert (tmp_path / "tables.md").read_text().startswith("### Numbers & names\n\n| model |")


def test_shades_are_nats_and_the_text_is_whole(tmp_path: Path) -> None:
    pieces = [("Once", 0.2), (" upon", 3.9), (" <b>&", 25.0), (" rest", None)]
    section = page_of(tmp_path, {"nfe4": {7: ShownSample("NFE 4", pieces)}})
    assert "Once upon <b>& rest" in shown(section)
    shades = re.findall(r'<i class="(\w+)"(?: title="([\d.]+) nats")?>([^<]*)</i>', section)
    assert shades[-4:-2] == [("s0", "0.20", "Once"), ("s3", "3.90", " upon")]
    assert shades[-2:] == [("s9", "25.00", " &lt;b&gt;&amp;"), ("none", "", " rest")]
    assert "Sample 7" in section and "Surprise under the judge" in section
    assert "Surprise" not in page_of(tmp_path, {"a": {0: ShownSample("", [("x", None)])}})


def test_files_stand_side_by_side_by_index(tmp_path: Path) -> None:
    columns = {
        f"nfe{nfe}": {index: ShownSample("", [(f"{nfe}-{index}.", None)]) for index in indices}
        for nfe, indices in ((4, (0, 1)), (8, (1, 2)))
    }
    rows = [shown(part) for part in page_of(tmp_path, columns).split("<details")[1:]]
    assert [re.findall(r"\d-\d\.", row) for row in rows] == [["4-0."], ["4-1.", "8-1."], ["8-2."]]
    one = ShownSample("", [("x", None)])
    many = {f"file {n}": dict.fromkeys(range(100), one) for n in range(MAX_COLUMNS + 2)}
    section = page_of(tmp_path, many)
    assert section.count("<details") == MAX_ROWS and "2 further files" in section


def test_pieces_join_to_the_text_and_carry_the_judges_nats(judge: JudgeModel) -> None:
    text = "a  b <eos> a\nb"
    judging = Judging.of(judge, max_tokens=5)
    (reading,) = judging.read([text])
    pieces = judging.pieces(text)
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
def test_a_browser_shows_it_at_any_width_and_in_the_dark(tmp_path: Path, width: int, is_dark: bool) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed")
    cell = "a rather long cell that never wraps " * 3
    table = Table("Wide", ("x", *map(str, range(8))), ((EVIL, *([cell] * 8)),))
    sample = ShownSample(EVIL, [("word " * 40, 2.0), ("w" * 300, 9.0), (EVIL, None)])
    samples = {"one": {0: sample, 1: sample}, "two": {0: sample}}
    page = write_report(tmp_path, title="Scores", summary="s", tables=[table], results={}, samples=samples)
    found = inspect(chromium, page, width, is_dark)
    scroll, client, background, colour, title, num_open, num_scripts = found
    assert int(scroll) <= int(client) <= width  # nothing sticks out to the side
    bright = [sum(map(float, re.findall(r"[\d.]+", c)[:3])) / 3 for c in (background, colour)]
    assert (bright[0] < 60) == is_dark and abs(bright[0] - bright[1]) > 120
    assert (title, num_open, num_scripts) == ("Scores", "2", "0")


# The look that all figures share.

# Machado, Oliveira & Fernandes 2009, severity 1: how linear RGB reaches an eye without one cone.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
}  # fmt: skip


def lab(colour: str, eye: list[list[float]]) -> np.ndarray:
    """CIELAB (D65) of an sRGB colour as that eye sees it."""
    srgb = np.array(to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(eye) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    ratio = np.array(to_xyz) @ seen / np.array([0.9505, 1.0, 1.089])
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", BLINDNESS.values(), ids=list(BLINDNESS))
def test_colour_blind_people_can_tell_the_first_colours_apart(eye: list[list[float]]) -> None:
    seen = [lab(colour, eye) for colour in PALETTE[:6]]
    nearest = min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i])
    assert nearest > 10  # red and green of equal lightness come to less than 5


def test_no_two_of_many_series_look_alike() -> None:
    looks = [tuple(sorted(look(number).items())) for number in range(32)]
    assert len(set(looks)) == 32


def test_a_figure_is_written_whole_or_not_and_its_style_stays_inside(tmp_path: Path) -> None:
    before = dict(rcParams)
    path = tmp_path / "new" / "figure.png"
    with figure_file(path, 1, 2, size=(4, 2), sharey=True) as (_, panels):
        for axes, values in zip(panels[0], ([1, 2], [3, 40]), strict=True):
            axes.plot(values)
    assert imread(path).shape[:2] == (300, 600)
    assert panels[0, 0].get_ylim() == panels[0, 1].get_ylim()
    assert dict(rcParams) == before
    with pytest.raises(ZeroDivisionError), figure_file(tmp_path / "failed.png"):
        _ = 1 / 0
    assert not (tmp_path / "failed.png").exists()
