"""Progress for machines: one JSON object a line, and what a folder's lock tells a watcher."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shards.atomic import exclusive, is_held
from shards.console import progress_bar, use_log_format
from shards.errors import UsageError


@pytest.fixture(autouse=True)
def plain_again() -> Iterator[None]:
    yield
    use_log_format("plain")


def test_progress_for_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr("shards.console.time.monotonic", lambda: now)
    use_log_format("json")
    with progress_bar("train mdlm", 12_000, done=2_000) as bar:
        bar.note("loss 3.5", loss=3.5, step=7)
        now += 59
        bar.advance(500)
        assert capsys.readouterr().err == ""
        now += 1
        bar.advance(500)
        (line,) = capsys.readouterr().err.splitlines()
        assert json.loads(line) == {
            "stage": "train mdlm",
            "done": 3_000,
            "total": 12_000,
            "unit": "tok",
            "rate": pytest.approx(1_000 / 60, rel=1e-3),
            "eta_seconds": 540.0,
            "seconds": 60.0,
            "finished": False,
            "note": "loss 3.5",
            "loss": 3.5,
            "step": 7,
        }
        bar.advance(9_000)
        assert capsys.readouterr().err == ""
    last = json.loads(capsys.readouterr().err)
    assert last["finished"] and last["done"] == 12_000 and last["eta_seconds"] is None


def test_a_total_nobody_knows_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    use_log_format("json")
    with progress_bar("tokenize", None):
        pass
    line = json.loads(capsys.readouterr().err)
    assert line["total"] is None and line["eta_seconds"] is None and line["note"] == ""


def test_a_folder_is_held_while_a_run_lasts_and_free_after_it(tmp_path: Path) -> None:
    assert is_held(tmp_path / "nowhere") is False
    with exclusive(tmp_path):
        assert is_held(tmp_path) is True
        with pytest.raises(UsageError, match="another run"), exclusive(tmp_path):
            pass
        assert is_held(tmp_path) is True
    assert is_held(tmp_path) is False


def test_who_asks_keeps_no_run_from_beginning(tmp_path: Path) -> None:
    with exclusive(tmp_path):
        pass
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            is_held(tmp_path)

    watcher = threading.Thread(target=ask)
    watcher.start()
    try:
        for _ in range(50):
            with exclusive(tmp_path):
                pass
    finally:
        done.set()
        watcher.join()
