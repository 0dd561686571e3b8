"""From corpus to scores through the commands, with the teacher gone before training starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shards.store.store import ShardStore

BLOCKER = """
import sys

class NoTeacher:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "pipeline":
            raise ImportError("the trainer must not need " + name)

sys.meta_path.insert(0, NoTeacher())
"""
SMALL = ("model.hidden_size=32", "model.num_layers=1", "training.num_steps=4")


def run(name: str, *arguments: object, path: Path | None = None) -> str:
    """Output of one command; ``path`` is put in front of what it can import."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if path:
        environment["PYTHONPATH"] = str(path)
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished extraction of the maze from which the teacher and the tokens were removed."""
    home = tmp_path_factory.mktemp("walk")
    run("gdistill-extract", "--corpus", "maze:k4", "--teacher-preset", "demo", "--out", home)
    shutil.rmtree(home / "teacher")
    shutil.rmtree(home / "tokens")
    return home


@pytest.fixture(scope="module")
def teacherless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes ``pipeline``, the teacher's room, impossible to import."""
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return folder


def test_the_blocker_blocks(teacherless: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(teacherless)}
    command = [sys.executable, "-c", "import pipeline"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "must not need" in done.stderr


@pytest.mark.parametrize(
    ("student", "conditioning"), [("mdlm", "none"), ("mdlm", "gumbel"), ("bd3lm", "gumbel")]
)
def test_one_store_serves_many_students_without_a_teacher(
    home: Path, teacherless: Path, tmp_path: Path, student: str, conditioning: str
) -> None:
    before = ShardStore.open(home / "store").manifest.sha256
    out, samples = tmp_path / "run", tmp_path / "samples"
    settings = [word for setting in SMALL for word in ("--set", setting)]
    arguments = ("--store", home / "store", "--student", student, "--preset", "maze")
    arguments += ("--conditioning", conditioning, "--out", out, *settings)
    run("gdistill-train", "run", *arguments, path=teacherless)
    sampling = ("--num", 8, "--nfe", 2, "--out", samples)
    run("gdistill-sample", out / "model", *sampling, path=teacherless)
    maze = home / "store" / "corpus" / "maze.json"
    table = run("gdistill-eval", samples, "--maze", maze, path=teacherless)
    assert "maze_success" in table and "entropy_nats" in table
    rows = [json.loads(line) for line in (samples / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and all(len(row["tokens"]) == 11 for row in rows)
    assert ShardStore.open(home / "store").manifest.sha256 == before
