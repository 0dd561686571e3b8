"""The report: what a table says in each form, no code in it, samples and figures."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rcParams
from matplotlib.image import imread

from evaluation.figures import figure_file, look
from evaluation.report import MAX_COLUMNS, MAX_ROWS, ShownSample, Table, write_report, write_scores
from evaluation.samples import SampleSet
from evaluation.score import Score
from evaluation.text.reading import JudgedText, JudgeModel, Judging
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
    assert Table("", ("a",), (("x\ny",),)).to_markdown().endswith("| x y |")
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
        for nfe, indices in ((4, (1, 2)), (8, (2, 8)))
    }
    rows = [shown(part) for part in page_of(tmp_path, columns).split("<details")[1:]]
    assert [re.findall(r"\d-\d\.", row) for row in rows] == [["4-1."], ["4-2.", "8-2."], ["8-8."]]
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


def test_spans_follow_each_other_where_tokens_share_a_character(judge: JudgeModel) -> None:
    class Bytes:
        """Of the second of three tokens no character begins."""

        is_fast = True

        def __call__(self, text: str, **_: object) -> dict[str, list[tuple[int, int]]]:
            return {"offset_mapping": [(0, 1), (0, 0), (1, 2)]}

    tokenizer: Any = Bytes()
    judging = Judging.of(replace(judge, tokenizer=tokenizer))
    judging.memory.add("éa", JudgedText((5, 6, 7), (1.0, 2.0, 3.0), (True, True, True)))
    assert judging.spans("éa") == [(0, 1, 1.0), (1, 1, 2.0), (1, 2, 3.0)]
    assert judging.pieces("éa") == [("é", 1.0), ("a", 3.0)]
    tokenizer.is_fast = False  # one that does not say where its tokens end
    assert (judging.spans("éa"), judging.pieces("éa")) == ([], [("éa", None)])


def test_numbers_and_settings_are_short_and_say_whose_they_are(tmp_path: Path) -> None:
    """Files that differ are named; the one sample without a text is not shown."""

    def scored(name: str, value: float, digest: str) -> tuple[SampleSet, list[Score]]:
        samples = SampleSet(name, [[1, 2]], [None], [0], [None], [1], 0, {}, {}, Path(name), None, 0.25)
        settings = {"judge_sha256": digest, "share": 0.125}
        floor = {"floor": 0, "floor_interval_95": [0, 1], "floor_samples": 3, "least_samples": 4}
        against = Score("far", value, 1, None, {"reference": "r"}, floor)
        return samples, [Score("x", value, 1, (-value, value), settings), against]

    write_scores(tmp_path, "", [scored("a", 12.34, "ab" * 32), scored("b", 12345.6, "cd" * 32)], None)
    text = (tmp_path / "tables.md").read_text()
    assert "| a | 1 | - | 0.25 | 12.3 [-12.3, 12.3] |\n| b | 1 | - | 0.25 | 12346 [-12346, 12346] |" in text
    assert "x of a: judge_sha256 abababababab, share 0.125\n" in text and "x of b: judge_sha256 cdcdcd" in text
    assert re.findall("### (.*)", text) == ["Scores", "Against the text", "How the samples were drawn"]
    assert "| a | far | 12.3 | 12.3, 12.3 | 0 | 0, 1 | 1 | 3 | 4 | no |" in text
    assert "far: reference r\n" in text and "| samples | nfe |\n|---|---:|\n| a | - |" in text
    assert "<details" not in (tmp_path / "report.html").read_text()


# The look that all figures share.


def test_series_look_different_and_a_figure_is_written_whole_or_not(tmp_path: Path) -> None:
    """Its style stays inside."""
    assert len({tuple(sorted(look(number).items())) for number in range(32)}) == 32
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
