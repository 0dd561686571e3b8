"""What the maze walk refuses, before it starts the work."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evaluation.maze import walk as maze_walk
from evaluation.maze.jobs import run_jobs, script
from evaluation.maze.results import display_name, natural_rule, sample_file
from evaluation.maze.walk import StudentRun, WalkConfig, app
from shards.errors import GdistillError, UsageError

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "maze-demo.toml"


@pytest.mark.parametrize("number", [0, -1])
def test_no_job_at_a_time_is_refused_before_anything_is_made(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maze_walk, "extract", lambda *_: pytest.fail("the walk began"))
    arguments = ["--config", str(CONFIG), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--parallel", str(number)])
    assert isinstance(done.exception, UsageError)
    assert f"[--parallel]; got {number}; expected at least 1" in str(done.exception)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="--parallel"):
        run_jobs("train", [], number)


def test_an_out_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    done = CliRunner().invoke(app, ["--config", str(CONFIG), "--out", str(taken)])
    assert isinstance(done.exception, UsageError) and str(taken) in str(done.exception)


def test_a_command_that_is_not_installed_is_named() -> None:
    with pytest.raises(UsageError, match="gdistill-nothing"):
        script("gdistill-nothing")


def test_the_config_documents_the_fields_it_has() -> None:
    section = (WalkConfig.__doc__ or "").split("Attributes:")[1]
    documented = re.findall(r"^\s+(\w+): ", section, flags=re.MULTILINE)
    assert documented == [field.name for field in dataclasses.fields(WalkConfig)]


def test_recipes_add_students_beside_the_two_usual_ones(tmp_path: Path) -> None:
    config = WalkConfig(recipes={"none": ["a=1"], "read again": ["b=2"]})
    assert config.kinds == ("none", "gumbel", "read again")
    run = StudentRun("m57", "read again", 3, tmp_path)
    assert (run.conditioning, run.directory.name) == ("gumbel", "mdlm-read-again-seed3")
    assert (display_name("read again"), natural_rule("read again")) == (
        "MDLM + Gumbel, read again",
        "argmax",
    )
    assert (StudentRun("k4", "none", 1, tmp_path).conditioning, natural_rule("none")) == (
        "none",
        "categorical",
    )


def test_samples_of_one_budget_are_found_under_the_name_the_sampler_gives(tmp_path: Path) -> None:
    with pytest.raises(GdistillError, match="samples are missing"):
        sample_file(tmp_path, 8)
    (tmp_path / "samples.jsonl").write_text("")
    assert sample_file(tmp_path, 8).name == "samples.jsonl"
