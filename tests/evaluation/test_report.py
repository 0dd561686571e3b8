"""The report: what a table says in each form, no code in it, samples, figures, comparisons."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from evaluation.compare import compare_scores, read_run, require_one_kind
from evaluation.figures import PALETTE, figure_file, look
from evaluation.report import MAX_ROWS, ShownSample, Table, browser_section, write_report
from evaluation.score import PerSample, Score
from evaluation.text.reading import JudgeModel, read_texts, reading_limits, surprise_pieces
from shards.errors import GdistillError, UsageError
from tests.evaluation.kit import Page, evaluate, results

EVIL = '</div><script>document.title="owned"</script>'
TABLE = Table(
    "Numbers & names",
    ("model", "NFE 4", "NFE 8"),
    (("plain", "1.5", "2"), (EVIL, "a,b", "c|d")),
    kinds=("", "ours"),
    notes=("a note", f"note {EVIL}"),
)


def shown(text: str) -> str:
    """A fragment's text as a reader sees it."""
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def test_html_shows_every_cell_as_text() -> None:
    page = Page(TABLE.to_html())
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
    parts = {"tables": tables, "results": {"value": 1.5}, "sections": ["<p id='own'>own</p>"]}
    parts |= {"summary": f"Summary {EVIL}", "cautions": [f"Careful {EVIL}"]}
    parts |= {"figures": [(f"Caption {EVIL}", picture)]}
    text = write_report(tmp_path, title=f"Title {EVIL}", **parts).read_text()
    seen = Page(text)
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
    assert shades[-4:-2] == [("s0", "0.20", "Once"), ("s3", "3.90", " upon")]
    assert shades[-2:] == [("s9", "25.00", " &lt;b&gt;&amp;"), ("none", "", " rest")]
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


def test_pieces_join_to_the_text_and_carry_the_judges_nats(judge: JudgeModel) -> None:
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
def test_a_browser_shows_it_at_any_width_and_in_the_dark(tmp_path: Path, width: int, is_dark: bool) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if chromium is None:
        pytest.skip("no Chromium is installed")
    cell = "a rather long cell that never wraps " * 3
    table = Table("Wide", ("x", *map(str, range(8))), ((EVIL, *([cell] * 8)),))
    sample = ShownSample(EVIL, [("word " * 40, 2.0), ("w" * 300, 9.0), (EVIL, None)])
    section = browser_section({"one": {0: sample, 1: sample}, "two": {0: sample}})
    parts = {"summary": "s", "tables": [table], "results": {}, "sections": [section]}
    page = write_report(tmp_path, title="Scores", **parts)
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


# ``gdistill-eval compare``: hand-worked differences, what pairing buys, what is refused.

JUDGE = {"judge": "tiny", "judge_sha256": "ab" * 32, "stride_tokens": 8, "max_tokens": 64}


def run(*words: object) -> str:
    return evaluate("compare", *words)


def recorded(values: Sequence[float], indices: Sequence[int] | None = None) -> Score:
    kept = PerSample.of_mean(indices or range(len(values)), values)
    return Score("x", kept.value(), len(values), per_sample=kept)


def perplexity(nats: Sequence[float], **settings: Any) -> Score:
    kept = PerSample(tuple(range(len(nats))), tuple(nats), (2.0,) * len(nats), True)
    name = "generative_perplexity"
    return Score(name, kept.value(), len(nats), kept.interval(), JUDGE | settings, {}, (), kept)


def write_run(folder: Path, nats: Sequence[float], seed: int = 0, **settings: Any) -> Path:
    """As ``gdistill-eval`` leaves it."""
    folder.mkdir(parents=True)
    mauve = Score("mauve", 0.5, len(nats), settings={"seeds": [25]})
    part: dict[str, Any] = {"name": "samples", "nfe_mean": 4.0, "drawn_with": {"seed": seed}}
    part["code_version"] = "0.1.0"
    part["scores"] = [perplexity(nats, **settings).to_json(), mauve.to_json()]
    (folder / "results.json").write_text(json.dumps({"samples.jsonl": part}))
    return folder


