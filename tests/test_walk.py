"""From corpus to scores through the commands, with the teacher gone before training starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shards.store.store import ShardStore
from tests.commands import python

REPOSITORY = Path(__file__).resolve().parent.parent
BLOCKER = """
import sys

class NoTeacher:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "pipeline":
            raise ImportError("the trainer must not need " + name)

sys.meta_path.insert(0, NoTeacher())
"""
SMALL = ("model.hidden_size=32", "model.num_layers=1", "training.num_steps=4")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished extraction of the maze from which the teacher and the tokens were removed."""
    home = tmp_path_factory.mktemp("walk")
    words = ("gdistill-extract", "--corpus", "maze:k4", "--teacher-preset", "demo", "--out", home)
    done = python("-m", "tests.commands", told=json.dumps([*map(str, words)]))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    shutil.rmtree(home / "teacher")
    shutil.rmtree(home / "tokens")
    return home


@pytest.fixture(scope="module")
def teacherless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where Python looks if ``pipeline``, the teacher's room, is to be impossible to import."""
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return f"{folder}:{REPOSITORY}"


def commands(home: Path, student: str, conditioning: str, out: Path) -> list[list[str]]:
    """Train, sample and score."""
    settings = [word for setting in SMALL for word in ("--set", setting)]
    train = ["run", "--store", home / "store", "--student", student, "--preset", "maze"]
    train += ["--conditioning", conditioning, "--out", out, *settings]
    sample = [out / "model", "--num", 8, "--nfe", 2, "--out", out / "samples"]
    score = [out / "samples", "--maze", home / "store" / "corpus" / "maze.json"]
    named = {"gdistill-train": train, "gdistill-sample": sample, "gdistill-eval": score}
    return [[name, *map(str, words)] for name, words in named.items()]


def test_one_store_serves_many_students_without_a_teacher(home: Path, teacherless: str, tmp_path: Path) -> None:
    blocked = python("-c", "import pipeline", path=teacherless)
    assert blocked.returncode != 0 and "must not need" in blocked.stderr
    before = ShardStore.open(home / "store").manifest.sha256
    students = [("mdlm", "none"), ("mdlm", "gumbel"), ("bd3lm", "gumbel")]
    outs = [tmp_path / "-".join(names) for names in students]
    lines = [
        json.dumps(words) for names, out in zip(students, outs, strict=True) for words in commands(home, *names, out)
    ]
    done = python("-m", "tests.commands", path=teacherless, told="\n".join(lines))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("maze_success") >= len(outs)
    for out in outs:
        scores = (out / "samples" / "results.json").read_text()
        assert "maze_success" in scores and "entropy_nats" in scores
        rows = (out / "samples" / "samples.jsonl").read_text().splitlines()
        assert len(rows) == 8 and all(len(json.loads(row)["tokens"]) == 11 for row in rows)
    assert ShardStore.open(home / "store").manifest.sha256 == before
