"""Samples that somebody made to do harm: every command tells one line, or reads what stands there.

Nothing outside of their folder changes, nothing runs, and what is shown stays text.
"""

from __future__ import annotations

import json
import os
import re

import pytest

from evaluation.samples.samples import MAX_LINE_BYTES, parse_json
from tests.evaluation.samples.hostile_samples import (
    DOORS,
    ESCAPES,
    MARKUP,
    Case,
    Stage,
    V,
    assert_inert,
    beside,
    changed,
    cut_off,
    folder_named,
    line,
    pipe,
    raw,
    record,
    replaced,
    settings_file,
    sparse,
    write,
)

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
        told = capsys.readouterr().err
        assert told.startswith("error: ") and told.count("\n") == 1, (door, told[:500])
        assert len(told) < 1500 and told[:-1].isprintable(), door
        assert "samples" in told or "settings.json" in told  # it says where
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
