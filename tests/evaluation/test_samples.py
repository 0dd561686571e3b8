"""Files of samples and of reference texts: what is read, and how a fault is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluation.samples import find_sample_files, read_references, read_samples
from shards.errors import GdistillError, UsageError

GOOD = {"index": 0, "tokens": [0, 1], "text": "a b", "nfe": 3, "seed": 7}


def write(file: Path, *records: dict) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_samples_are_sorted_by_index_and_keep_their_lines(tmp_path: Path) -> None:
    file = write(tmp_path / "samples.jsonl", GOOD | {"index": 1}, GOOD | {"index": 0, "nfe": 5})
    samples = read_samples(file)
    assert (samples.indices, samples.lines, samples.nfe) == ([0, 1], [2, 1], [5, 3])
    assert (samples.name, samples.seed, samples.nfe_mean) == ("samples", 7, 4.0)


def test_fields_left_out_get_what_is_known_without_them(tmp_path: Path) -> None:
    samples = read_samples(write(tmp_path / "s.jsonl", {"tokens": [1]}, {"tokens": [2]}))
    assert (samples.indices, samples.seed) == ([0, 1], 0)
    assert samples.nfe_mean is None  # and not a claim of zero forward passes
    assert samples.processor_seconds_mean is None


def test_files_are_named_by_their_path_in_the_order_of_their_budgets(tmp_path: Path) -> None:
    for name in ("one/samples-nfe16", "one/samples-nfe8", "two/samples", "samples.v1"):
        write(tmp_path / f"{name}.jsonl", GOOD)
    names = [read_samples(file, tmp_path).name for file in find_sample_files(tmp_path)]
    assert names == ["one/samples-nfe8", "one/samples-nfe16", "samples.v1", "two/samples"]


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"index": "x"}, 'index.*got "x"'),
        ({"index": True}, "index.*got true"),
        ({"nfe": "3"}, 'nfe.*got "3"'),
        ({"nfe": 1.5}, "nfe.*got 1.5"),
        ({"seed": [1]}, r"seed.*got \[1\]"),
        ({"text": 5}, "text.*got 5"),
        ({"text": "\ud800"}, "not JSON.*surrogates not allowed"),
        ({"tokens": None}, "no token ids.*no such field"),
        ({"tokens": "abc"}, 'no token ids.*"abc"'),
        ({"tokens": [0, True]}, r"no token ids.*\[0, true\]"),
        ({"tokens": [0, -1]}, "no token ids.*-1"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named_with_its_line(
    tmp_path: Path, change: dict, got: str
) -> None:
    file = write(tmp_path / "s.jsonl", GOOD, GOOD | {"index": 1} | change)
    with pytest.raises(GdistillError, match=got) as caught:
        read_samples(file)
    assert caught.value.where == f"{file}:2" and caught.value.remedy


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\xff\xfe", "not UTF-8.*byte 0xff at column 1"),
        (b'{"tokens": [1', "not JSON"),
        (b"[1, 2]", "no JSON object.*got list"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "s.jsonl"
    file.write_bytes(b'{"tokens": [1]}\n\n' + line + b"\n")
    with pytest.raises(GdistillError, match=message) as caught:
        read_samples(file)
    assert caught.value.where == f"{file}:3"


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    """U+2028 and U+0085 end a line for ``str.splitlines`` and may stand raw in a JSON string."""
    text = "one\u2028two\x85three"
    file = tmp_path / "s.jsonl"
    file.write_text(
        json.dumps({"tokens": [1], "text": text}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert read_samples(file).texts == [text]
    assert read_references(file) == [text]


def test_texts_are_required_only_where_they_are_read(tmp_path: Path) -> None:
    absent = {"index": 2, "tokens": [1]}
    first = read_samples(write(tmp_path / "a.jsonl", absent, GOOD))
    second = read_samples(write(tmp_path / "b.jsonl", GOOD, GOOD | {"index": 1, "text": None}))
    assert first.texts == ["a b", None] and second.texts == ["a b", None]
    with pytest.raises(GdistillError, match=r"no text \[.*a\.jsonl:1\]"):
        first.require_texts()
    with pytest.raises(GdistillError, match=r"no text \[.*b\.jsonl:2\]"):
        second.require_texts()


@pytest.mark.parametrize(
    ("content", "got"),
    [("{", "line 1"), ("[]", "list"), ('{"a": NaN}', "NaN"), ("\n\n{", "settings.json:3")],
)
def test_damaged_settings_are_named(tmp_path: Path, content: str, got: str) -> None:
    file = write(tmp_path / "s.jsonl", GOOD)
    file.with_name("settings.json").write_text(content)
    with pytest.raises(GdistillError, match=r"settings\.json:\d") as caught:
        read_samples(file)
    assert got in str(caught.value)


def test_nothing_to_score_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        find_sample_files(tmp_path / "none")
    with pytest.raises(UsageError, match=r"no \.jsonl file"):
        find_sample_files(tmp_path)
    (tmp_path / "samples.jsonl.partial").write_text("")
    with pytest.raises(UsageError, match=r"unfinished file, samples\.jsonl\.partial"):
        find_sample_files(tmp_path)
    (tmp_path / "samples.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="an empty file"):
        read_samples(tmp_path / "samples.jsonl")


def test_references_need_nothing_but_a_text(tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", {"text": "hello there"}, {"text": "", "id": "x"})
    assert read_references(file) == ["hello there", ""]
    for record in ({"text": None}, {"tokens": [1]}, {"text": ["a"]}):
        write(file, {"text": "fine"}, record)
        with pytest.raises(GdistillError, match=r"no text \[.*r\.jsonl:2\]; got .*; expected"):
            read_references(file)
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot read the reference file"):
            read_references(path)
