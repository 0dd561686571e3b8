"""``gdistill-train`` end to end: exit codes, one line per mistake, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shards.settings import flatten, to_mapping
from shards.store.store import ShardStore
from tests.commands import call
from tests.trainer.run_cases import LENGTH, assert_same_run, tiny_run, write_store
from trainer.training.construction import build_student
from trainer.training.loop import train
from trainer.training.plan import memory_plan

PROJECT = Path(__file__).resolve().parents[2]


def write_config(path: Path, **changes: object) -> Path:
    """The ten-step run as a TOML file."""
    values = flatten(to_mapping(tiny_run(**changes)))
    lines = (f"{name} = {json.dumps(v)}" for name, v in values.items() if v not in (None, {}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config") / "run.toml")


def test_a_run_by_command(
    store: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it costs is said before, what was made and what comes next behind."""
    out, extracted = tmp_path / "out", tmp_path / "extracted"
    extracted.mkdir()
    (extracted / "store").symlink_to(store)
    words = ("run", "--store", extracted, "--config", config, "--conditioning", "none")
    words = (*words, "--out", out, "--set", "training.num_steps=8")
    assert call("gdistill-train", *words) == 0
    resolved = json.loads((out / "config.json").read_text())
    assert resolved["training"]["num_steps"] == 8
    assert resolved["model"]["conditioning"] == "none"
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("mdlm, conditioning none, ") and " parameters; 8 steps" in lines[0]
    assert f"of 8 rows of {LENGTH} tokens, {8 * 8 * LENGTH} tokens in all" in lines[0]
    assert "s a step, about 0:00:0" in lines[1] and "3 steps left" in lines[1]
    assert lines[-2:] == [
        f"wrote {out / 'model'}",
        f"next: gdistill-sample {out} --num 8 --out samples",
    ]
    progress = next(line for line in lines if line.startswith("train mdlm"))
    assert "weighted loss" in progress, "no number stands beside one of another kind unnamed"


