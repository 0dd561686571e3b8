from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.workers import StopRequest, Worker
from shards.errors import UsageError
from shards.store.store import ShardStore
from shards.store.verification import verify
from tests.pipeline.extract.parallel_trials import end, run_all, start, terminate, wait_for_shards
from tests.pipeline.extract_cases import ROW_LENGTH, contents, options, run

PAUSE_SECONDS = 0.15


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_write_the_bytes_of_one(
    tmp_path: Path, teacher: Path, corpus: Path, reference: dict[str, bytes], count: int
) -> None:
    assert run_all(tmp_path, options(teacher, corpus), count) == [0] * count
    assert contents(tmp_path / "store") == reference


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
    tmp_path: Path, teacher: Path, corpus: Path, reference: dict[str, bytes]
) -> None:
    given = options(teacher, corpus)
    worker = start(tmp_path, given, Worker(0, 1), PAUSE_SECONDS)
    wait_for_shards(tmp_path / "store", 2)
    worker.kill()
    end(worker)
    left = ShardStore.open(tmp_path / "store", allow_incomplete=True).unfinished()
    assert left, "it was killed in the middle"
    run(tmp_path, given)
    assert contents(tmp_path / "store") == reference


def test_shards_of_a_killed_worker_are_taken_up_by_a_living_one(
    tmp_path: Path, teacher: Path, corpus: Path, reference: dict[str, bytes]
) -> None:
    given = options(teacher, corpus)
    victim = start(tmp_path, given, Worker(1, 2), PAUSE_SECONDS)
    wait_for_shards(tmp_path / "store", 1)
    survivor = start(tmp_path, given, Worker(0, 2), PAUSE_SECONDS)
    victim.kill()
    end(victim)
    assert end(survivor) == 0
    assert contents(tmp_path / "store") == reference


def test_sigterm_drops_the_shard_in_work_and_says_what_remains(
    tmp_path: Path, teacher: Path, corpus: Path, reference: dict[str, bytes]
) -> None:
    given = options(teacher, corpus)
    worker = start(tmp_path, given, Worker(), PAUSE_SECONDS)
    wait_for_shards(tmp_path / "store", 2)
    terminate(worker)
    assert end(worker) == 143
    left = ShardStore.open(tmp_path / "store", allow_incomplete=True).unfinished()
    message = (tmp_path / "error-0.txt").read_text()
    assert f"{len(left)} shards still to do" in message and "same command again" in message
    assert {problem.what for problem in verify(tmp_path / "store")} == {"the shard is not finished"}
    run(tmp_path, given)
    assert contents(tmp_path / "store") == reference


def test_two_whole_job_arrays_at_once_do_no_harm(
    tmp_path: Path, teacher: Path, corpus: Path, reference: dict[str, bytes]
) -> None:
    given = options(teacher, corpus)
    workers = [start(tmp_path, given, Worker(index % 2, 2)) for index in range(4)]
    assert [end(worker) for worker in workers] == [0] * 4
    assert contents(tmp_path / "store") == reference


def test_workers_know_their_number_from_the_launcher() -> None:
    torchrun = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
    assert Worker.from_environment(None, None, torchrun) == Worker(9, 16, 1)
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert Worker.from_environment(None, None, mpi) == Worker(1, 2, 1)
    srun = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    assert Worker.from_environment(None, None, srun) == Worker(5, 8, 1)
    assert Worker.from_environment(None, None, srun | torchrun) == Worker(9, 16, 1)
    assert Worker.from_environment(2, 3, {}) == Worker(2, 3)
    assert Worker.from_environment(2, 3, torchrun) == Worker(2, 3, 1)
    assert Worker.from_environment(2, 3, {"SLURM_LOCALID": "3"}) == Worker(2, 3, 3)
    assert Worker.from_environment(None, None, {}) == Worker()
    assert Worker(9, 16, 1).device("cpu") == "cpu"
    assert Worker(9, 16, 1).device("cuda").startswith("cuda:")
    with pytest.raises(UsageError, match="belong together"):
        Worker.from_environment(1, None, {})
    with pytest.raises(UsageError, match="no such worker"):
        Worker.from_environment(3, 3, {})
    with pytest.raises(UsageError, match=r"--workers.*got 0.*at least 1"):
        Worker(0, 0)
    for name in torchrun:
        with pytest.raises(UsageError, match=rf"variable {name}\]; got 'two'.*--workers"):
            Worker.from_environment(None, None, {**torchrun, name: "two"})


def test_every_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for asked in ("auto", "cuda"):
        assert [Worker(i, 6, i).device(asked) for i in range(6)] == [
            *("cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0", "cuda:1")
        ]
    assert Worker(1, 2, 1).device("cuda:3") == "cuda:3"
    assert Worker(1, 2).device("cuda") == "cuda", "nothing tells its number on the machine"


def test_every_worker_begins_elsewhere_and_comes_to_every_shard() -> None:
    orders = [Worker(index, 3).order(range(8)) for index in range(3)]
    assert [order[0] for order in orders] == [0, 1, 2]
    assert all(sorted(order) == list(range(8)) for order in orders)
    own = [set(order[: len(range(index, 8, 3))]) for index, order in enumerate(orders)]
    assert sorted(shard for part in own for shard in part) == list(range(8))


def test_stop_request_leaves_other_handlers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().listening() as stop:
        assert signal.getsignal(signal.SIGTERM) is not before
        stop.check()
    assert signal.getsignal(signal.SIGTERM) is before
