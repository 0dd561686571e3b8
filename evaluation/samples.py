"""Samples on disk: ``samples*.jsonl`` and ``settings.json`` as the sampler leaves them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.errors import GdistillError, UsageError


@dataclass(frozen=True)
class SampleSet:
    """The samples of one run.

    Attributes:
        name: The file's name without suffix.
        tokens: Token ids of each sample, without special treatment.
        texts: Decoded text of each sample.
        indices: Sample index: with ``seed`` it names the noise the sample was drawn with.
        nfe: Forward passes made for each sample.
        seed: Seed of the run.
        settings: Everything else the sampler wrote down.
        source: The jsonl file.
    """

    name: str
    tokens: list[list[int]]
    texts: list[str]
    indices: list[int]
    nfe: list[int]
    seed: int
    settings: dict[str, Any]
    source: Path


def find_sample_files(path: Path) -> list[Path]:
    """The jsonl files at ``path`` (a file or a folder), sorted by name.

    Raises:
        UsageError: When there is nothing to score.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError("no samples", where=path, got="no such file or folder")
    files = sorted(path.rglob("*.jsonl"))
    if not files:
        raise UsageError(
            "no samples", where=path, got="no .jsonl file", remedy="write some with gdistill-sample"
        )
    return files


def read_samples(file: Path) -> SampleSet:
    """Read one jsonl file and the ``settings.json`` beside it.

    Raises:
        GdistillError: For a line that is not a sample, naming file and line.
    """
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            records.append(_parse(line, f"{file}:{number}"))
    if not records:
        raise UsageError("no samples", where=file, got="an empty file")
    records.sort(key=lambda record: record["index"])
    settings_file = file.with_name("settings.json")
    settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
    return SampleSet(
        name=file.stem,
        tokens=[record["tokens"] for record in records],
        texts=[record.get("text", "") for record in records],
        indices=[record["index"] for record in records],
        nfe=[record.get("nfe", 0) for record in records],
        seed=records[0].get("seed", 0),
        settings=settings,
        source=file,
    )


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise GdistillError("a sample line is not JSON", where=where, got=error.msg) from error
    tokens = record.get("tokens") if isinstance(record, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise GdistillError(
            "a sample has no token ids",
            where=where,
            expected='{"index": int, "tokens": [int, ...]}',
        )
    record.setdefault("index", int(where.rsplit(":", 1)[1]) - 1)
    return record
