"""Extraction as steps of datatrove: the store of any number of tasks is that of one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.executors import ExtractStep
from tests.pipeline.extract_cases import contents, options, run, save_teacher, write_corpus


def with_datatrove(out: Path, given: dict[str, Any], tasks: int) -> None:
    local = pytest.importorskip("datatrove.executor", reason="pip install datatrove")
    stages = []
    for tokens_only in (True, False):
        step = ExtractStep(str(out), given, tokens_only)
        stages.append(
            local.LocalPipelineExecutor(
                [step], tasks=1 if tokens_only else tasks, logging_dir=str(out / "logs"),
                skip_completed=False, depends=stages[-1] if stages else None,
            )
        )  # fmt: skip
    stages[-1].run()


@pytest.mark.parametrize("tasks", [2, 4])
def test_tasks_write_the_store_of_one_command(tmp_path: Path, tasks: int) -> None:
    given = options(save_teacher(tmp_path / "teacher"), write_corpus(tmp_path / "corpus.txt"))
    run(tmp_path / "alone", given)
    with_datatrove(tmp_path / "tasks", given, tasks)
    assert contents(tmp_path / "tasks/store") == contents(tmp_path / "alone/store")


def test_documents_pass_and_what_is_done_stays(tmp_path: Path) -> None:
    """Without datatrove: a step is a call."""
    given = options(save_teacher(tmp_path / "teacher"), write_corpus(tmp_path / "corpus.txt"))
    step = ExtractStep(str(tmp_path / "out"), given)
    assert list(step(iter(["a document"]), 1, 2)) == ["a document"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/store").rglob("c/*/*")}
    assert before
    assert list(step(None, 0, 2)) == []
    assert before == {path: path.stat().st_mtime_ns for path in before}
