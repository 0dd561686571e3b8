"""The real recipe as one script, run at toy size; the job scripts are sound shell."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

from tests.commands import call, scripts
from tests.pipeline.extract_cases import WORDS, save_teacher
from trainer.training.parallel import follow_srun

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = [path for path in sorted((REPOSITORY / "runs").rglob("*.s*")) if path.is_file()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound_shell(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_make_lists_every_variable_that_it_reads() -> None:
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    read = set(re.findall(r"^([A-Z_]+)\s*\?=", text, re.MULTILINE)) - {"TOKENIZERS_PARALLELISM"}
    done = subprocess.run(["make", "-C", REPOSITORY, "help"], capture_output=True, text=True)
    listed = set(re.findall(r"^  ([A-Z_]+) {2,}\S", done.stdout, re.MULTILINE))
    assert read <= listed, read - listed


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("drafter", ["", "run/model"])
def test_make_serve_gives_the_engine_whole_words(tmp_path: Path, drafter: str) -> None:
    for name in ("bin/vllm", ".with-gdistill"):
        write_script(tmp_path / name, "#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    words = ["make", "-C", REPOSITORY, "-s", "-o", tmp_path / ".with-gdistill", "serve"]
    words += ["TEACHER=a b", f"DRAFTER={drafter}", f"ENGINE={tmp_path}", "PORT=8123"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    given = done.stdout.splitlines()
    assert given[given.index("serve") + 1] == "a b" and option(given, "--port") == "8123"
    assert ("--speculative-config" in given) == bool(drafter)
    if drafter:
        assert json.loads(option(given, "--additional-config")) == {"gdistill_drafter": drafter}
        assert json.loads(option(given, "--speculative-config"))["num_speculative_tokens"] == 4


def test_make_sample_asks_for_passes_where_they_are_chosen() -> None:
    for student, budget in (("mdlm", "--nfe 16"), ("bd3lm", "--passes-per-block 2"), ("medusa", ""), ("drafter", "")):
        words = ["make", "-C", REPOSITORY, "-n", "sample", f"STUDENT={student}"]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert re.findall(r"--nfe \S+|--passes-per-block \S+", said) == ([budget] if budget else [])


RECORD = """#!/bin/sh
printf '%s\\n' {name} "$@" '' >>'{told}'
exit ${{STAND_IN_EXIT:-0}}
"""


def recorded_commands(script: str, place: Path, environment: dict[str, str]) -> list[list[str]]:
    """The words of every command of the project that a script gives, none of which is run."""
    path, told = REPOSITORY / "runs" / script, place / "told"
    (place / "runs" / path.parent.name).mkdir(parents=True)
    for name in scripts():
        write_script(place / ".venv/bin" / name, RECORD.format(name=name, told=told))
    command = ["bash", shutil.copy(path, place / "runs")]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return [block.split("\n") for block in told.read_text().strip().split("\n\n")]


STAND_INS = {
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "scontrol": "echo node1",
    "nvidia-smi": "printf 'a\\nb\\n'",
    "torchrun": 'while [[ $1 != --no-python ]]; do shift; done; shift; exec "$@"',
    "accelerate": 'while [[ $1 != --no_python ]]; do shift; done; shift; exec "$@"',
}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
SLURM |= {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "4"}


def given(script: str, place: Path, **environment: str) -> list[list[str]]:
    """The commands that a script gives where srun, torchrun and accelerate stand in."""
    write_script(place / ".venv/bin/activate", "")
    for name, body in STAND_INS.items():
        write_script(place / "stand-ins" / name, f"#!/bin/bash\n{body}\n")
    path = f"{place / 'stand-ins'}:{place / '.venv/bin'}:{os.environ['PATH']}"
    whole = os.environ | SLURM | {"PATH": path, "PWD": str(place)} | environment
    return recorded_commands(script, place, whole)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_jobs_do_what_they_are_asked_for(tmp_path: Path) -> None:
    (plain,) = given("slurm/train.sbatch", tmp_path / "mdlm")
    assert plain[:2] == ["gdistill-train", "run"]
    assert option(plain, "--config") == "configs/owt-mdlm.toml"
    assert "training.sharding=fsdp" in plain
    (blocks,) = given("slurm/train.sbatch", tmp_path / "bd3lm", STUDENT="bd3lm", INIT_FROM="first")
    assert option(blocks, "--config") == "configs/owt-bd3lm.toml"
    assert (option(blocks, "--student"), option(blocks, "--init-from")) == ("bd3lm", "first")
    assert option(blocks, "--out").endswith("/bd3lm-gumbel")
    with pytest.raises(AssertionError, match="goes on from the first"):
        given("slurm/train.sbatch", tmp_path / "alone", STUDENT="bd3lm")
    (words,) = given("slurm/extract.sbatch", tmp_path / "array")
    assert words[0] == "gdistill-extract"
    assert (option(words, "--worker"), option(words, "--workers")) == ("1", "4")


def test_on_several_gpus_the_recipe_calls_the_same_commands(tmp_path: Path) -> None:
    """Every student is trained and sampled as the paper has it, from the one store."""
    extract, *commands = given("owt.sh", tmp_path)
    trained, scored = commands[:6], commands[6:]
    assert extract[0] == "gdistill-extract" and option(extract, "--dtype") == "bfloat16"
    parts = ("mdlm", "owt-mdlm"), ("bd3lm-pretrain", "owt-bd3lm-pretrain"), ("bd3lm", "owt-bd3lm")
    students = product(("none", "gumbel"), parts)
    for words, (conditioning, (part, config)) in zip(trained, students, strict=True):
        assert words[:2] == ["gdistill-train", "run"]
        assert option(words, "--student") == part.partition("-")[0]
        assert option(words, "--conditioning") == conditioning
        assert option(words, "--config") == f"configs/{config}.toml"
        assert option(words, "--out") == f"out/owt-paper/{part}-{conditioning}"
        assert option(words, "--store") == option(extract, "--store")
        first = [f"out/owt-paper/bd3lm-pretrain-{conditioning}"] if part == "bd3lm" else []
        assert words.count("--init-from") == len(first) and set(first) <= set(words)
    for sample, score in zip(scored[::2], scored[1::2], strict=True):
        assert option(sample, "--num") == "5000" and option(sample, "--nucleus-p") == "0.9"
        assert ("--nfe" in sample) == ("/mdlm-" in sample[1])
        assert score[:2] == ["gdistill-eval", option(sample, "--out")]
    assert {words[1] for words in scored[::2]} == {option(trained[i], "--out") for i in (0, 2, 3, 5)}


def test_a_stopped_training_stops_the_recipe(tmp_path: Path) -> None:
    """What the trainer's exit code 143 is for: nothing behind it runs."""
    with pytest.raises(AssertionError):
        given("owt.sh", tmp_path / "clone", STAND_IN_EXIT="143")
    told = (tmp_path / "clone" / "told").read_text().split("\n\n")
    assert len([block for block in told if block]) == 1


