"""Many processes on one store: their bytes are those of one, whoever dies, waits or is stopped."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from pipeline import extract
from pipeline.executors import ExtractStep
from pipeline.run import run_extraction
from pipeline.settings import Worker, resolve_request
from pipeline.teacher import RawLogits, Teacher
from shards.errors import GdistillError, StopRequest, UsageError
from shards.store.location import LocalLocation
from shards.store.store import ShardStore, ShardWriter
from shards.store.verification import verify
from tests.pipeline.conftest import Asked, Patch
from tests.pipeline.extract_cases import ROW_LENGTH, contents, run, times

PAUSE_SECONDS = 0.15
_context = get_context("forkserver")
_context.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Trial:
    """A run in a folder of its own, and the store that one process makes of it."""

    out: Path
    given: dict[str, Any]
    reference: dict[str, bytes]

    def start(self, index: int = 0, count: int = 1, pause: float = 0) -> BaseProcess:
        """A worker in a process of its own; its exit code is the command's."""
        arguments = (self.out, self.given, Worker(index, count), pause)
        process = _context.Process(target=_work, args=arguments)
        process.start()
        return process

    def run(self, index: int = 0, count: int = 1) -> None:
        """A worker in this process."""
        run(self.out, self.given, Worker(index, count))

    def wait_for_shards(self, count: int) -> None:
        """Until that many shards are in the ledger."""
        while len(list(self.out.glob("store/ledger/*/*.json"))) < count:
            time.sleep(0.02)

    def unfinished(self) -> list[str]:
        store = ShardStore.open(self.out / "store", allow_incomplete=True)
        return [f"{shard.split}-{shard.index}" for shard in store.unfinished()]

    def require_bytes_of_one(self) -> None:
        assert contents(self.out / "store") == self.reference


def end(process: BaseProcess) -> int | None:
    """Wait for a worker; its exit code."""
    process.join()
    return process.exitcode


def _work(out: Path, given: dict[str, Any], worker: Worker, pause: float) -> None:
    forward = Teacher.forward

    def slow(self: Teacher, *arguments: Any) -> RawLogits:
        time.sleep(pause)
        return forward(self, *arguments)

    Teacher.forward = slow  # type: ignore[method-assign]
    try:
        run_extraction(resolve_request(out, given), worker)
    except GdistillError as error:
        (out / f"error-{worker.index}.txt").write_text(str(error))
        sys.exit(error.exit_code)


@pytest.fixture
def trial(tmp_path: Path, asked: Asked, reference: dict[str, bytes]) -> Trial:
    return Trial(tmp_path, asked(), reference)


# Two arrays of two at once do no harm either.
@pytest.mark.slow
@pytest.mark.parametrize("workers", [[(0, 2), (1, 2)], [(0, 2), (1, 2), (0, 2), (1, 2)]], ids=len)
def test_processes_write_the_bytes_of_one(trial: Trial, workers: list[tuple[int, int]]) -> None:
    processes = [trial.start(*worker) for worker in workers]
    assert [end(process) for process in processes] == [0] * len(workers)
    trial.require_bytes_of_one()


@pytest.mark.slow
def test_accelerate_writes_the_bytes_of_one(trial: Trial, teacher: Path, corpus: Path) -> None:
    words = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    words += f" --dynamo_backend no --main_process_port 0 -m pipeline.cli --out {trial.out} --corpus text:{corpus}"
    words += f" --teacher {teacher} --row-length {ROW_LENGTH} --batch-size 4 --device cpu"
    settings = "corpus.document_separator=line corpus.validation_fraction=0.1 codec.num_entries=5"
    settings += " store.rows_per_shard=16 store.rows_per_chunk=8 threads=1"
    given = [sys.executable, *words.split(), *(f"--set={each}" for each in settings.split())]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trial.require_bytes_of_one()


