"""Token folders that somebody made to do harm: each one line, nothing outside them read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.tokens.dataset import FIELDS, FORMAT_VERSION, TokenDataset
from shards.errors import GdistillError

PART: dict[str, Any] = {
    "name": "part-00000.parquet",
    "num_rows": 1,
    "num_bytes": 7,
    "tokens_sha256": "0" * 64,
    "max_token_id": 3,
}


def write(folder: Path, record: object) -> None:
    (folder / "train").mkdir(parents=True, exist_ok=True)
    (folder / "train" / PART["name"]).write_bytes(b"planted")
    (folder / "tokens.json").write_text(json.dumps(record))


def whole(**changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {name: {} for name in FIELDS}
    splits = {"train": {"parts": [PART], "num_rows": 1}}
    return {**record, "format_version": FORMAT_VERSION, "splits": splits, **changes}


def refused(folder: Path) -> str:
    with pytest.raises(GdistillError) as caught:
        TokenDataset.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


NAMES = ["../../planted", "/etc/passwd", "..", "", "a//b", "a\\b", "a\0b", "a" * 300, 7, None]
OUTSIDE: list[Any] = [
    {"train": {"parts": [{**PART, "name": name}], "num_rows": 1}} for name in NAMES
]
OUTSIDE += [
    {split: {"parts": [PART], "num_rows": 1}}
    for split in ("..", "../tokens/train", "/tmp", "", "a\nb")
]
MALFORMED: list[Any] = [3, None, "train", {"train": []}, {"train": {}}]
MALFORMED += [{"train": {"parts": parts}} for parts in (3, [[]], [{}], [{"a": 1}])]


@pytest.mark.parametrize("splits", OUTSIDE + MALFORMED)
def test_parts_and_splits_lie_inside(tmp_path: Path, splits: Any) -> None:
    (tmp_path / "planted").write_bytes(b"planted")
    write(tmp_path / "tokens", whole(splits=splits))
    message = refused(tmp_path / "tokens")
    assert splits in MALFORMED or "malformed list of parts" in message


@pytest.mark.parametrize("text", ["[" * 10**5, "[]", "null", "", "{", "1e999"])
def test_records_that_are_none(tmp_path: Path, text: str) -> None:
    write(tmp_path / "tokens", {})
    (tmp_path / "tokens/tokens.json").write_text(text)
    refused(tmp_path / "tokens")
