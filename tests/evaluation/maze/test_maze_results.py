"""Figures that reach README, by hand: pooled cells, the decision rule, agreement, failed jobs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from evaluation.maze import jobs
from evaluation.maze.jobs import Job, run_jobs
from evaluation.maze.report import coverage_table, success_table
from evaluation.maze.results import MazeTask, pool, row_probabilities, sampling_floor
from evaluation.maze.success import Maze, maze_success
from evaluation.maze.teacher_decode import teacher_agreement, teacher_decode
from evaluation.score import wilson_interval
from shards.errors import GdistillError
from shards.testing import DenseNoise

ROUND = ("up", "right", "right", "down")
OTHER = ("up", "right", "down", "right")
MAZE = Maze(("...", "S.T"), (1, 0), (1, 2), (ROUND, OTHER), 4)
TEACHER = {ROUND: 0.75, OTHER: 0.25}


def test_details_of_success_by_hand() -> None:
    """4 of 8 valid: three of one path, one of the other; the rest is mass off the paths."""
    samples = [ROUND] * 3 + [OTHER] + [None, ("up",), ("left",), None]
    details = maze_success(MAZE, samples, TEACHER, "teacher").details
    assert details["num_success"] == 4 and details["num_distinct_paths"] == 2
    assert details["most_common_path_share"] == 3 / 8
    variation = 0.5 * (abs(3 / 8 - 0.75) + abs(1 / 8 - 0.25) + 4 / 8)
    assert details["total_variation_to_teacher"] == pytest.approx(variation)


def test_a_cell_pools_samples_not_runs() -> None:
    """2 of 2 and 1 of 8 samples: 3 of 10, not the mean of 1.0 and 0.125."""
    scores = [
        maze_success(MAZE, [ROUND, OTHER], TEACHER, "teacher"),
        maze_success(MAZE, [ROUND] + [None] * 7, TEACHER, "teacher"),
    ]
    rows = torch.tensor([[0, 1], [0, 2]])
    agreements = [
        teacher_agreement([[0, 1], [0, 1]], rows),
        teacher_agreement([[0, 2]] * 8, torch.tensor([[0, 2]] * 6 + [[0, 1]] * 2)),
    ]
    cell = pool(scores, agreements)
    assert cell["success"] == pytest.approx(0.3) and cell["num_samples"] == 10
    assert cell["interval_95"] == pytest.approx(wilson_interval(3, 10))
    assert cell["success_by_run"] == [1.0, 0.125]
    assert cell["num_distinct_paths"] == 1  # the least that any run shows
    assert cell["num_paths_in_language"] == 2
    assert cell["equal_to_teacher_decode"] == pytest.approx(0.7)
    assert cell["equal_interval_95"] == pytest.approx(wilson_interval(7, 10))
    first, second = 0.5 * (0.25 + 0.25), 0.5 * (abs(1 / 8 - 0.75) + 0.25 + 7 / 8)
    assert cell["total_variation_to_teacher"] == pytest.approx((first + second) / 2)


def test_agreement_counts_whole_rows() -> None:
    rows = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 2, 2]])
    score = teacher_agreement([[0, 1, 2], [0, 1, 2], [0, 2, 2]], rows)
    assert score.value == pytest.approx(2 / 3) and score.details["num_equal"] == 2
    assert score.interval == pytest.approx(wilson_interval(2, 3))
    with pytest.raises(GdistillError, match="one teacher row per sample"):
        teacher_agreement([[0, 1, 2]], rows)


class Bigram:
    """A teacher of three tokens whose next token depends on the last one alone."""

    log_probs = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]).log()

    def __call__(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.log_probs[input_ids], past_key_values=None)


def test_the_teacher_decodes_by_the_first_arrival() -> None:
    """argmax(log p - log t) is the token whose t / p is smallest: by hand from [0] and [1].

    Row 0: from token 0, t / p = 1/.1, 1.5/.6, 1/.3 -> token 1; from 1: 3/.5, 1/.25, 2/.25 -> 1.
    Row 1: from token 1, t / p = 1/.5, 2/.25, 9/.25 -> token 0; from 0: 2/.1, 9/.6, 1/.3 -> 2.
    """
    ones = [1.0, 1.0, 1.0]
    rows = [ones, [1.0, 1.5, 1.0], [3.0, 1.0, 2.0], ones, [1.0, 2.0, 9.0], [2.0, 9.0, 1.0]]
    found = teacher_decode(Bigram(), torch.tensor([0, 1]), DenseNoise(torch.tensor(rows)), 3)
    assert found.tolist() == [[0, 1, 1], [1, 0, 2]]


def test_a_rows_probability_is_the_product_behind_its_first_token() -> None:
    shares = row_probabilities(Bigram(), torch.tensor([[0, 1, 0], [2, 2, 2]]))
    assert shares == pytest.approx([0.6 * 0.5, 0.6 * 0.6])


def test_the_sampling_floor_is_what_the_teacher_itself_would_show() -> None:
    """One draw of a fair coin always misses by 1/2; many draws by sqrt(1 / (2 pi n))."""
    task = MazeTask(MAZE, (), 6, Bigram(), {ROUND: 0.5, OTHER: 0.5}, {})
    assert sampling_floor(task, 1) == pytest.approx(0.5)
    expected = (2 * 3.14159265 * 400) ** -0.5
    assert sampling_floor(task, 400, num_trials=4000) == pytest.approx(expected, rel=0.1)


def cell(success: float) -> dict[str, Any]:
    return {
        "success": success,
        "interval_95": [success - 0.01, success + 0.01],
        "num_distinct_paths": 2,
        "total_variation_to_teacher": 0.25,
        "equal_to_teacher_decode": 0.5,
    }


def results(num_paths: int) -> dict[str, Any]:
    """Every conditioning and rule with a success of its own."""
    models = {
        "none": {"categorical": {"1": cell(0.42)}, "argmax": {"1": cell(0.11)}},
        "gumbel": {"categorical": {"1": cell(0.77)}, "argmax": {"1": cell(0.95)}},
    }
    layout = {"num_paths": num_paths, "optimum": {"1": 0.424}, "models": models}
    return {"layouts": {"k4": layout | {"sampling_floor": 0.03}}}


def test_each_model_is_shown_by_the_rule_that_suits_it() -> None:
    """Without noise the prediction is drawn from; given the noise the text is determined."""
    table = success_table(results(4), "k4")
    rows = {row[0]: row[1] for row in table.rows}
    assert rows["MDLM (categorical)"] == "42.0 [41.0, 43.0]"
    assert rows["MDLM + Gumbel (argmax)"] == "95.0 [94.0, 96.0]"
    assert rows["exact optimum without noise"] == "42.4"
    coverage = {row[0]: row[1] for row in coverage_table(results(4), "k4").rows}
    assert coverage["MDLM + Gumbel: equal to teacher's decode, %"] == "50.0"


def test_the_papers_rows_stand_beside_a_maze_like_its_own_only() -> None:
    small, large = success_table(results(4), "k4"), success_table(results(57), "k4")
    assert [row[1] for row in small.rows if row[0].endswith("paper")] == ["53", "82"]
    assert not [row for row in large.rows if row[0].endswith("paper")]
    assert not [note for note in large.notes if "paper" in note]


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


def job(scripts: Path, name: str) -> Job:
    return Job(name, (name,), scripts / "logs" / f"{name}.log", 1, lambda: 0)


def test_a_job_that_fails_ends_the_walk_with_its_last_line(scripts: Path) -> None:
    run_jobs("work", [job(scripts, "good")], 1)
    with pytest.raises(GdistillError, match=r"bad failed with exit code 3.*got it broke") as caught:
        run_jobs("work", [job(scripts, "good"), job(scripts, "bad")], 2)
    assert caught.value.where.endswith("bad.log")
    with pytest.raises(GdistillError, match="exit code 3"):
        jobs.run_visibly("bad", ("bad",))


def test_jobs_share_the_machines_threads(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    (scripts / "good").write_text("#!/bin/sh\necho threads $OMP_NUM_THREADS\n")
    run_jobs("work", [job(scripts, "good")], 3)
    assert (scripts / "logs" / "good.log").read_text() == "threads 4\n"
