"""Commands side by side: what is reported, and what a failure leaves."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import jobs
from benchmarks.jobs import Job, run_jobs, run_visibly, script, share_of_training
from shards.errors import GdistillError, UsageError


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands of the project, as shell scripts."""
    for name, code in (("good", "exit 0"), ("bad", "echo first; echo it broke; exit 3")):
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{code}\n")
        file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)
    return tmp_path


def job(scripts: Path, name: str, share: float = 0.0) -> Job:
    return Job(name, (name,), scripts / "logs" / f"{name}.log", lambda: share)


def test_a_job_that_fails_ends_all_with_its_last_line(scripts: Path) -> None:
    told: list[float] = []
    run_jobs([job(scripts, "good"), job(scripts, "good")], 1, lambda share, _: told.append(share))
    assert told[-1] == 1.0 and told == sorted(told)
    (scripts / "good").write_text("#!/bin/sh\nexec sleep 600\n")  # is ended, not waited for
    both = [job(scripts, "good"), job(scripts, "bad")]
    with pytest.raises(GdistillError, match=r"bad failed with exit code 3.*got it broke") as caught:
        run_jobs(both, 2, lambda *_: None)
    assert caught.value.where.endswith("bad.log")
    with pytest.raises(GdistillError, match="exit code 3"):
        run_visibly("bad", ("bad",))


def test_jobs_share_the_machines_threads(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    (scripts / "good").write_text("#!/bin/sh\necho threads $OMP_NUM_THREADS\n")
    run_jobs([job(scripts, "good")], 3, lambda *_: None)
    assert (scripts / "logs" / "good.log").read_text() == "threads 4\n"


def test_no_job_at_a_time_and_no_such_command_are_refused(scripts: Path) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        run_jobs([job(scripts, "good")], 0, lambda *_: None)
    with pytest.raises(UsageError, match="gdistill-nothing"):
        script("gdistill-nothing")


def test_a_trainings_share_is_of_its_last_whole_line(tmp_path: Path) -> None:
    share = share_of_training(tmp_path / "metrics.jsonl")
    assert share() == 0.0
    lines = [json.dumps({"step": step, "num_steps": 40}) for step in (1, 10)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert share() == 0.25
