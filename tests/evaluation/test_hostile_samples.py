"""Samples that somebody made to do harm: every command says one line, or reads what stands there.

Nothing outside of their folder changes, nothing runs, and what is shown stays text.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from evaluation.report import Table
from evaluation.samples import MAX_LINE_BYTES, parse_json
from evaluation.text.reading import readings_folder
from shards.errors import UsageError, visible
from tests.commands import call
from tests.trainer.sampling.test_adaptive import tiny_llama

V, LENGTH = 11, 6
MARKUP = "<script>fired()</script><img src=x onerror=fired()>"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202eback"
DOORS = ("score", "infill", "certify")
Case = Callable[[Path], object]


def record(index: int = 0, **changes: Any) -> dict[str, Any]:
    """A sample as ``gdistill-sample`` writes it."""
    settings = {"sampler": "ancestral", "nfe": 3, "tau": 0.9, "redraw_noise": False}
    known = {"index": index, "tokens": [0, 1, 2, 3, 4, 5 + index], "text": "a b a b", "nfe": 3}
    return {**known, "seed": 7, "num_given": 1, "settings": settings, **changes}


SETTINGS: dict[str, Any] = {
    "student": "mdlm",
    "vocab_size": V,
    "precision": "fp32",
    "student_config": {"conditioning": "gumbel"},
    "identity": {"weights_sha256": "00", "codec": None},
    "store": {"tokenizer": "words", "tokens": {"fingerprint": "ab"}},
}


def write(folder: Path, *records: object, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    text = "".join(line + "\n" for line in lines)
    (folder / "samples.jsonl").write_text(text, encoding="utf-8")
    (folder / "settings.json").write_text(json.dumps(SETTINGS | settings))
    return folder


def contents(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder, links as links."""
    found: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file() and path.stat().st_size < MAX_LINE_BYTES:
            found[name] = path.read_bytes()
    return found


