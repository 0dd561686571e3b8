"""What is recorded says where it comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("*.json")), ids=lambda file: file.name)
def test_a_record_names_its_commit_machine_and_versions(file: Path) -> None:
    record = json.loads(file.read_text(encoding="utf-8"))
    about = dict(said(record))
    assert len(about["commit"]) >= 12
    assert about.get("name") or about.get("processor"), "no machine"
    assert about["torch"]


def said(record: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of a record, at any depth."""
    parts = record.values() if isinstance(record, dict) else record
    if isinstance(record, dict):
        yield from record.items()
    for part in parts:
        if isinstance(part, dict | list):
            yield from said(part)