def test_differences_and_changes_by_hand(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", [2 * math.log(100)] * 5)
    better = write_run(tmp_path / "w1", [2 * math.log(80)] * 5)
    out = tmp_path / "out"
    text = run(plain, better, "--out", out)
    assert "-20.0%" in text and "baseline" in text
    told = results(out)["runs"]["w1"]["scores"]
    score = told["generative_perplexity"]
    assert score["difference"] == pytest.approx(-20.0)
    assert score["difference_interval_95"] == pytest.approx([-20.0, -20.0])
    assert score["change_percent"] == pytest.approx(-20.0) and score["num_pairs"] == 5
    assert told["mauve"]["difference"] == 0 and told["mauve"]["difference_interval_95"] is None
    (header, first, second) = csv.reader((out / "comparison.csv").read_text().splitlines())
    assert header[0] == "run" and first[0] == "plain" and "-20.0%" in second
    assert "| w1 |" in (out / "tables.md").read_text()
    assert "+25.0%" in run(plain, better, "--baseline", "w1", "--out", out)


def test_a_pair_shares_its_luck() -> None:
    """What both runs share cancels in pairs: the interval shrinks from 2.8 to 0.14 noise units."""
    generator = np.random.default_rng(0)
    shared = generator.normal(0, 1.0, 200)
    ours = recorded((shared + generator.normal(0.1, 0.05, 200)).tolist())
    theirs = recorded((shared + generator.normal(0, 0.05, 200)).tolist())
    paired = compare_scores(ours, theirs, is_paired=True)
    alone = compare_scores(ours, theirs, is_paired=False)
    assert paired.interval is not None and alone.interval is not None
    width = (paired.interval[1] - paired.interval[0]) / (alone.interval[1] - alone.interval[0])
    assert width == pytest.approx(0.05, rel=0.3)
    assert paired.is_clear and not alone.is_clear
    assert (paired.num_pairs, alone.num_pairs) == (200, 0)


def test_pairs_are_found_by_index_not_by_place() -> None:
    ours = recorded([1.0, 2.0, 3.0], [2, 0, 1])
    theirs = recorded([2.0, 3.0, 1.0], [0, 1, 2])
    compared = compare_scores(ours, theirs, is_paired=True)
    assert compared.difference == 0 and compared.interval == (0.0, 0.0)
    fewer = compare_scores(ours, recorded([2.0, 3.0], [0, 1]), is_paired=True)
    assert fewer.num_pairs == 0  # not all have a partner: resampled each on its own


def test_other_seeds_are_never_paired(tmp_path: Path) -> None:
    nats = [1.0, 2.0, 3.0, 4.0]
    one, two = write_run(tmp_path / "one", nats), write_run(tmp_path / "two", nats, seed=1)
    run(one, two, "--out", tmp_path / "out")
    score = results(tmp_path / "out")["runs"]["two"]["scores"]["generative_perplexity"]
    assert score["num_pairs"] == 0
    low, high = score["difference_interval_95"]
    assert low < 0 < high


def test_numbers_measured_differently_share_no_column(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [1.0, 2.0])
    changes = {"judge_sha256": "cd" * 32, "stride_tokens": 4, "max_tokens": 32, "judge": "other"}
    for field, value in changes.items():
        other = write_run(tmp_path / field, [1.0, 2.0], **{field: value})
        said = rf"measured differently \[{field}: {field}\]; got .* as in one"
        with pytest.raises(UsageError, match=said):
            run(one, other, "--out", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert "mauve" in run(one, other, "--scores", "mauve", "--out", tmp_path / "fine")
    decisive = {"entropy_nats": "tokens_per_sample", "mauve": "num_references"}
    for name, field in (decisive | {"total_variation_to_uniform": "uniform over"}).items():
        runs = [
            replace(read_run(str(one))[0], scores={name: Score(name, 1.0, 2, settings={field: n})}) for n in (8, 16)
        ]
        with pytest.raises(UsageError, match=f"{name} was measured differently .*{field}"):
            require_one_kind(name, runs)


def test_what_cannot_be_compared_is_one_line(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [1.0, 2.0])
    for words, said in (
        ((one,), "one run cannot be compared"),
        ((one, one), "runs of one name"),
        ((one, tmp_path), r"no scores there.*run gdistill-eval"),
        ((one, f"two={one}", "--baseline", "three"), "no such run"),
        ((one, f"two={one}", "--scores", "nothing"), r"not every run has this score.*--scores"),
    ):
        with pytest.raises(UsageError, match=said):
            run(*words)
    broken = write_run(tmp_path / "broken", [1.0, 2.0])
    text = (broken / "results.json").read_text()
    for change in (text.replace('"value": 0.5', '"value": null'), "[]", "{", '{"a": {}}'):
        (broken / "results.json").write_text(change)
        with pytest.raises(GdistillError, match=r"scores cannot be read|no scores there"):
            run(one, broken)


def test_budgets_stand_in_their_order_and_are_compared_with_their_own(tmp_path: Path) -> None:
    """``nfe16`` comes before ``nfe4`` in a file of sorted keys, not in a table."""
    for name in "ab":
        part = results(write_run(tmp_path / name, [3.0, 4.0]))["samples.jsonl"]
        budgets = {}
        for n in (16, 4):
            scores = [perplexity([3.0 / n, 4.0 / n]).to_json()]
            budgets[f"nfe{n}.jsonl"] = part | {"name": f"nfe{n}", "nfe_mean": n, "scores": scores}
        (tmp_path / name / "results.json").write_text(json.dumps(budgets, sort_keys=True))
        assert [part.nfe for part in read_run(str(tmp_path / name))] == [4, 16]
    run(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out")
    for budget in ("b/nfe4", "b/nfe16"):
        score = results(tmp_path / "out")["runs"][budget]["scores"]["generative_perplexity"]
        assert score["difference"] == 0.0
