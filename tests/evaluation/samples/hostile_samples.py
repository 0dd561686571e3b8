"""A folder of samples that cases spoil, with something to protect beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from evaluation.samples.samples import MAX_LINE_BYTES
from tests.commands import call

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

    def words(self, door: str) -> list[object]:
        judge = ("--judge", self.judge)
        if door == "infill":
            return [self.samples, "--infill", self.home / "rows.jsonl"]
        if door == "certify":
            return ["certify", self.samples, "--teacher", self.teacher]
        return [self.samples, *judge]

    def outside(self) -> dict[str, bytes | str]:
        mine = ("samples/", "out/")
        return {k: v for k, v in contents(self.home).items() if not k.startswith(mine)}

    def run(self, door: str) -> int:
        guarded = self.outside()
        try:
            return call("gdistill-eval", *self.words(door))
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
