"""Samples that somebody made to do harm: every command says one line, or reads what stands there.

Nothing outside of their folder changes, nothing runs, and what is shown stays text.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evaluation.samples import MAX_LINE_BYTES, drawn_with, find_sample_files, parse_json, read_references, read_samples
from evaluation.text.reading import readings_folder
from shards.errors import GdistillError, UsageError, visible
from tests.commands import call
from tests.evaluation.kit import Page, Told, one_line, results, write_lines
from tests.trainer.sampling_cases import tiny_llama

V = 11
MARKUP = "<script>fired()</script><img src=x onerror=fired()>"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202eback"
DOORS = ("score", "infill", "certify")
Case = Callable[[Path], object]


def record(index: int = 0, **changes: Any) -> dict[str, Any]:
    """A sample as ``gdistill-sample`` writes it."""
    settings = {"sampler": "ancestral", "nfe": 3, "tau": 0.9, "redraw_noise": False}
    known = {"index": index, "tokens": [0, 1, 2, 3, 4, 5 + index], "text": "a b a b", "nfe": 3}
    return {**known, "seed": 7, "num_given": 1, "settings": settings, **changes}


WHOLE = json.dumps(record(1))
SETTINGS: dict[str, Any] = {"student": "mdlm", "vocab_size": V, "precision": "fp32"}
SETTINGS |= {"student_config": {"conditioning": "gumbel"}}
SETTINGS |= {"identity": {"weights_sha256": "00", "codec": None}}
SETTINGS |= {"store": {"tokenizer": "words", "tokens": {"fingerprint": "ab"}}}


def write(folder: Path, *records: object, **settings: Any) -> Path:
    write_lines(folder / "samples.jsonl", *records)
    (folder / "settings.json").write_text(json.dumps(SETTINGS | settings))
    return folder


class Stage:
    """A folder of samples with something to protect beside it, and the commands that read it."""

    def __init__(self, home: Path, judge: Path, teacher: Path) -> None:
        self.home = home
        self.samples, self.sound = (write(home / name, record(0), record(1)) for name in ("samples", "sound"))
        (home / "precious").mkdir()
        (home / "precious/file").write_text('{"torn": ')
        rows = ({"tokens": record(index)["tokens"], "masked": [1, 5]} for index in (0, 1))
        self.words = {
            "score": [self.samples, "--judge", judge],
            "infill": [self.samples, "--infill", write_lines(home / "rows.jsonl", *rows)],
            "certify": ["certify", self.samples, "--teacher", teacher],
        }

    def outside(self) -> dict[str, bytes | str]:
        """What is not the commands' own to write, links as links."""
        files = (path for path in self.home.rglob("*") if path.is_symlink() or path.is_file())
        own = self.samples, self.home / "out"
        return {
            str(path): os.readlink(path) if path.is_symlink() else path.read_bytes()
            for path in files
            if not any(folder in path.parents for folder in own)
        }

    def run(self, door: str) -> int:
        guarded = self.outside()
        try:
            return call("gdistill-eval", *self.words[door])
        finally:
            assert self.outside() == guarded
            assert not list(self.home.rglob("FIRED"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    tiny_llama(vocab_size=V).save_pretrained(folder)
    return folder


@pytest.fixture
def stage(tmp_path: Path, judge_folder: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.chdir(tmp_path)
    return Stage(tmp_path, judge_folder, teacher)


def samples(*records: object, **settings: Any) -> Case:
    """These samples, as objects or as the text of a line, and other settings beside them."""
    return lambda folder: write(folder, *records, **settings)


def changed(**fields: Any) -> Case:
    """A second sample with other fields."""
    return samples(record(0), record(1) | fields)


def beside(**settings: Any) -> Case:
    """Other settings beside sound samples."""
    return samples(record(0), record(1), **settings)


def content(name: str, data: bytes) -> Case:
    return lambda folder: (folder / name).write_bytes(data)


def third(line: bytes) -> Case:
    """A line behind a sound sample and a blank line."""
    return content("samples.jsonl", json.dumps(record(0)).encode() + b"\n\n" + line + b"\n")


def instead(name: str, make: Callable[[Path], object]) -> Case:
    """Something else in place of a file."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return apply


# What is wrong -> (how it comes to be, what the line says)
REFUSED: dict[str, tuple[Case, str]] = {
    # The file
    "empty": (content("samples.jsonl", b""), "no sample in the file"),
    "a terabyte of nothing": (lambda at: os.truncate(at / "samples.jsonl", 2**40), "too long .*:3"),
    "a long line": (lambda at: third(b" " * MAX_LINE_BYTES + b"{}")(at), "too long .*l:3"),
    # The text of a line
    "not UTF-8": (third(b'{"text": "\xff"}'), r"not UTF-8 .*l:3\]; got byte 0xff at column 11"),
    "a byte order mark": (content("samples.jsonl", b"\xef\xbb\xbf" + WHOLE.encode()), "not JSON"),
    "cut off": (content("samples.jsonl", f"{WHOLE}\n\n{WHOLE[:-8]}".encode()), "not JSON .*l:3"),
    "a list": (third(b"[1, 2]"), r"no JSON object .*l:3\]; got list"),
    # Fields
    "no token ids": (changed(tokens=None), r"no token ids .*l:2\]; got no such field"),
    "a token outside the vocabulary": (changed(tokens=[0, V + 1]), "token 12; expected at most 11"),
    "a token beyond 64 bits": (changed(tokens=[0, 10**30]), "100000.*beyond 64 bits"),
    "an index beyond 64 bits": (changed(index=2**63), "9223372036854775808.*beyond 64 bits"),
    "an index twice": (changed(index=0), "runs are mixed .*2, index.*one sample an index"),
    "another seed": (changed(seed=8), "runs are mixed .*2, seed.*got 8; expected 7"),
    "another sampler": (changed(settings={"sampler": "x"}), 'runs are mixed .*2, settings.*: "x"'),
    "another run's hash": (
        samples(record(0, config_sha256="cd"), record(1, config_sha256="ab")),
        'runs are mixed .*2, config_sha256.*got "ab"; expected "cd"',
    ),
    # The settings beside them
    "settings cut off": (content("settings.json", b'\n\n{"vocab_size": 11, '), r"settings\.json:3"),
    "settings of a list": (content("settings.json", b"[]"), r"settings\.json:1\]; got list"),
    "settings not UTF-8": (content("settings.json", b"\xff\xfe{}"), "can't decode byte 0xff"),
    "a vocabulary of nothing": (beside(vocab_size=0), "another tokenizer.*at most 0"),
    "another run's settings": (
        samples(record(0, config_sha256="cd"), record(1), config_sha256="ab"),
        r'runs are mixed .*settings\.json, config_sha256\]; got "ab"; expected "cd"',
    ),
}
NO_FILE: dict[str, Callable[[Path], object]] = {
    "a link to another kind of file": partial(os.symlink, "../precious/file"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nowhere": partial(os.symlink, "../nowhere"),
    "a link to a device": partial(os.symlink, "/dev/zero"),
    "a pipe that nobody writes": os.mkfifo,
    "a folder of that name": os.mkdir,
}
DEEP = "values nested too deeply"
# What is wrong -> (a text, what is said to be in it)
NOT_JSON = {
    "nested without end": ('{"tokens": ' + "[" * 10**5, DEEP),
    "NaN as a number": (WHOLE.replace('"nfe": 3', '"nfe": NaN'), "NaN, which is not JSON"),
    "infinity in the settings": (WHOLE.replace('"tau": 0.9', '"tau": Infinity'), "Infinity, which is not"),
    "a number that overflows to infinity": (WHOLE.replace('"tau": 0.9', '"tau": 1e999'), "1e999, beyond"),
    "a field twice": (WHOLE.replace('"seed": 7', '"seed": 7, "seed": 8'), 'the name "seed" stands twice'),
    "half a character": (WHOLE.replace("a b a b", r"\uD800"), ".*surrogates not allowed"),
    "half a character in the settings": (WHOLE.replace("ancestral", r"\udfff"), ".*surrogates not"),
    "a number of 5,000 digits": (WHOLE.replace('"seed": 7', f'"seed": {"9" * 5000}'), ".*beyond 64 bits"),
    "text behind the object": (WHOLE + "{}", "Extra data"),
}
WRONG_KIND: dict[str, list[Any]] = {
    "tokens": ["abc", ["0", "1"], [[0, 1]], [0.0, 1.5], [0, -1], [0, 2**63 - 1], [0, True]],
    "text": [["a"], 5],
    "index": [-1, 0.5, "x", True],
    "seed": ["7", [1]],
    "settings": ["ancestral"],
    "config_sha256": [[1]],
    "nfe": [[3], -3, "3", 1.5],
    "processor_seconds": ["1", -1.0],
}


def refusals() -> Iterator[Any]:
    for name, (make, said) in REFUSED.items():
        yield pytest.param(make, said, id=name)
    for name, make in NO_FILE.items():
        yield pytest.param(instead("samples.jsonl", make), " sample .*samples.jsonl", id=name)
        said = r"settings .* cannot be read \[.*settings\.json:1\]"
        yield pytest.param(instead("settings.json", make), said, id=f"settings: {name}")
    for name, (text, got) in NOT_JSON.items():
        said = rf"line is not JSON \[.*samples\.jsonl:3\]; got {got}"
        yield pytest.param(third(text.encode()), said, id=name)
        said = rf"settings .* cannot be read \[.*settings\.json:1\]; got {got}"
        yield pytest.param(content("settings.json", text.encode()), said, id=f"settings: {name}")
    for field, values in WRONG_KIND.items():
        what = "has no token ids" if field == "tokens" else f"'s {field} is of the wrong kind"
        for value in values:
            got = re.escape(json.dumps(value))
            said = rf"{what} \[.*samples\.jsonl:2\]; got {got}; expected .*; write it as"
            yield pytest.param(changed(**{field: value}), said, id=f"{field}: {value}")


@pytest.mark.parametrize(("make", "said"), list(refusals()))
def test_every_command_tells_one_line(make: Case, said: str, stage: Stage, told: Told) -> None:
    make(stage.samples)
    for door in DOORS:
        assert stage.run(door) in (1, 2), door
        error = one_line(told(), door)
        assert re.search(said, error) and ("samples" in error or "settings.json" in error)
    assert not list(stage.samples.rglob("*.html"))


READ: dict[str, Case] = {
    "sound": beside(),
    "markup in every setting": samples(
        *(record(i, settings={"nfe": 3, "sampler": MARKUP, "tau": MARKUP}) for i in (0, 1)),
        **dict.fromkeys(("student", "precision", "code_version"), MARKUP),
        store={"tokenizer": MARKUP, "tokens": {"fingerprint": MARKUP}},
    ),
    "escapes of a terminal in the settings": beside(student=ESCAPES, precision=ESCAPES),
    "settings of other types": beside(
        identity=[1], store="x", student=3, student_config=None, vocab_size="11", precision=[]
    ),
    "a vocabulary beyond all memory": beside(vocab_size=2**31 - 1),
    "a codec of nothing": beside(identity={"codec": 3}),
    "a codec of a package": beside(identity={"codec": {"name": "os/system", "parameters": {}}}),
    "a codec of odd parameters": beside(identity={"codec": {"name": "topk", "parameters": {"num_entries": -1}}}),
    "no settings": lambda folder: (folder / "settings.json").unlink(),
    "a scale of the noise below 0": samples(record(settings={"nfe": 3, "tau": -1.0})),
    "a scale of the noise of text": samples(record(settings={"nfe": 3, "tau": "x"})),
    "a budget of 0": samples(record(nfe=0, settings={"nfe": 0})),
    "what was read, by a link": instead("judged", partial(os.symlink, "../precious")),
    "a tokenizer outside": beside(checkpoint="/etc"),
}
for name in ("results.json", "report.html", "certificate.json"):
    READ[f"a link as {name}"] = instead(name, partial(os.symlink, "../precious/file"))
for file in (b"<img src=x onerror=fired()>.jsonl", b"\x1b[2Ja\n\rb.jsonl", b"\xff\xfe.jsonl"):
    READ[f"a file of the name {file!r}"] = lambda at, file=file: (at / "samples.jsonl").rename(at / os.fsdecode(file))
ODD: dict[str, list[Any]] = {
    "text": [MARKUP, ESCAPES, "\0"],
    "tokens": [[]],
    "filled": [[1, 99], "12"],
    "attempt": ["x", 2**62],
    "num_given": ["x", -5],
}
for field, values in ODD.items():
    READ |= {f"{field}: {value!a:.20}": changed(**{field: value}) for value in values}


def assert_inert(page: Path) -> None:
    """No tag of a page can act, and all that it loads is inside."""
    text = page.read_text(encoding="utf-8")
    tags = Page(text).tags
    assert "\0" not in text
    names = {tag for tag, _ in tags}
    assert "table" in names
    assert not names & {"script", "iframe", "object", "embed", "link", "base", "form"}
    for tag, attributes in tags:
        for key, value in attributes.items():
            assert not key.startswith("on"), (tag, key)
            assert key not in ("href", "src") or (value or "").startswith("data:image/png")


@pytest.mark.parametrize("name", READ)
def test_what_is_shown_stays_text(name: str, stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    READ[name](stage.samples)
    for door in DOORS:
        code = stage.run(door)
        told = capsys.readouterr()
        if code:
            assert told.err.count("error: ") == 1 and "Traceback" not in told.err, door
        shown = (told.out + told.err).replace("\n", "")
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", shown), door
        assert name != "sound" or code == 0, (door, told.err)
    for page in stage.home.rglob("*.html"):
        assert_inert(page)
    for page in stage.home.rglob("*.md"):
        assert "<script" not in page.read_text() and "<img" not in page.read_text()
    for file in (*stage.home.rglob("results.json"), *stage.home.rglob("certificate.json")):
        if not file.is_symlink():
            parse_json(file.read_bytes())  # also what other readers would not take


# What the judge has read is kept, outside of the samples.


def test_a_planted_reading_is_not_believed(stage: Stage, cache: Path) -> None:
    """Whoever hands over samples can name and fill a file of readings as well as this program."""
    assert stage.run("score") == 0
    honest = results(stage.samples)
    (kept,) = cache.rglob("*.judged")
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    better = [[key, ids, [0.01] * len(nll), flags] for key, ids, nll, flags in lines]
    shutil.rmtree(cache / "gdistill")
    own = str(kept.parent.relative_to(cache))
    for place in ("judged", "gdistill/judged", ".cache/gdistill/judged", own):
        write_lines(stage.samples / place / kept.name, *better)
    assert stage.run("score") == 0
    assert results(stage.samples) == honest
    write_lines(kept, *better)  # what this user has read is believed, or nothing would resume
    assert stage.run("score") == 0
    assert results(stage.samples) != honest


def test_readings_are_kept_where_programs_of_the_user_keep_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, other = readings_folder(tmp_path / "one"), readings_folder(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert readings_folder(Path("one")) == one != other
    assert one.parent == other.parent == tmp_path / "cache/gdistill/judged"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert readings_folder(tmp_path / "one") == tmp_path / ".cache/gdistill/judged" / one.name


def test_odd_readings_are_read_again_and_links_not_written(stage: Stage, cache: Path, told: Told) -> None:
    assert stage.run("score") == 0
    first = results(stage.samples)
    (kept,) = cache.rglob("*.judged")
    key, ids, nll, flags = json.loads(kept.read_text().splitlines()[0])
    no_number, too_large = ([key, ids, [value] * len(nll), flags] for value in (math.nan, 1e99))
    shorter = [key, ids[:-1], [0.0] * len(nll), flags]
    for line in ("[" * 10**5, no_number, [[], [1], [1.0], 1], "3", too_large, shorter):
        write_lines(kept, line)
        assert stage.run("score") == 0
        assert results(stage.samples) == first, str(line)[:30]
    kept.unlink()
    kept.symlink_to(stage.home / "precious/file")
    told()
    stage.run("score")
    kept.unlink(missing_ok=True)
    os.mkfifo(kept)
    assert stage.run("score") == 1  # and does not wait for a reader
    assert "cannot keep what the judge has read" in told()


# The rows that were filled.

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


def test_odd_rows_to_fill_and_what_a_message_shows_of_them(stage: Stage, told: Told) -> None:
    for name, row in ROWS.items():
        write_lines(stage.home / "rows.jsonl", row)
        assert stage.run("infill") in (1, 2), name
        said = r"does not fill its row|without its truth .*rows\.jsonl:1|beyond 64 bits"
        assert re.search(said, one_line(told(), name)), name

    # Every character that steers is spelt out.
    assert visible("ä b 中") == "ä b 中"
    assert visible("\x1b[2J\n\u202e\udcff\x9b") == r"\x1b[2J\n\u202e\udcff\x9b"
    assert str(UsageError("what", where=ESCAPES, got=ESCAPES)).isprintable()


# What is read of files that are as they should be.

GOOD = {"index": 0, "tokens": [0, 1], "text": "a b", "nfe": 3, "seed": 7}


def test_samples_are_sorted_by_index_and_keep_their_lines(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "samples.jsonl", GOOD | {"index": 1}, GOOD | {"nfe": 5})
    samples = read_samples(file)
    assert (samples.indices, samples.lines, samples.nfe) == ([0, 1], [2, 1], [5, 3])
    assert (samples.name, samples.seed, samples.nfe_mean) == ("samples", 7, 4.0)
    # Fields left out get what is known without them.
    samples = read_samples(write_lines(tmp_path / "s.jsonl", {"tokens": [1]}, {"tokens": [2]}))
    assert (samples.indices, samples.seed) == ([0, 1], 0)
    assert samples.nfe_mean is None  # and not a claim of zero forward passes
    assert samples.processor_seconds_mean is None
    some = read_samples(write_lines(tmp_path / "s.jsonl", {"tokens": [1]}, GOOD | {"index": 1}))
    assert some.nfe_mean is None and some.seed == 7
    # What a verifier counted, by as many distances in every sample.
    good = {"tokens": [1], "accepted": [1, 1], "reached": [2, 1], "verifier_nfe": 3}
    odd = ({"reached": [2], "accepted": [1]}, {"accepted": [1] * 3}, {"accepted": [1, -1]}, {"verifier_nfe": None})
    for other, is_known in ((good, True), *((good | change, False) for change in odd)):
        file = write_lines(tmp_path / "v.jsonl", good, other)
        assert (read_samples(file).verifications is not None) == is_known, other
    settings = {"sampler": "block", "nfe": 3, "tau": 0.9, "nucleus_rule": "strict", "inner": "confidence", "top_k": 4}
    records = [record(i, nfe=5, settings=settings, tokens=[0, 1, 2, 3, 4, V]) for i in (0, 1)]  # V is a mask left open
    for conditioning, student in (("gumbel", "mdlm + gumbel"), ("none", "mdlm")):
        about = {"code_version": "v9", "student_config": {"conditioning": conditioning}}
        told = drawn_with(read_samples(write(tmp_path / "run", *records, **about) / "samples.jsonl"))
        known = {"weights_sha256": "00", "precision": "fp32", "tokens": "6", "data": "ab", "code_version": "v9"}
        assert told == settings | known | {"student": student, "seed": 7}, "the budget that was asked for"


def test_files_are_named_by_their_path_in_the_order_of_their_budgets(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        find_sample_files(tmp_path / "none")
    for name, said in (("x", r"no \.jsonl file"), ("s.jsonl.partial", r"an unfinished file, s\.jsonl\.partial")):
        (tmp_path / name).write_text("\n")
        with pytest.raises(UsageError, match=said):
            find_sample_files(tmp_path)
    with pytest.raises(UsageError, match="an empty file"):
        read_samples(tmp_path / "x")
    for name in ("one/samples-nfe16", "one/samples-nfe8", "two/samples", "samples.v1"):
        write_lines(tmp_path / f"{name}.jsonl", GOOD)
    names = [read_samples(file, tmp_path).name for file in find_sample_files(tmp_path)]
    assert names == ["one/samples-nfe8", "one/samples-nfe16", "samples.v1", "two/samples"]


def test_references_need_nothing_but_a_text(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"  # characters that end a line for str.splitlines, raw
    file = write_lines(tmp_path / "r.jsonl", json.dumps({"tokens": [1], "text": text}, ensure_ascii=False))
    assert read_samples(file).texts == [text] == read_references(file), "only a line feed ends a line"
    write_lines(file, {"text": "hello there"}, {"text": "", "id": "x"})
    assert read_references(file) == ["hello there", ""]
    for record in ({"text": None}, {"tokens": [1]}, {"text": ["a"]}):
        write_lines(file, {"text": "fine"}, record)
        with pytest.raises(GdistillError, match=r"no text \[.*r\.jsonl:2\]; got .*; expected"):
            read_references(file)
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot read the reference file"):
            read_references(path)
