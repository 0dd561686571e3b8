"""Spoiling a store by one who can seal it again, and using what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shards.errors import GdistillError
from shards.store.location import FileRecord
from shards.store.manifest import seal
from shards.store.store import ShardStore
from tests.shards.store_cases import file_bytes


def use(root: Path, destination: Path) -> None:
    """Everything that a reader does with a store."""
    store = ShardStore.open(root)
    assert store.codec and store.resources
    for split in store.manifest.splits:
        store.split(split).read_rows(0, store.split(split).num_rows)
    for folder in ("tokenizer", "corpus"):
        store.copy_files(folder, destination)


def refused(root: Path, destination: Path) -> str:
    """The one line in which using a store ends; nothing outside ``destination`` has changed."""
    outside = file_bytes(root.parent)
    with pytest.raises(GdistillError) as caught:
        use(root, destination)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
    assert {
        name: data
        for name, data in file_bytes(root.parent).items()
        if not name.startswith(f"{destination.name}/")
    } == outside
    return str(caught.value)


def reseal(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and seal it again, and every ledger record with it."""
    value = json.loads((root / "manifest.json").read_bytes())
    value.pop("sha256")
    change(value)
    data = seal(value)
    (root / "manifest.json").write_bytes(data)
    seal_ledger(root, lambda record: record.update(manifest_sha256=json.loads(data)["sha256"]))


def seal_ledger(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for path in (root / "ledger").rglob("*.json"):
        record = json.loads(path.read_bytes())
        record.pop("sha256")
        change(record)
        path.write_bytes(seal(record))


def replace_file(root: Path, name: str, data: bytes) -> None:
    """Another content for a file that the manifest vouches for."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(data)
    record = FileRecord.of(data).to_json()
    reseal(root, lambda value: value["files"].update({name: record}))
