"""Token folders that somebody made to do harm: each one line, nothing outside them read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.tokens.dataset import TokenDataset
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
    from pipeline.tokens.dataset import FIELDS, FORMAT_VERSION

    record: dict[str, Any] = {name: {} for name in FIELDS}
    splits = {"train": {"parts": [PART], "num_rows": 1}}
    return {**record, "format_version": FORMAT_VERSION, "splits": splits, **changes}


def refused(folder: Path) -> str:
    with pytest.raises(GdistillError) as caught:
        TokenDataset.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["../../planted", "/etc/passwd", "..", "", "a//b", "a\\b", "a\0b", "a" * 300, 7, None]
)
def test_parts_lie_inside(tmp_path: Path, name: object) -> None:
    (tmp_path / "planted").write_bytes(b"planted")
    splits = {"train": {"parts": [{**PART, "name": name}], "num_rows": 1}}
    write(tmp_path / "tokens", whole(splits=splits))
    assert "malformed list of parts" in refused(tmp_path / "tokens")


@pytest.mark.parametrize("split", ["..", "../tokens/train", "/tmp", "", "a\nb"])
def test_splits_lie_inside(tmp_path: Path, split: str) -> None:
    write(tmp_path / "tokens", whole(splits={split: {"parts": [PART], "num_rows": 1}}))
    assert "malformed list of parts" in refused(tmp_path / "tokens")


@pytest.mark.parametrize(
    "splits",
    [
        3,
        None,
        "train",
        {"train": []},
        {"train": {}},
        {"train": {"parts": 3}},
        {"train": {"parts": [[]]}},
        {"train": {"parts": [{}]}},
        {"train": {"parts": [{"a": 1}]}},
    ],
    ids=str,
)
def test_odd_splits(tmp_path: Path, splits: object) -> None:
    write(tmp_path / "tokens", whole(splits=splits))
    refused(tmp_path / "tokens")


@pytest.mark.parametrize("text", ["[" * 10**5, "[]", "null", "", "{", "1e999"])
def test_records_that_are_none(tmp_path: Path, text: str) -> None:
    write(tmp_path / "tokens", {})
    (tmp_path / "tokens/tokens.json").write_text(text)
    refused(tmp_path / "tokens")
