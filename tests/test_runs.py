"""The real recipe as one script, run at toy size; the job scripts are sound shell."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.extract_cases import WORDS, save_teacher

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "script", sorted((REPOSITORY / "runs").rglob("*.s*")), ids=lambda p: p.name
)
def test_scripts_are_sound_shell(script: Path) -> None:
    if script.is_file():
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_recipe_runs_from_text_to_scores(tmp_path: Path) -> None:
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
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = ["bash", str(REPOSITORY / "runs/owt.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    for student in ("mdlm-none", "mdlm-gumbel", "bd3lm-none", "bd3lm-gumbel"):
        results = json.loads((out / "samples" / student / "results.json").read_text())
        assert results, student
