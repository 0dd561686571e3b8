"""Many processes on one store: their bytes are those of one, whoever dies, waits or is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline import extract
from pipeline.settings import Worker
from shards.errors import GdistillError, UsageError
from shards.interrupts import Stopped, StopRequest
from shards.store.location import LocalLocation
from shards.store.store import ShardStore
from shards.store.verification import verify
from shards.store.writer import ShardWriter
from tests.pipeline.extract.parallel_trials import end, start, wait_for_shards
from tests.pipeline.extract_cases import ROW_LENGTH, contents, options, run

PAUSE_SECONDS = 0.15


@pytest.fixture
def given(teacher: Path, corpus: Path) -> dict[str, Any]:
    return options(teacher, corpus)


def unfinished(out: Path) -> list[str]:
    store = ShardStore.open(out / "store", allow_incomplete=True)
    return [f"{shard.split}-{shard.index}" for shard in store.unfinished()]


# Two arrays of two at once do no harm either.
@pytest.mark.slow
@pytest.mark.parametrize("workers", [[(0, 2), (1, 2)], [(0, 2), (1, 2), (0, 2), (1, 2)]], ids=len)
def test_several_processes_write_the_bytes_of_one(
    tmp_path: Path,
    given: dict[str, Any],
    reference: dict[str, bytes],
    workers: list[tuple[int, int]],
) -> None:
    processes = [start(tmp_path, given, Worker(*worker)) for worker in workers]
    assert [end(process) for process in processes] == [0] * len(workers)
    assert contents(tmp_path / "store") == reference


@pytest.mark.slow
def test_accelerate_launch_writes_the_bytes_of_one(
    tmp_path: Path, teacher: Path, corpus: Path, reference: dict[str, bytes]
) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "--main_process_port", "0", "-m", "pipeline.cli"]
    command += ["--out", str(tmp_path), "--corpus", f"text:{corpus}", "--teacher", str(teacher)]
    command += ["--row-length", str(ROW_LENGTH), "--batch-size", "4", "--device", "cpu"]
    for setting in (
        "corpus.document_separator=line",
        "corpus.validation_fraction=0.1",
        "codec.num_entries=5",
        "store.rows_per_shard=16",
        "store.rows_per_chunk=8",
        "threads=1",
    ):
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "store") == reference


def test_shards_of_a_killed_worker_are_taken_up_by_the_next_run(
    tmp_path: Path, given: dict[str, Any], reference: dict[str, bytes]
) -> None:
    worker = start(tmp_path, given, Worker(0, 1), PAUSE_SECONDS)
    wait_for_shards(tmp_path / "store", 2)
    worker.kill()
    end(worker)
    assert unfinished(tmp_path), "it was killed in the middle"
    run(tmp_path, given)
    assert contents(tmp_path / "store") == reference


@pytest.mark.slow
def test_shards_of_a_killed_worker_are_taken_up_by_a_living_one(
    tmp_path: Path, given: dict[str, Any], reference: dict[str, bytes]
) -> None:
    victim = start(tmp_path, given, Worker(1, 2), PAUSE_SECONDS)
    wait_for_shards(tmp_path / "store", 1)
    survivor = start(tmp_path, given, Worker(0, 2), PAUSE_SECONDS)
    victim.kill()
    end(victim)
    assert end(survivor) == 0
    assert contents(tmp_path / "store") == reference


def test_sigterm_drops_the_shard_in_work_and_says_what_remains(
    tmp_path: Path, given: dict[str, Any], reference: dict[str, bytes]
) -> None:
    worker = start(tmp_path, given, Worker(), PAUSE_SECONDS)
    wait_for_shards(tmp_path / "store", 1)
    worker.terminate()
    assert end(worker) == 143
    message = (tmp_path / "error-0.txt").read_text()
    left = unfinished(tmp_path)
    assert left and f"SIGTERM [{tmp_path / 'store'}]; got {len(left)} shards still to do" in message
    assert {problem.what for problem in verify(tmp_path / "store")} == {"the shard is not finished"}
    run(tmp_path, given)
    assert contents(tmp_path / "store") == reference


# Shards that others hold.


@pytest.fixture
def holder(tmp_path: Path) -> ExitStack:
    """Another process's claim on the first shard; closing it is that process's death."""
    claim = ExitStack()
    assert claim.enter_context(LocalLocation(tmp_path / "store").claim("train-000000", wait=False))
    return claim


@pytest.fixture
def at_each_pause(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Do the next act instead of each sleep; returns the list of sleeps."""

    def acting(*acts: Callable[[], None]) -> list[float]:
        left, sleeps = list(acts), list[float]()

        def pause(self: StopRequest, seconds: float) -> None:
            sleeps.append(seconds)
            left.pop(0)()

        monkeypatch.setattr(StopRequest, "pause", pause)
        return sleeps

    return acting


