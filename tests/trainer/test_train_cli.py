"""gdistill-train as a user meets it: exit codes, one error line, signals, kill -9."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shards.settings import to_mapping
from tests.trainer.run_cases import LENGTH, assert_same_run, call, tiny_run, write_store
from trainer.training.loop import train


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The ten-step run as a TOML file."""
    return write_config(tmp_path / "run.toml")


def write_config(path: Path, **changes: object) -> Path:
    config = to_mapping(tiny_run(**changes))
    lines = [f"{k} = {json.dumps(v)}" for k, v in config.items() if not isinstance(v, dict)]
    for table in ("model", "training", "optimization"):
        entries = {k: v for k, v in config[table].items() if v is not None}
        lines += [f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in entries.items())]
    path.write_text("\n".join(lines))
    return path


def test_a_run_by_command(
    monkeypatch: pytest.MonkeyPatch, store: Path, config_file: Path, tmp_path: Path
) -> None:
    out, extracted = tmp_path / "out", tmp_path / "extracted"
    extracted.mkdir()
    (extracted / "store").symlink_to(store)
    words = ("run", "--store", extracted, "--config", config_file, "--conditioning", "none")
    assert call(monkeypatch, *words, "--out", out, "--set", "training.num_steps=2") == 0
    resolved = json.loads((out / "config.json").read_text())
    assert resolved["training"]["num_steps"] == 2
    assert resolved["model"]["conditioning"] == "none"
    assert (out / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--preset", "smal"], "did you mean 'small'"),
        (["--student", "mdml"], "did you mean 'mdlm'"),
        (["--conditioning", "gumble"], "model.conditioning"),
        (["--set", "training.nun_steps=3"], "did you mean 'num_steps'"),
        (["--set", "training.global_batch_size=41"], "fewer rows than one global batch"),
        (["--set", "training.trackers=['abacus']"], "training.trackers"),
        (["--set", "model.block_size=3", "--student", "bd3lm"], "block_size"),
        (["--init-from", "/nowhere/at/all"], "no model there"),
        (["--init-from", "nowhere"], "cannot find the source [nowhere]"),
        (["--config", "nowhere.toml"], "cannot read the config file"),
    ],
)
def test_wrong_requests(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    store: Path,
    config_file: Path,
    tmp_path: Path,
    words: list[str],
    expected: str,
) -> None:
    base = ["run", "--store", store, "--out", tmp_path / "out"]
    if not {"--preset", "--config"} & set(words):
        base += ["--config", config_file]
    assert call(monkeypatch, *base, *words) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and expected in error
    assert not (tmp_path / "out" / "model").exists()


def test_no_amount_of_training(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    store: Path,
    tmp_path: Path,
) -> None:
    assert call(monkeypatch, "run", "--store", store, "--out", tmp_path / "out") == 2
    assert "how long to train is not said" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_asked_for_and_absent(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    store: Path,
    config_file: Path,
    tmp_path: Path,
) -> None:
    words = ("run", "--store", store, "--config", config_file, "--out", tmp_path / "out")
    assert call(monkeypatch, *words, "--set", "training.device=cuda") == 2
    assert "CUDA is asked for and absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "code", "expected"),
    [
        ("absent", 2, "no store there"),
        ("unfinished", 1, "not complete"),
        ("truncated", 1, "truncated"),
        ("newer", 1, "newer format"),
    ],
)
def test_damaged_stores(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    store: Path,
    config_file: Path,
    tmp_path: Path,
    damage: str,
    code: int,
    expected: str,
) -> None:
    copy = tmp_path / "store"
    if damage != "absent":
        shutil.copytree(store, copy)
    if damage == "unfinished":
        next(path for path in sorted((copy / "ledger").rglob("*")) if path.is_file()).unlink()
    if damage == "truncated":
        for shard in (copy / "train" / "tokens" / "c").rglob("*"):
            if shard.is_file():
                shard.write_bytes(shard.read_bytes()[:-9])
    if damage == "newer":
        manifest = json.loads((copy / "manifest.json").read_bytes())
        (copy / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    words = ("run", "--store", copy, "--config", config_file, "--out", tmp_path / "out")
    assert call(monkeypatch, *words) == code
    assert expected in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize("field", ["vocab_size", "row_length"])
def test_init_from_a_student_of_another_shape(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    store: Path,
    config_file: Path,
    tmp_path: Path,
    field: str,
) -> None:
    assert train(tiny_run(training__num_steps=1), store, tmp_path / "first")
    other = write_store(tmp_path / "other", **{field: 16})
    words = ("run", "--store", other, "--config", config_file, "--out", tmp_path / "out")
    assert call(monkeypatch, *words, "--init-from", tmp_path / "first") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"another {field} than the store" in error and "16" in error


def test_init_from_another_architecture(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    store: Path,
    config_file: Path,
    tmp_path: Path,
) -> None:
    assert train(tiny_run(training__num_steps=1), store, tmp_path / "first")
    words = ("run", "--store", store, "--config", config_file, "--out", tmp_path / "out")
    words = (*words, "--init-from", tmp_path / "first", "--conditioning", "none")
    assert call(monkeypatch, *words) == 2
    assert "conditioner.weight" in capsys.readouterr().err


def start(store: Path, config: Path, out: Path) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    words = ["run", "--store", str(store), "--config", str(config), "--out", str(out)]
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.cli", *words],
        cwd=Path(__file__).resolve().parents[2],
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
    assert process.returncode == 0, error.decode()
    assert b"checkpoint saved" in error
    assert not (tmp_path / "run" / "model").exists()

    process = start(store, config, tmp_path / "run")
    wait_for_step(process, tmp_path / "run", 150)
    process.kill()
    process.communicate()
    assert not (tmp_path / "run" / "model").exists()

    assert train(tiny_run(**settings), store, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run" / "model" / "config.json").read_text().count(str(LENGTH))