RUN, TWO = ["run", "--config", "CONFIG"], ["two-stage"]
MISTAKES: list[tuple[list[str], str]] = [
    (["run", "--preset", "smal"], "did you mean 'small'"),
    ([*RUN, "--student", "mdml"], "did you mean 'mdlm'"),
    ([*RUN, "--conditioning", "gumble"], "model.conditioning"),
    ([*RUN, "--set", "training.nun_steps=3"], "did you mean 'num_steps'"),
    ([*RUN, "--set", "training.global_batch_size=41"], "fewer rows than one global batch"),
    ([*RUN, "--set", "training.trackers=['abacus']"], "training.trackers"),
    ([*RUN, "--set", "model.block_size=3", "--student", "bd3lm"], "block_size"),
    ([*RUN, "--init-from", "/nowhere/at/all"], "no model there"),
    ([*RUN, "--init-from", "nowhere"], "cannot find the source [nowhere]"),
    (["run", "--config", "nowhere.toml"], "cannot read the config file"),
    ([*RUN, "--processes", "2"], "an option of --plan without it"),
    ([*RUN, "--plan", "--processes", "0"], "invalid value for '--processes'"),
    ([*RUN, "--plan", "--processes", "3"], "multiple of the world size 3"),
    ([*RUN, "--set", "training.num_steps=3", "--set", "training.num_epochs=1"], "got both"),
    ([*RUN, "--out", "/dev/null/run"], "cannot write there"),
    ([*RUN, "--out", "/proc/run"], "cannot write there"),
    ([*TWO, "--set", "model.conditioning=none"], "recipe decides this [model.conditioning]"),
    ([*TWO, "--set", "student=ar"], "recipe decides this [student]"),
    ([*TWO, "--set", "training.num_steps=3", "--set", "training.num_epochs=1"], "got both"),
    ([*TWO, "--student", "ar"], "no recipe for this student"),
    ([*TWO, "--student", "medusa"], "no recipe for this student"),
    (["run", "--student", "mdlm"], "how long to train is not said"),
    (["status", "/nowhere"], "no training run there"),
]
if not torch.cuda.is_available():
    MISTAKES.append(([*RUN, "--set", "training.device=cuda"], "CUDA is asked for and absent"))


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_one_line(
    store: Path,
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    if words[0] != "status":
        words = [*words, "--store", str(store)]
        words += [] if "--out" in words else ["--out", str(tmp_path / "out")]
    words = [str(config) if word == "CONFIG" else word for word in words]
    assert call("gdistill-train", *words) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: ") and expected in error
    assert not (tmp_path / "out" / "model").exists()


def test_the_plan(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State by hand; what the backward pass keeps follows the micro-batch; nothing is written."""
    opened = ShardStore.open(store)
    student = build_student(tiny_run(), opened, None)
    weights = 4 * sum(parameter.numel() for parameter in student.parameters())
    plans = [memory_plan(tiny_run(training__micro_batch_size=n), opened) for n in (2, 4)]
    kept = [plan["kept for the backward pass"] for plan in plans]
    assert kept == [2 * LENGTH * 68 * 16, 4 * LENGTH * 68 * 16], "34 bytes in 16 bit, twice in 32"
    state = ("weights", "gradients", "AdamW's moments", "moving average of the weights")
    assert [plans[0][name] for name in state] == [weights, weights, 2 * weights, weights]
    sharded = memory_plan(tiny_run(training__sharding="fsdp"), opened, 4)
    assert sharded["AdamW's moments"] == weights // 2
    file = write_config(tmp_path / "run.toml")
    words = ("run", "--plan", "--store", store, "--config", file, "--out", tmp_path / "out")
    assert call("gdistill-train", *words) == 0
    assert "in all, estimated" in capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "out").exists()


DAMAGES = {
    "absent": (2, "no store there"),
    "unfinished": (1, "not complete"),
    "truncated": (1, "truncated"),
    "newer": (1, "newer format"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_stores(
    store: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    copy, (code, expected) = tmp_path / "store", DAMAGES[damage]
    if damage != "absent":
        shutil.copytree(store, copy)
    if damage == "unfinished":
        next(path for path in sorted((copy / "ledger").rglob("*")) if path.is_file()).unlink()
    if damage == "truncated":
        for shard in filter(Path.is_file, (copy / "train" / "tokens" / "c").rglob("*")):
            shard.write_bytes(shard.read_bytes()[:-9])
    if damage == "newer":
        manifest = json.loads((copy / "manifest.json").read_bytes())
        (copy / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    words = ("run", "--store", copy, "--config", config, "--out", tmp_path / "out")
    assert call("gdistill-train", *words) == code
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out" / "model").exists()


def test_init_from_a_student_of_another_shape(
    store: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tiny_run(training__num_steps=1), store, tmp_path / "begun")
    cases: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
        ({"vocab_size": 16}, (), "another vocab_size than the store"),
        ({"row_length": 16}, (), "another row_length than the store"),
        ({}, ("--conditioning", "none"), "conditioner.weight"),
    ]
    for number, (changes, words, expected) in enumerate(cases):
        other = write_store(tmp_path / f"other-{number}", **changes)
        base = ("run", "--store", other, "--config", config, "--out", tmp_path / "out")
        words = (*base, "--init-from", str(tmp_path / "begun"), *words)
        assert call("gdistill-train", *words) == 2
        assert expected in capsys.readouterr().err.strip().splitlines()[-1]


def test_ctrl_c_while_it_starts_is_one_line() -> None:
    """Within the first imports, of which the last is waited for in vain."""
    program = (
        "import sys, signal, os\n"
        "class Late:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'rich.progress': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Late())\n"
        "from trainer.cli import main\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == "interrupted; run the same command again to resume\n"


def start(store: Path, config: Path, out: Path) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    words = ["run", "--store", str(store), "--config", str(config), "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.cli", *words],
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )


def wait_for_step(process: subprocess.Popen[bytes], out: Path, step: int) -> None:
    """Until metrics.jsonl has a whole line of ``step`` or a later one."""
    metrics = out / "metrics.jsonl"
    while process.poll() is None:
        lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
        if lines and json.loads(lines[-1])["step"] >= step:
            return
        time.sleep(0.02)
    raise AssertionError(((process.stderr and process.stderr.read()) or b"").decode())


@pytest.mark.slow
def test_sigterm_then_kill_9_then_the_same_as_uninterrupted(store: Path, tmp_path: Path) -> None:
    settings = {
        "training__num_steps": 300,
        "training__checkpoint_every_steps": 40,
        "training__log_every_steps": 1,
        "training__validate_every_steps": 100,
    }
    config = write_config(tmp_path / "run.toml", **settings)
    assert train(tiny_run(**settings), store, tmp_path / "whole")

    process = start(store, config, tmp_path / "run")
    wait_for_step(process, tmp_path / "run", 10)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 143, error.decode()
    assert b"a checkpoint is saved" in error and b"Traceback" not in error
    assert not (tmp_path / "run" / "model").exists()

    process = start(store, config, tmp_path / "run")
    wait_for_step(process, tmp_path / "run", 150)
    process.kill()
    process.communicate()
    assert not (tmp_path / "run" / "model").exists()

    assert train(tiny_run(**settings), store, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run" / "model" / "config.json").read_text().count(str(LENGTH))
