"""What lies beside samples of strangers: readings, rows to fill, scores to compare, names."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.report import Table
from evaluation.text.reading import readings_folder
from shards.atomic import append_line
from shards.errors import UsageError, visible
from tests.commands import call
from tests.evaluation.samples.hostile_samples import ESCAPES, MARKUP, Stage, assert_inert


def test_a_planted_reading_is_not_believed(stage: Stage, cache: Path) -> None:
    """Whoever hands over samples can name and fill a file of readings as well as this program."""
    assert stage.run("score") == 0
    honest = (stage.samples / "results.json").read_bytes()
    (kept,) = cache.rglob("*.judged")
    name = kept.relative_to(cache)
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    better = [[key, ids, [0.01] * len(nll), flags] for key, ids, nll, flags in lines]
    text = "".join(json.dumps(line) + "\n" for line in better)
    shutil.rmtree(cache / "gdistill")
    for place in ("judged", "gdistill/judged", ".cache/gdistill/judged", str(name.parent)):
        (stage.samples / place).mkdir(parents=True, exist_ok=True)
        (stage.samples / place / kept.name).write_text(text)
    assert stage.run("score") == 0
    assert (stage.samples / "results.json").read_bytes() == honest
    kept.write_text(text)  # what this user has read is believed, or nothing would resume
    assert stage.run("score") == 0
    assert (stage.samples / "results.json").read_bytes() != honest


def test_readings_are_kept_where_programs_of_the_user_keep_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, other = readings_folder(tmp_path / "one"), readings_folder(tmp_path / "other")
    assert one != other and one.parent == other.parent == tmp_path / "cache/gdistill/judged"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert readings_folder(tmp_path / "one") == tmp_path / ".cache/gdistill/judged" / one.name


def test_what_was_read_is_not_written_through_a_link(
    stage: Stage, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stage.run("score") == 0
    (kept,) = cache.rglob("*.judged")
    kept.unlink()
    kept.symlink_to(stage.home / "precious/file")
    capsys.readouterr()
    stage.run("score")
    kept.unlink(missing_ok=True)
    os.mkfifo(kept)
    assert stage.run("score") == 1  # and does not wait for a reader
    assert "cannot keep what the judge has read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["[" * 10**5, '["k", [1], [NaN], "1"]', "[[], [1], [1.0], 1]", "3", '["k",[1],[1e99],"1"]'],
)
def test_odd_readings_are_read_again(stage: Stage, cache: Path, text: str) -> None:
    assert stage.run("score") == 0
    first = json.loads((stage.samples / "results.json").read_text())
    (kept,) = cache.rglob("*.judged")
    kept.write_text(text + "\n")
    assert stage.run("score") == 0
    assert json.loads((stage.samples / "results.json").read_text()) == first


def test_a_line_is_added_to_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "aim").write_text("kept\n")
    (tmp_path / "link").symlink_to(tmp_path / "aim")
    with pytest.raises(OSError, match=r"."):
        append_line(tmp_path / "link", "line")
    append_line(tmp_path / "new/file", "one")
    append_line(tmp_path / "new/file", "two")
    assert (tmp_path / "aim").read_text() == "kept\n"
    assert (tmp_path / "new/file").read_text() == "one\ntwo\n"


# The rows that were filled, and what gdistill-eval wrote of others' samples.

ROWS = {
    "no truth": {"masked": [1]},
    "no places": {"tokens": [0, 1]},
    "a place outside": {"tokens": [0, 1], "masked": [2]},
    "the first place": {"tokens": [0, 1], "masked": [0]},
    "places of text": {"tokens": [0, 1], "masked": "1"},
    "tokens beyond 64 bits": {"tokens": [0, 10**30], "masked": [1]},
    "tokens of 40 bits": {"tokens": [0, 2**40], "masked": [1]},
    "another row": {"tokens": [9, 9, 9, 9, 9, 9], "masked": [1]},
    "a longer row": {"tokens": [0] * 9, "masked": [1]},
}


@pytest.mark.parametrize("name", ROWS)
def test_odd_rows_to_fill(name: str, stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    (stage.home / "rows.jsonl").write_text(json.dumps(ROWS[name]) + "\n")
    assert stage.run("infill") in (1, 2)
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1


def part(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: next(iter(found.values())).update(changes)


def score(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: next(iter(found.values()))["scores"][0].update(changes)


def entries(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda found: next(iter(found.values()))["scores"][0]["per_sample"].update(changes)


RESULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda found: found.clear(),
    "a run of text": lambda found: found.update(x="y"),
    "no scores": part(scores=None),
    "scores of text": part(scores=["x"]),
    "a name of a list": part(name=[]),
    "passes of text": part(nfe_mean="3"),
    "passes of truth": part(nfe_mean=True),
    "drawn with text": part(drawn_with="x"),
    "a version of a list": part(code_version=[]),
    "a score's name of a list": score(name=[]),
    "a value of text": score(value="0.5"),
    "a value of null": score(value=None),
    "a value of truth": score(value=True),
    "an interval of one": score(interval_95=[1.0]),
    "an interval of text": score(interval_95="ab"),
    "an interval of null": score(interval_95=[None, None]),
    "settings of text": score(settings="x"),
    "entries of text": score(per_sample="x"),
    "entries of unequal length": entries(indices=[0]),
    "no entries": entries(indices=[], numerators=[], denominators=[]),
    "an index twice": entries(indices=[0, 0]),
    "an index of text": entries(indices=["0", "1"]),
    "an index that cannot be hashed": entries(indices=[[0], [1]]),
    "entries of NaN": entries(numerators=[float("nan"), 1.0]),
    "entries beyond 64 bits": entries(numerators=[10**30, 1]),
    "denominators of 0": entries(denominators=[0, 0]),
    "denominators below 0": entries(denominators=[-1, 3]),
}


def compare(stage: Stage, *words: object) -> int:
    return call("gdistill-eval", "compare", stage.sound, stage.samples, *words)


@pytest.fixture
def scored(stage: Stage) -> Stage:
    assert stage.run("infill") == 0
    shutil.copy(stage.samples / "results.json", stage.sound / "results.json")
    return stage


@pytest.mark.parametrize("name", RESULTS)
def test_odd_scores_are_not_compared(
    name: str, scored: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    file = scored.samples / "results.json"
    found = json.loads(file.read_text())
    assert compare(scored, "--out", scored.home / "sound-out") == 0
    RESULTS[name](found)
    file.write_text(json.dumps(found))
    capsys.readouterr()
    assert compare(scored, "--out", scored.home / "out") in (1, 2)
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1, told
    assert not (scored.home / "out").exists()


def test_names_in_scores_stay_text(scored: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (scored.samples, scored.sound):
        found = json.loads((folder / "results.json").read_text())
        own = next(iter(found.values()))
        own.update(name=MARKUP + ESCAPES, code_version=MARKUP)
        own["scores"][0].update(name="=HYPERLINK()" + MARKUP + ESCAPES)
        (folder / "results.json").write_text(json.dumps(found))
    assert compare(scored, "--out", scored.home / "out") == 0
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", capsys.readouterr().out)
    assert_inert((scored.home / "out/report.html").read_text())
    assert "<script" not in (scored.home / "out/tables.md").read_text()
    cells = (scored.home / "out/comparison.csv").read_text().splitlines()[0].split(",")
    assert not any(cell.strip('"').startswith("=") for cell in cells)


def test_a_cell_is_a_formula_or_a_number() -> None:
    cells = ("=1", "@x", "+cmd", "-cmd", "-0.5", "+.5", "-", "x=1", "\t=1")
    table = Table("t", cells, ())
    assert table.to_csv().strip() == r"'=1,'@x,'+cmd,'-cmd,-0.5,+.5,-,x=1,'\t=1"


def test_every_character_that_steers_is_spelt_out() -> None:
    assert visible("ä b 中") == "ä b 中"
    assert visible("\x1b[2J\n\u202e\udcff\x9b") == r"\x1b[2J\n\u202e\udcff\x9b"
    error = UsageError("what", where=ESCAPES, got=ESCAPES)
    assert str(error).isprintable()