class Stage:
    """A folder of samples with something to protect beside it, and the commands that read it."""

    def __init__(self, home: Path, judge: Path, teacher: Path) -> None:
        self.home, self.judge, self.teacher = home, judge, teacher
        self.samples = write(home / "samples", record(0), record(1))
        self.sound = write(home / "sound", record(0), record(1))
        (home / "precious").mkdir()
        (home / "precious/file").write_text('{"torn": ')
        rows = [{"tokens": record(index)["tokens"], "masked": [1, 5]} for index in (0, 1)]
        (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def outside(self) -> dict[str, bytes | str]:
        mine = ("samples/", "out/")
        return {k: v for k, v in contents(self.home).items() if not k.startswith(mine)}

    def run(self, door: str) -> int:
        guarded = self.outside()
        words = {
            "score": [self.samples, "--judge", self.judge],
            "infill": [self.samples, "--infill", self.home / "rows.jsonl"],
            "certify": ["certify", self.samples, "--teacher", self.teacher],
        }
        try:
            return call("gdistill-eval", *words[door])
        finally:
            assert self.outside() == guarded
            assert not list(self.home.rglob("FIRED"))


def line(text: str) -> Case:
    """A second line that is this text."""
    return lambda folder: write(folder, record(0), text)


def changed(**fields: Any) -> Case:
    """A second sample with other fields."""
    return lambda folder: write(folder, record(0), record(1) | fields)


def beside(**settings: Any) -> Case:
    """Other settings beside sound samples."""
    return lambda folder: write(folder, record(0), record(1), **settings)


def settings_file(content: bytes) -> Case:
    return lambda folder: (folder / "settings.json").write_bytes(content)


def raw(content: bytes) -> Case:
    return lambda folder: (folder / "samples.jsonl").write_bytes(content)


def replaced(name: str, target: str) -> Case:
    """A link in place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return apply


def pipe(name: str) -> Case:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return apply


def folder_named(name: str) -> Case:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return apply


def sparse(folder: Path) -> None:
    with open(folder / "samples.jsonl", "r+b") as file:
        file.truncate(2**40)


def cut_off(folder: Path) -> None:
    data = (folder / "samples.jsonl").read_bytes()
    (folder / "samples.jsonl").write_bytes(data[:-9])


def one_line(error: str) -> str:
    assert error.startswith("error: ") and error.count("\n") == 1, error[:500]
    assert len(error) < 1500 and error[:-1].isprintable()
    return error


def assert_inert(page: str) -> None:
    """No tag of a page can act, and all that it loads is inside."""
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.append(tag)
            assert tag not in ("script", "iframe", "object", "embed", "link", "base", "form")
            for key, value in attrs:
                assert not key.startswith("on"), (tag, key)
                assert key not in ("href", "src") or (value or "").startswith("data:image/png")

    Reader().feed(page)
    assert "table" in seen


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    tiny_llama(vocab_size=V).save_pretrained(folder)
    return folder


@pytest.fixture
def stage(
    tmp_path: Path, judge_folder: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> Stage:
    monkeypatch.chdir(tmp_path)
    return Stage(tmp_path, judge_folder, teacher)


WHOLE = json.dumps(record(1))
REFUSED: dict[str, Case] = {
    # The file
    "a link to another kind of file": replaced("samples.jsonl", "../precious/file"),
    "a link to itself": replaced("samples.jsonl", "samples.jsonl"),
    "a link to a device": replaced("samples.jsonl", "/dev/zero"),
    "a pipe that nobody writes": pipe("samples.jsonl"),
    "a folder of that name": folder_named("samples.jsonl"),
    "an empty file": raw(b""),
    "a terabyte of nothing": sparse,
    "a line beyond the limit": lambda folder: line(" " * MAX_LINE_BYTES + WHOLE)(folder),
    "a last line cut off": cut_off,
    # The text of a line
    "not UTF-8": raw(b'{"tokens": [1], "text": "\xff"}\n'),
    "UTF-16": raw(json.dumps(record()).encode("utf-16")),
    "a byte order mark": raw(b"\xef\xbb\xbf" + json.dumps(record()).encode()),
    "a pickle": raw(b"\x80\x04cposix\nsystem\n(S'touch FIRED'\ntR."),
    "nested without end": line('{"tokens": ' + "[" * 10**5),
    "objects nested without end": line('{"settings": ' + '{"a": ' * 10**5 + "1" + "}" * 10**5),
    "a list": line("[1, 2]"),
    "NaN as a number": line(WHOLE.replace('"nfe": 3', '"nfe": NaN', 1)),
    "infinity in the settings": raw(WHOLE.replace('"tau": 0.9', '"tau": Infinity').encode()),
    "a number that overflows to infinity": raw(
        WHOLE.replace('"tau": 0.9', '"tau": 1e999').encode()
    ),
    "a field twice": line(WHOLE.replace('"seed": 7', '"seed": 7, "seed": 8')),
    "a setting twice": line(WHOLE.replace('"tau": 0.9', '"tau": 0.9, "tau": 1.0')),
    "half a character": line(WHOLE.replace("a b a b", r"\ud800")),
    "half a character in the settings": line(WHOLE.replace("ancestral", r"\udfff")),
    "a number of 5,000 digits": line(WHOLE.replace('"seed": 7', f'"seed": {"9" * 5000}')),
    "a budget of 400 digits": line(WHOLE.replace('"nfe": 3', f'"nfe": {"9" * 400}')),
    "text behind the object": line(WHOLE + "{}"),
    # Fields
    "no token ids": changed(tokens=None),
    "tokens of text": changed(tokens=["0", "1"]),
    "tokens in lists": changed(tokens=[[0, 1]]),
    "tokens of fractions": changed(tokens=[0.0, 1.5]),
    "a token below 0": changed(tokens=[0, -1]),
    "a token outside the vocabulary": changed(tokens=[0, V + 1]),
    "a token of 63 bits": changed(tokens=[0, 2**63 - 1]),
    "a token beyond 64 bits": changed(tokens=[0, 10**30]),
    "a truth as a token": changed(tokens=[True, False]),
    "text of a list": changed(text=["a"]),
    "an index below 0": changed(index=-1),
    "an index beyond 64 bits": changed(index=2**63),
    "an index of a fraction": changed(index=0.5),
    "an index twice": changed(index=0),
    "a seed of text": changed(seed="7"),
    "another seed": changed(seed=8),
    "another sampler": changed(settings={"sampler": "sequential"}),
    "settings of text": changed(settings="ancestral"),
    "a hash of a list": changed(config_sha256=[1]),
    "another run's hash": lambda folder: write(
        folder, record(0, config_sha256="cd"), record(1, config_sha256="ab")
    ),
    "passes of a list": changed(nfe=[3]),
    "seconds of text": changed(processor_seconds="1"),
    "seconds below 0": changed(processor_seconds=-1.0),
    "passes below 0": changed(nfe=-3),
    # The settings beside them
    "settings cut off": settings_file(b'{"vocab_size": 11, '),
    "settings of a list": settings_file(b"[]"),
    "settings of NaN": settings_file(b'{"vocab_size": NaN}'),
    "settings not UTF-8": settings_file(b"\xff\xfe{}"),
    "settings nested without end": settings_file(b'{"identity": ' + b"[" * 10**5),
    "settings twice": settings_file(b'{"seed": 1, "seed": 2}'),
    "settings by a pipe": pipe("settings.json"),
    "settings by a link to nowhere": replaced("settings.json", "../nowhere"),
    "settings by a link to itself": replaced("settings.json", "settings.json"),
    "settings by a link to a device": replaced("settings.json", "/dev/zero"),
    "settings that are a folder": folder_named("settings.json"),
    "a vocabulary of nothing": beside(vocab_size=0),
    "a vocabulary below 0": beside(vocab_size=-5),
    "another run's settings": lambda folder: write(
        folder, record(0, config_sha256="cd"), record(1), config_sha256="ab"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_command_tells_one_line(
    name: str, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    REFUSED[name](stage.samples)
    for door in DOORS:
        assert stage.run(door) in (1, 2), door
        error = one_line(capsys.readouterr().err)
        assert "samples" in error or "settings.json" in error  # it says where
    assert not list(stage.samples.rglob("*.html"))


READ: dict[str, Case] = {
    "sound": beside(),
    "markup in a text": changed(text=MARKUP),
    "markup in every setting": lambda folder: write(
        folder,
        *(record(i, settings={"nfe": 3, "sampler": MARKUP, "tau": MARKUP}) for i in (0, 1)),
        student=MARKUP,
        precision=MARKUP,
        code_version=MARKUP,
        store={"tokenizer": MARKUP, "tokens": {"fingerprint": MARKUP}},
    ),
    "markup in a file's name": lambda folder: (folder / "samples.jsonl").rename(
        folder / "<img src=x onerror=fired()>.jsonl"
    ),
    "escapes of a terminal in a text": changed(text=ESCAPES),
    "escapes of a terminal in the settings": beside(student=ESCAPES, precision=ESCAPES),
    "escapes of a terminal in a file's name": lambda folder: (folder / "samples.jsonl").rename(
        folder / "\x1b[2Ja\n\rb.jsonl"
    ),
    "a file's name that is not UTF-8": lambda folder: os.rename(
        folder / "samples.jsonl", os.fsencode(folder) + b"/\xff\xfe.jsonl"
    ),
    "a formula in the settings": beside(student="=cmd|' /C calc'!A0"),
    "a text of nothing but an end": changed(text="\0"),
    "no tokens": changed(tokens=[]),
    "settings of other types": beside(
        identity=[1], store="x", student=3, student_config=None, vocab_size="11", precision=[]
    ),
    "a vocabulary beyond all memory": beside(vocab_size=2**31 - 1),
    "a codec of nothing": beside(identity={"codec": 3}),
    "a codec unknown": beside(identity={"codec": {"name": "../x", "parameters": {}}}),
    "a codec of a package": beside(identity={"codec": {"name": "os/system", "parameters": {}}}),
    "a codec of odd parameters": beside(
        identity={"codec": {"name": "topk", "parameters": {"num_entries": -1}}}
    ),
    "no settings": lambda folder: (folder / "settings.json").unlink(),
    "a scale of the noise below 0": lambda folder: write(
        folder, *(record(i, settings={"nfe": 3, "tau": -1.0}) for i in (0, 1))
    ),
    "a scale of the noise of text": lambda folder: write(
        folder, *(record(i, settings={"nfe": 3, "tau": "x"}) for i in (0, 1))
    ),
    "a budget of 0": lambda folder: write(
        folder, *(record(i, nfe=0, settings={"nfe": 0}) for i in (0, 1))
    ),
    "filled places outside": changed(filled=[1, 99]),
    "filled places of text": changed(filled="12"),
    "attempts of text": changed(attempt="x"),
    "attempts beyond all": changed(attempt=2**62),
    "given tokens of text": changed(num_given="x"),
    "given tokens below 0": changed(num_given=-5),
    "results by a link": replaced("results.json", "../precious/file"),
    "a page by a link": replaced("report.html", "../precious/file"),
    "a certificate by a link": replaced("certificate.json", "../precious/file"),
    "what was read, by a link": replaced("judged", "../precious"),
    "a tokenizer outside": beside(checkpoint="/etc"),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_shown_stays_text(
    name: str, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    READ[name](stage.samples)
    for door in DOORS:
        code = stage.run(door)
        told = capsys.readouterr()
        if code:
            assert told.err.count("error: ") == 1 and "Traceback" not in told.err, door
        shown = (told.out + told.err).replace("\n", "")
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", shown), door
        assert name != "sound" or code == 0, (door, told.err)
    pages = list(stage.home.rglob("*.html"))
    for page in pages:
        assert_inert(page.read_text(encoding="utf-8"))
    for page in stage.home.rglob("*.md"):
        assert "<script" not in page.read_text() and "<img" not in page.read_text()
    for file in (*stage.home.rglob("results.json"), *stage.home.rglob("certificate.json")):
        if not file.is_symlink():
            parse_json(file.read_bytes())  # also what other readers would not take


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
    one_line(capsys.readouterr().err)


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
    one_line(capsys.readouterr().err)
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
