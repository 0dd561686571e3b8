"""Extraction as steps of datatrove: the store of any number of tasks is that of one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.executors import ExtractStep
from tests.pipeline.conftest import Asked
from tests.pipeline.extract_cases import contents


def with_datatrove(out: Path, given: dict[str, Any], tasks: int) -> None:
    local = pytest.importorskip("datatrove.executor", reason="pip install datatrove")
    stages = []
    for tokens_only in (True, False):
        step = ExtractStep(str(out), given, tokens_only)
        how = {"logging_dir": str(out / "logs"), "skip_completed": False}
        how |= {"tasks": 1 if tokens_only else tasks, "depends": stages[-1] if stages else None}
        stages.append(local.LocalPipelineExecutor([step], **how))
    stages[-1].run()


@pytest.mark.parametrize("tasks", [2, 4])
def test_tasks_write_the_store_of_one_command(
    tmp_path: Path, asked: Asked, reference: dict[str, bytes], tasks: int
) -> None:
    with_datatrove(tmp_path, asked(), tasks)
    assert contents(tmp_path / "store") == reference


def test_documents_pass_and_what_is_done_stays(
    tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without datatrove: a step is a call; the first task alone speaks."""
    assert list(ExtractStep(str(tmp_path), asked(), tokens_only=True)()) == []
    assert (tmp_path / "tokens").exists() and not (tmp_path / "store").exists()
    assert capsys.readouterr().out
    step = ExtractStep(str(tmp_path), asked())
    assert list(step(iter(["a document"]), 1, 2)) == ["a document"]
    assert capsys.readouterr().out == ""
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("c/*/*")}
    assert before
    assert list(step(None, 0, 2)) == []
    assert before == {path: path.stat().st_mtime_ns for path in before}