def require_full_bar(capsys: pytest.CaptureFixture[str]) -> None:
    done, total = re.findall(r"extract: (\S+)/(\S+) tok", capsys.readouterr().err)[-1]
    assert done == total


def test_shards_of_a_killed_worker_are_taken_up_by_the_next_run(trial: Trial, capsys: Any) -> None:
    worker = trial.start(pause=PAUSE_SECONDS)
    trial.wait_for_shards(2)
    worker.kill()
    end(worker)
    assert trial.unfinished(), "it was killed in the middle"
    trial.run()
    require_full_bar(capsys)
    trial.require_bytes_of_one()


def test_sigterm_drops_the_shard_in_work_and_says_what_remains(trial: Trial) -> None:
    worker = trial.start(pause=PAUSE_SECONDS)
    trial.wait_for_shards(1)
    worker.terminate()
    assert end(worker) == 143
    message, store = (trial.out / "error-0.txt").read_text(), trial.out / "store"
    left = trial.unfinished()
    assert left and f"SIGTERM [{store}]; got {len(left)} shards still to do" in message
    assert {problem.what for problem in verify(store)} == {"the shard is not finished"}
    trial.run()
    trial.require_bytes_of_one()


# Shards that others hold.


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[ExitStack]:
    """Another process's claim on the first shard; closing it is that process's death."""
    store = LocalLocation(tmp_path / "store")
    with ExitStack() as claim:
        assert claim.enter_context(store.claim("train-000000", wait=False))
        yield claim


Pauses = Callable[..., list[float]]


@pytest.fixture
def at_each_pause(monkeypatch: Patch) -> Pauses:
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
    trial: Trial, holder: ExitStack, at_each_pause: Pauses, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ExitStack()
    assert other.enter_context(LocalLocation(trial.out / "store").claim("train-000002", wait=False))

    def still_at_it() -> None:
        assert trial.unfinished() == ["train-0", "train-2"], "all else is done before the wait"
        other.close()

    sleeps = at_each_pause(still_at_it, lambda: None, holder.close)
    trial.run(1, 2)
    assert len(sleeps) == 3
    trial.require_bytes_of_one()
    message = " ".join(capsys.readouterr().err.split())
    assert message.count("waiting for train shard 0 (rows 0 to 15) and 1 more: another process") == 1


def test_a_shard_that_its_holder_finishes_is_not_computed_again(
    trial: Trial, holder: ExitStack, at_each_pause: Pauses, monkeypatch: Patch, capsys: Any
) -> None:
    """But it is counted by the bar."""
    write, written, own = ShardWriter.write, list[str](), list[str]()

    def finish() -> None:
        holder.close()
        own.extend(written)
        trial.run(1, 2)

    def noted(self: ShardWriter, shard: Any, arrays: dict[str, Any]) -> None:
        written.append(str(shard))
        write(self, shard, arrays)

    monkeypatch.setattr(ShardWriter, "write", noted)
    at_each_pause(finish)
    trial.run(0, 2)
    require_full_bar(capsys)
    assert len(own) == len(written) - 1 and len(set(written)) == len(written)
    trial.require_bytes_of_one()


def test_time_spent_waiting_is_not_in_the_rate(
    trial: Trial, holder: ExitStack, at_each_pause: Pauses, monkeypatch: Patch
) -> None:
    seen: list[float] = []
    monkeypatch.setattr("pipeline.run.report", lambda *arguments: seen.append(arguments[-1]) or [])
    monkeypatch.setattr(extract, "POLL_SECONDS", 1000.0)
    at_each_pause(holder.close)
    trial.run()
    # The sleep itself was left out here, so that less than nothing remains.
    assert len(seen) == 1 and seen[0] < 0


