"""Shards that other processes hold: waited for, and taken over when their holder dies."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline import extract
from pipeline.workers import Stopped, StopRequest, Worker
from shards.errors import GdistillError
from shards.store.location import LocalLocation
from shards.store.store import ShardStore
from shards.store.writer import ShardWriter
from tests.pipeline.extract.parallel_trials import end, start, terminate, wait_for_shards
from tests.pipeline.extract_cases import contents, options, run


@pytest.fixture
def holder(tmp_path: Path) -> ExitStack:
    """Another process's claim on the first shard; closing it is that process's death."""
    claim = ExitStack()
    assert claim.enter_context(LocalLocation(tmp_path / "store").claim("train-000000", wait=False))
    return claim


def unfinished(out: Path) -> list[str]:
    store = ShardStore.open(out / "store", allow_incomplete=True)
    return [f"{shard.split}-{shard.index}" for shard in store.unfinished()]


def at_each_pause(monkeypatch: pytest.MonkeyPatch, *acts: object) -> list[float]:
    """Do the next act instead of each sleep; returns the list of sleeps."""
    left, sleeps = list(acts), []

    def pause(self: StopRequest, seconds: float) -> None:
        sleeps.append(seconds)
        left.pop(0)()  # type: ignore[operator]

    monkeypatch.setattr(StopRequest, "pause", pause)
    return sleeps


def test_a_shard_whose_holder_dies_after_it_was_passed_is_taken_over(
    tmp_path: Path,
    teacher: Path,
    corpus: Path,
    holder: ExitStack,
    reference: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def still_at_it() -> None:
        assert unfinished(tmp_path) == ["train-0"], "all else is done before the wait"

    sleeps = at_each_pause(monkeypatch, still_at_it, still_at_it, holder.close)
    run(tmp_path, options(teacher, corpus), Worker(1, 2))
    assert len(sleeps) == 3
    assert contents(tmp_path / "store") == reference
    message = " ".join(capsys.readouterr().err.split())
    assert message.count("waiting for train shard 0 (rows 0 to 15): another process") == 1


def test_a_shard_that_its_holder_finishes_is_not_computed_again(
    tmp_path: Path,
    teacher: Path,
    corpus: Path,
    holder: ExitStack,
    reference: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, own = options(teacher, corpus), list[str]()

    def finish() -> None:
        holder.close()
        own.extend(written)
        run(tmp_path, given, Worker(0, 2))

    write, written = ShardWriter.write, list[str]()

    def noted(self: ShardWriter, shard: extract.ShardRange, arrays: dict) -> None:
        written.append(str(shard))
        write(self, shard, arrays)

    monkeypatch.setattr(ShardWriter, "write", noted)
    at_each_pause(monkeypatch, finish)
    run(tmp_path, given, Worker(1, 2))
    assert len(own) == len(written) - 1 and len(set(written)) == len(written)
    assert contents(tmp_path / "store") == reference


def test_time_spent_waiting_is_not_in_the_rate(
    tmp_path: Path,
    teacher: Path,
    corpus: Path,
    holder: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []
    monkeypatch.setattr("pipeline.run.report", lambda *arguments: seen.append(arguments[-1]) or [])
    monkeypatch.setattr(extract, "POLL_SECONDS", 1000.0)
    at_each_pause(monkeypatch, holder.close)
    run(tmp_path, options(teacher, corpus))
    # The sleep itself was left out here, so that less than nothing remains.
    assert len(seen) == 1 and seen[0] < 0


def test_a_failure_of_its_own_ends_a_worker_before_it_waits(
    tmp_path: Path,
    teacher: Path,
    corpus: Path,
    holder: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else two workers could wait for each other, one of them with nothing left that runs."""
    write = ShardWriter.write

    def broken(self: ShardWriter, shard: extract.ShardRange, arrays: dict) -> None:
        if shard.split == "validation":  # the last one
            raise GdistillError("disk full")
        write(self, shard, arrays)

    monkeypatch.setattr(ShardWriter, "write", broken)
    at_each_pause(monkeypatch, lambda: pytest.fail("it waits"))
    with pytest.raises(GdistillError, match="disk full"):
        run(tmp_path, options(teacher, corpus))
    holder.close()
    assert not list((tmp_path / "store").glob(".claims/*"))


def test_sigterm_ends_the_wait(
    tmp_path: Path, teacher: Path, corpus: Path, reference: dict[str, bytes]
) -> None:
    given = options(teacher, corpus)
    total = len([name for name in reference if name.startswith("ledger/")])
    with LocalLocation(tmp_path / "store").claim("train-000000", wait=False):
        worker = start(tmp_path, given, Worker())
        wait_for_shards(tmp_path / "store", total - 1)
        terminate(worker)
        assert end(worker) == 143
    assert unfinished(tmp_path) == ["train-0"]
    assert "1 shards still to do" in (tmp_path / "error-0.txt").read_text()


def test_a_pause_ends_when_the_process_is_asked_to() -> None:
    stop = StopRequest()
    stop.pause(0.0)
    asked = threading.Timer(0.05, stop._event.set)
    asked.start()
    with pytest.raises(Stopped):
        stop.pause(1e6)
    asked.join()
