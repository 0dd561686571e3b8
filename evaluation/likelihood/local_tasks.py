"""Tasks of lm-evaluation-harness over local question files: no network, no hub data set.

    gdistill-eval tasks QUESTIONS/ --out tasks/
    gdistill-lm-eval --include_path tasks/ --tasks local_piqa ...

A file holds JSON lines: ``query``, ``choices`` and ``gold`` (index), or, where the choice stands in
the context, ``context_options``, ``continuation`` and ``gold``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shards.atomic import write_bytes_atomic
from shards.errors import UsageError

KINDS: dict[frozenset[str], dict[str, Any]] = {
    frozenset({"query", "choices", "gold"}): {
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
    },
    frozenset({"context_options", "continuation", "gold"}): {
        "doc_to_text": "gold",
        "doc_to_choice": "context_options",
        "doc_to_target": "continuation",
    },
}
"""Fields of a line -> what the harness takes for context, choices and answer."""


def write_tasks(questions: Path, out: Path) -> list[str]:
    """A task file for every question file; the names of the tasks.

    Args:
        questions: Folder of ``*.jsonl``.
        out: For the harness's ``--include_path``.

    Raises:
        UsageError: Without a question file, or for one of other fields.
    """
    files = sorted(questions.glob("*.jsonl"))
    if not files:
        raise UsageError("no questions", where=questions, expected="*.jsonl")
    tasks = {f"local_{file.stem}": _task(file) for file in files}
    for name, task in tasks.items():
        text = json.dumps({"task": name, **task}, indent=2)  # JSON is YAML
        write_bytes_atomic(out / f"{name}.yaml", text.encode() + b"\n")
    return list(tasks)


def _task(file: Path) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as lines:
            fields = frozenset(json.loads(next(lines)))
    except (OSError, ValueError, StopIteration, TypeError) as error:
        raise UsageError("cannot read the questions", where=file, got=error) from error
    kind = next((value for known, value in KINDS.items() if known <= fields), None)
    if kind is None:
        expected = " or ".join(", ".join(sorted(known)) for known in KINDS)
        raise UsageError(
            "questions of other fields",
            where=file,
            got=", ".join(sorted(fields)),
            expected=expected,
        )
    metrics = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("acc", "acc_norm")
    ]
    return {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file.resolve())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        **kind,
        "target_delimiter": " ",
        "metric_list": metrics,
    }