def test_a_failure_of_its_own_ends_a_worker_before_it_waits(
    trial: Trial, holder: ExitStack, at_each_pause: Pauses, monkeypatch: Patch
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
        trial.run()
    holder.close()
    assert not list(trial.out.glob("store/.claims/*"))


@pytest.mark.usefixtures("holder")
def test_sigterm_ends_the_wait(trial: Trial) -> None:
    total = len([name for name in trial.reference if name.startswith("ledger/")])
    worker = trial.start()
    trial.wait_for_shards(total - 1)
    worker.terminate()
    assert end(worker) == 143
    assert trial.unfinished() == ["train-0"]
    assert "1 shards still to do" in (trial.out / "error-0.txt").read_text()


# Who does what.


def test_workers_know_their_number_from_the_launcher() -> None:
    torchrun = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0"}
    srun = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    for options, environment, expected in (
        ((None, None), torchrun, Worker(9, 16, 1)),
        ((None, None), mpi, Worker(1, 2, 1)),
        ((None, None), mpich, Worker(1, 3, 0)),
        ((None, None), srun, Worker(5, 8, 1)),
        ((None, None), srun | torchrun, Worker(9, 16, 1)),
        ((None, None), {}, Worker()),
        ((2, 3), {}, Worker(2, 3)),
        ((2, 3), torchrun, Worker(2, 3, 1)),
        ((2, 3), {"SLURM_LOCALID": "3"}, Worker(2, 3, 3)),
    ):
        assert Worker.from_environment(*options, environment) == expected
    bad: list[tuple[tuple[int | None, int | None], dict[str, str], str]] = [
        ((1, None), {}, "belong together"),
        ((3, 3), {}, "no such worker"),
        ((0, 0), {}, r"--workers.*got 0.*at least 1"),
    ]
    for name in torchrun:
        message = rf"variable {name}\]; got 'two'.*--workers"
        bad.append(((None, None), {**torchrun, name: "two"}, message))
    for numbers, environment, message in bad:
        with pytest.raises(UsageError, match=message):
            Worker.from_environment(*numbers, environment)


def test_every_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch: Patch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for asked in ("auto", "cuda"):
        found = [Worker(i, 6, i).device(asked) for i in range(6)]
        assert found == [f"cuda:{i}" for i in (0, 1, 2, 3, 0, 1)]
    assert Worker(1, 2, 1).device("cuda:3") == "cuda:3"
    assert Worker(9, 16, 1).device("cpu") == "cpu"
    assert Worker(1, 2).device("cuda") == "cuda", "nothing tells its number on the machine"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert Worker(1, 2, 1).device("auto") == "cpu"


def test_every_worker_begins_elsewhere_and_comes_to_every_shard() -> None:
    assert Worker(1, 3).order([0, 1, 2, 3, 4]) == [1, 4, 2, 0, 3]
    assert Worker(5, 6).order([0, 1]) == [0, 1]


# Steps of datatrove.


@pytest.mark.slow
def test_tasks_of_datatrove_write_the_store_of_one_command(trial: Trial) -> None:
    local = pytest.importorskip("datatrove.executor", reason="pip install datatrove")
    before = None
    for tasks in (1, 2):
        step = ExtractStep(str(trial.out), trial.given, tokens_only=tasks == 1)
        how = {"logging_dir": str(trial.out / "logs"), "skip_completed": False, "depends": before}
        before = local.LocalPipelineExecutor([step], tasks=tasks, **how)
    before.run()
    trial.require_bytes_of_one()


def test_documents_pass_and_what_is_done_stays(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    """Without datatrove: a step is a call; the first task alone speaks."""
    out, store = str(trial.out), trial.out / "store"
    assert list(ExtractStep(out, trial.given, tokens_only=True)()) == []
    assert (trial.out / "tokens").exists() and not store.exists()
    assert capsys.readouterr().out
    step = ExtractStep(out, trial.given)
    assert list(step(iter(["a document"]), 1, 2)) == ["a document"]
    assert capsys.readouterr().out == ""
    trial.require_bytes_of_one()
    before = times(store)
    assert list(step(None, 0, 2)) == [] and times(store) == before and capsys.readouterr().out