def test_a_shard_whose_holder_dies_after_it_was_passed_is_taken_over(
    tmp_path: Path,
    given: dict[str, Any],
    holder: ExitStack,
    reference: dict[str, bytes],
    at_each_pause: Callable[..., list[float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def still_at_it() -> None:
        assert unfinished(tmp_path) == ["train-0"], "all else is done before the wait"

    sleeps = at_each_pause(still_at_it, still_at_it, holder.close)
    run(tmp_path, given, Worker(1, 2))
    assert len(sleeps) == 3
    assert contents(tmp_path / "store") == reference
    message = " ".join(capsys.readouterr().err.split())
    assert message.count("waiting for train shard 0 (rows 0 to 15): another process") == 1


def test_a_shard_that_its_holder_finishes_is_not_computed_again(
    tmp_path: Path,
    given: dict[str, Any],
    holder: ExitStack,
    reference: dict[str, bytes],
    at_each_pause: Callable[..., list[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, written, own = ShardWriter.write, list[str](), list[str]()

    def finish() -> None:
        holder.close()
        own.extend(written)
        run(tmp_path, given, Worker(0, 2))

    def noted(self: ShardWriter, shard: Any, arrays: dict[str, Any]) -> None:
        written.append(str(shard))
        write(self, shard, arrays)

    monkeypatch.setattr(ShardWriter, "write", noted)
    at_each_pause(finish)
    run(tmp_path, given, Worker(1, 2))
    assert len(own) == len(written) - 1 and len(set(written)) == len(written)
    assert contents(tmp_path / "store") == reference


def test_time_spent_waiting_is_not_in_the_rate(
    tmp_path: Path,
    given: dict[str, Any],
    holder: ExitStack,
    at_each_pause: Callable[..., list[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []
    monkeypatch.setattr("pipeline.run.report", lambda *arguments: seen.append(arguments[-1]) or [])
    monkeypatch.setattr(extract, "POLL_SECONDS", 1000.0)
    at_each_pause(holder.close)
    run(tmp_path, given)
    # The sleep itself was left out here, so that less than nothing remains.
    assert len(seen) == 1 and seen[0] < 0


def test_a_failure_of_its_own_ends_a_worker_before_it_waits(
    tmp_path: Path,
    given: dict[str, Any],
    holder: ExitStack,
    at_each_pause: Callable[..., list[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else two workers could wait for each other, one of them with nothing left that runs."""
    write = ShardWriter.write

    def broken(self: ShardWriter, shard: Any, arrays: dict[str, Any]) -> None:
        if shard.split == "validation":  # the last one
            raise GdistillError("disk full")
        write(self, shard, arrays)

    monkeypatch.setattr(ShardWriter, "write", broken)
    at_each_pause(lambda: pytest.fail("it waits"))
    with pytest.raises(GdistillError, match="disk full"):
        run(tmp_path, given)
    holder.close()
    assert not list((tmp_path / "store").glob(".claims/*"))


def test_sigterm_ends_the_wait(
    tmp_path: Path, given: dict[str, Any], reference: dict[str, bytes]
) -> None:
    total = len([name for name in reference if name.startswith("ledger/")])
    with LocalLocation(tmp_path / "store").claim("train-000000", wait=False):
        worker = start(tmp_path, given, Worker())
        wait_for_shards(tmp_path / "store", total - 1)
        worker.terminate()
        assert end(worker) == 143
    assert unfinished(tmp_path) == ["train-0"]
    assert "1 shards still to do" in (tmp_path / "error-0.txt").read_text()


def test_a_pause_ends_when_the_process_is_asked_to() -> None:
    before, stop = signal.getsignal(signal.SIGTERM), StopRequest(signal.SIGTERM)
    with stop.listening():
        stop.pause(0.0)
        asked = threading.Timer(0.05, signal.raise_signal, [signal.SIGTERM])
        asked.start()
        with pytest.raises(Stopped, match="SIGTERM"):
            stop.pause(1e6)
        asked.join()
    assert signal.getsignal(signal.SIGTERM) is before


# Who does what.


def test_workers_know_their_number_from_the_launcher() -> None:
    torchrun = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    srun = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    for options_, environment, expected in (
        ((None, None), torchrun, Worker(9, 16, 1)),
        ((None, None), mpi, Worker(1, 2, 1)),
        ((None, None), srun, Worker(5, 8, 1)),
        ((None, None), srun | torchrun, Worker(9, 16, 1)),
        ((None, None), {}, Worker()),
        ((2, 3), {}, Worker(2, 3)),
        ((2, 3), torchrun, Worker(2, 3, 1)),
        ((2, 3), {"SLURM_LOCALID": "3"}, Worker(2, 3, 3)),
    ):
        assert Worker.from_environment(*options_, environment) == expected
    for options_, message in (
        ((1, None), "belong together"),
        ((3, 3), "no such worker"),
        ((0, 0), r"--workers.*got 0.*at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            Worker.from_environment(*options_, {})
    for name in torchrun:
        with pytest.raises(UsageError, match=rf"variable {name}\]; got 'two'.*--workers"):
            Worker.from_environment(None, None, {**torchrun, name: "two"})


def test_every_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for asked in ("auto", "cuda"):
        found = [Worker(i, 6, i).device(asked) for i in range(6)]
        assert found == [f"cuda:{i}" for i in (0, 1, 2, 3, 0, 1)]
    assert Worker(1, 2, 1).device("cuda:3") == "cuda:3"
    assert Worker(9, 16, 1).device("cpu") == "cpu"
    assert Worker(1, 2).device("cuda") == "cuda", "nothing tells its number on the machine"


def test_every_worker_begins_elsewhere_and_comes_to_every_shard() -> None:
    assert Worker(1, 3).order([0, 1, 2, 3, 4]) == [1, 4, 2, 0, 3]
    assert Worker(5, 6).order([0, 1]) == [0, 1]
    orders = [Worker(index, 3).order(range(8)) for index in range(3)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    own = [order[: len(range(index, 8, 3))] for index, order in enumerate(orders)]
    assert sorted(shard for part in own for shard in part) == list(range(8))