def test_srun_is_understood() -> None:
    tasks = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    job = {"SLURM_JOB_NODELIST": "gpu-[017-019,4],other", "SLURM_JOB_ID": "112345"}
    own = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "b7,b8"}  # of fewer tasks than the job has
    for more, expected in (
        (job, ["3", "8", "1", "gpu-017", "32345"]),
        ({**job, **own}, ["3", "2", "1", "b7", "32345"]),
        ({**job, "MASTER_ADDR": "here", "MASTER_PORT": "1"}, ["3", "8", "1", "here", "1"]),
        ({}, ["3", "8", "1", "127.0.0.1", "20000"]),
    ):
        follow_srun(step := {**tasks, **more})
        assert [step[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")] == expected
    of_torchrun = {**tasks, "RANK": "5"}  # below srun it has its own numbers
    # A batch script is one process, whatever it starts.
    script = {name: value for name, value in tasks.items() if name != "SLURM_STEP_ID"}
    for environment in (of_torchrun, script, {**tasks, "SLURM_NTASKS": "1"}):
        followed = dict(environment)
        follow_srun(followed)
        assert followed == environment


def test_the_recipe_runs_from_text_to_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands one after the other, in this process: to start fifteen takes longest."""
    teacher = save_teacher(tmp_path / "teacher")
    draw = random.Random(0)
    documents = [" ".join(draw.choices(WORDS[2:], k=30)) for _ in range(80)]
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(documents))
    out = tmp_path / "out"
    environment = os.environ | {"SIZE": "toy", "ROW_LENGTH": "12", "STEPS": "2"}
    environment |= {"TEXT": str(tmp_path / "text.txt"), "TEACHER": str(teacher), "OUT": str(out)}
    monkeypatch.setattr("evaluation.text.reading.user_cache", lambda: tmp_path / "cache")
    commands = recorded_commands("owt.sh", tmp_path / "clone", environment)
    for words in commands:
        assert call(*words) == 0, f"{words}\n{capsys.readouterr().err[-3000:]}"
    for student in ("mdlm-none", "mdlm-gumbel", "bd3lm-none", "bd3lm-gumbel"):
        results = json.loads((out / "samples" / student / "results.json").read_text())
        assert results, student
