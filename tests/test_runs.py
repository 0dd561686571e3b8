"""The real recipe as one script, run at toy size; the job scripts are sound shell."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import call, scripts
from tests.pipeline.extract_cases import WORDS, save_teacher

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "script", sorted((REPOSITORY / "runs").rglob("*.s*")), ids=lambda p: p.name
)
def test_scripts_are_sound_shell(script: Path) -> None:
    if script.is_file():
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def recorded_commands(
    script: Path, place: Path, environment: dict[str, str], *words: str
) -> list[list[str]]:
    """The words of every command of the project that a script gives, none of which is run."""
    (place / "runs").mkdir(parents=True)
    (place / ".venv/bin").mkdir(parents=True)
    copy, told = shutil.copy(script, place / "runs"), place / "told"
    for name in scripts():
        file = place / ".venv/bin" / name
        file.write_text(f"#!/bin/sh\nprintf '%s\\n' {name} \"$@\" '' >>'{told}'\n")
        file.chmod(0o755)
    command = ["bash", copy, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return [block.split("\n") for block in told.read_text().strip().split("\n\n")]


def test_the_recipe_runs_from_text_to_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands one after the other, in this process: to start fifteen takes longest."""
    teacher = save_teacher(tmp_path / "teacher")
    draw = random.Random(0)
    documents = [" ".join(draw.choices(WORDS[2:], k=30)) for _ in range(80)]
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    out = tmp_path / "out"
    environment = os.environ | {
        "SIZE": "toy",
        "TEXT": str(tmp_path / "text.txt"),
        "TEACHER": str(teacher),
        "OUT": str(out),
        "ROW_LENGTH": "12",
        "STEPS": "2",
    }
    monkeypatch.setattr("evaluation.text.reading.user_cache", lambda: tmp_path / "cache")
    commands = recorded_commands(REPOSITORY / "runs/owt.sh", tmp_path / "clone", environment)
    assert [words[0] for words in commands[:2]] == ["gdistill-extract", "gdistill-train"]
    for words in commands:
        assert call(*words) == 0, f"{words}\n{capsys.readouterr().err[-3000:]}"
    for student in ("mdlm-none", "mdlm-gumbel", "bd3lm-none", "bd3lm-gumbel"):
        results = json.loads((out / "samples" / student / "results.json").read_text())
        assert results, student
