"""``gdistill-train``: its mistakes, signals; the recipe in two parts."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from shards.errors import UsageError
from shards.settings import flatten, to_mapping
from shards.store.store import ShardStore
from tests.commands import call
from tests.trainer.run_cases import LENGTH, assert_same_run, tiny_run, write_store
from trainer import load_student, load_tokenizer, two_stage
from trainer.students.folder import weights_sha256
from trainer.students.registry import read_preset
from trainer.training.loop import train
from trainer.training.settings import RunConfig, read_recipe
from trainer.training.status import status_text

PROJECT = Path(__file__).resolve().parents[2]
Capsys = pytest.CaptureFixture[str]


def write_config(path: Path, **changes: object) -> Path:
    """The ten-step run as a TOML file."""
    values = flatten(to_mapping(tiny_run(**changes)))
    lines = (f"{name} = {json.dumps(v)}" for name, v in values.items() if v not in (None, {}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config") / "run.toml")


def test_a_run_by_command(store: Path, config: Path, tmp_path: Path, capsys: Capsys, monkeypatch: Any) -> None:
    """What it costs is said before, what was made and what comes next behind; no shell expands --out=~/out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    out, extracted = tmp_path / "out", tmp_path / "extracted"
    extracted.mkdir()
    (extracted / "store").symlink_to(store)
    words = ("run", "--store", extracted, "--config", config, "--conditioning", "none")
    words = (*words, "--preset", "tiny", "--out=~/out", "--set", "training.num_steps=8", "--kd", "token")
    assert call("gdistill-train", *words) == 0
    resolved = json.loads((out / "config.json").read_text())
    assert (resolved["model"]["kd"]["kind"], resolved["model"]["hidden_size"]) == ("token", 16)
    assert (resolved["training"]["num_steps"], resolved["model"]["conditioning"]) == (8, "none")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("mdlm, conditioning none, ") and " parameters; 8 steps" in lines[0]
    assert f"of 8 rows of {LENGTH} tokens, {8 * 8 * LENGTH} tokens in all" in lines[0]
    next_line = f"next: gdistill-sample {out} --num 8 --out samples"
    assert lines[-2:] == [f"wrote {out / 'model'}", next_line]
    progress = next(line for line in lines if line.startswith("train mdlm"))
    assert "weighted loss" in progress, "no number stands beside one of another kind unnamed"
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    scores = [row for row in rows if row["kind"] == "validation"]
    assert f"validation {scores[0]['nll_nats']:.3f} nats/token" in progress and not scores[0]["conditional"]
    assert load_student("~/out").name_or_path == str(out / "model") and load_tokenizer("~/out") is None
    assert train(tiny_run(training__num_steps=1), store, Path("~/other")) == tmp_path / "other/model"


RUN, TWO = ["run", "--config", "CONFIG"], ["two-stage"]
MISTAKES: list[tuple[list[str], str]] = [
    (["run", "--preset", "smal"], "did you mean 'small'"),
    ([*RUN, "--student", "mdml"], "did you mean 'mdlm'"),
    ([*RUN, "--conditioning", "gumble"], "model.conditioning"),
    ([*RUN, "--set", "training.nun_steps=3"], "did you mean 'num_steps'"),
    ([*RUN, "--set", "training.global_batch_size=41"], "fewer rows than one global batch"),
    ([*RUN, "--set", "training.trackers=['abacus']"], "training.trackers"),
    ([*RUN, "--set", "model.block_size=3", "--student", "bd3lm"], "block_size"),
    ([*RUN, "--store", "/nowhere"], "no store there"),
    ([*RUN, "--init-from", "/nowhere/at/all"], "no model there"),
    ([*RUN, "--init-from", "nowhere"], "cannot find the source [nowhere]"),
    ([*RUN, "--student", "medusa", "--backbone", "nowhere"], "cannot find the backbone [nowhere]"),
    (["run", "--config", "nowhere.toml"], "cannot read the config file"),
    ([*RUN, "--out", "/dev/null/run"], "cannot write there"),
    ([*TWO, "--set", "model.conditioning=none"], "recipe decides this [model.conditioning]"),
    ([*TWO, "--set", "student=ar"], "recipe decides this [student]"),
    ([*TWO, "--set", "training.num_steps=3", "--set", "training.num_epochs=1"], "got both"),
    ([*TWO, "--student", "ar"], "no recipe for this student"),
    ([*TWO, "--set", "model=5"], "wrong type in config [model]; got 5; expected a table"),
    ([*TWO, "--set", "training=5"], "wrong type in config [training]"),
    (["run", "--student", "mdlm"], "how long to train is not said"),
    (["status", "/nowhere"], "no training run there"),
]
if importlib.util.find_spec("wandb") is None:
    MISTAKES.append(([*RUN, "--set", "training.trackers=['wandb']"], "got wandb; pip install wandb"))
if not torch.cuda.is_available():
    MISTAKES.append(([*RUN, "--set", "training.device=cuda"], "CUDA is asked for and absent"))


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=lambda value: str(value)[:60])
def test_a_mistake_is_one_line(
    store: Path, config: Path, tmp_path: Path, capsys: Capsys, words: list[str], expected: str
) -> None:
    if words[0] != "status":
        words = words if "--store" in words else [*words, "--store", str(store)]
        words += [] if "--out" in words else ["--out", str(tmp_path / "out")]
    words = [str(config) if word == "CONFIG" else word for word in words]
    assert call("gdistill-train", *words) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert error.startswith("error: ") and expected in error
    assert not (tmp_path / "out" / "model").exists()


def start(store: Path, config: Path, out: Path) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    words = [sys.executable, "-m", "trainer.cli", "run", "--store", str(store)]
    words += ["--config", str(config), "--out", str(out)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, cwd=PROJECT, env=one_thread, stderr=subprocess.PIPE)


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


# The recipe in two parts: what each is, what a user may change, how it goes on.

TINY: dict[str, Any] = {
    "model": {**read_preset("tiny"), "hidden_size": 16, "num_heads": 2},
    "training": {"num_steps": 20, "global_batch_size": 4, "trackers": []},
    "optimization": {"learning_rate": 1e-3, "warmup_steps": 7, "schedule": "constant"},
}


def parts_of(store: Path, student: str = "mdlm", *overrides: str) -> tuple[RunConfig, RunConfig]:
    return two_stage.two_stage_parts(student, ShardStore.open(store), TINY, [], overrides)


def both(found: tuple[RunConfig, RunConfig], name: str) -> list[Any]:
    """A setting of both parts."""
    return [attrgetter(name)(part) for part in found]


AS_MANY_STEPS = {
    "student": ["mdlm", "mdlm"],
    "model.conditioning": ["none", "gumbel"],
    "model.diffusion.max_loss_weight": [1.0, 1.0],
    "model.noise.layers": [(), (1, 2)],
    "training.num_steps": [20, 20],
    "optimization.warmup_steps": [7, 2],
    "optimization.schedule": ["constant", "cosine"],
    "optimization.learning_rate": [1e-3, 1e-3],
}
BLOCKS_BEGIN_AS_A_WHOLE_ROW = {
    "student": ["mdlm", "bd3lm"],
    "model.block_size": [None, 2],
    "model.noise.prior_weight": [0.0, 0.5],
    "model.diffusion.fully_masked_share": [0.0, 0.5],
    "optimization.learning_rate": [1e-3, pytest.approx(2e-3)],
}
A_USERS_GO_BEFORE = {
    "seed": [3, 3],
    "model.diffusion.max_loss_weight": [5.0, 5.0],
    "model.noise.layers": [(), (2,)],
    "optimization.schedule": ["constant", "constant"],
    "training.num_steps": [40, 40],
    "training.num_noise_draws": [None, 2],
    "optimization.warmup_steps": [1, 1],
}
OVERRIDES = ["seed=3", "model.diffusion.max_loss_weight=5.0", "model.noise.layers=[2]"]
OVERRIDES += ["optimization.schedule=constant", "training.num_steps=40", "optimization.warmup_steps=1"]
PARTS = [
    ("mdlm", [], AS_MANY_STEPS),
    ("bd3lm", ["model.block_size=2", "model.noise.prior_weight=0.5"], BLOCKS_BEGIN_AS_A_WHOLE_ROW),
    ("mdlm", [*OVERRIDES, "training.num_noise_draws=2"], A_USERS_GO_BEFORE),
]


@pytest.mark.parametrize(("student", "overrides", "expected"), PARTS)
def test_settings_of_parts(store: Path, student: str, overrides: list[str], expected: Any) -> None:
    found = parts_of(store, student, *overrides)
    assert {name: both(found, name) for name in expected} == expected
    assert found[1].model.noise.injection == "add"


def test_a_users_file_goes_before_the_recipe_and_epochs_are_counted_in_steps(store: Path) -> None:
    """Ten epochs of 40 rows in batches of 4 are 100 steps, and 100 with noise."""
    own = {"seed": 4, "model": {"noise": {"prior_weight": 0.5}}}
    preset = {**TINY, "training": {"num_epochs": 10, "global_batch_size": 4, "trackers": []}}
    preset["model"] = {**TINY["model"], "diffusion": {"max_loss_weight": 9.0}}
    found = two_stage.two_stage_parts("mdlm", ShardStore.open(store), preset, [own])
    assert both(found, "training.num_steps") == [None, 100]
    assert found[1].training.num_epochs is None
    assert both(found, "model.noise.prior_weight") == [0.0, 0.5]
    assert both(found, "model.diffusion.max_loss_weight") == [1.0, 1.0]
    assert both(found, "seed") == [4, 4]


def test_noise_layers_and_both_parts_of_every_preset(store: Path) -> None:
    """Large vocabularies are read among candidates, at thirds."""
    assert two_stage.noise_layers_of(4, 4095) == {"layers": [1, 2, 3, 4]}
    assert two_stage.noise_layers_of(12, 4096) == {"layers": [4, 8], "top_k": 256}
    assert two_stage.noise_layers_of(1, 4096)["layers"] == [1]
    for preset, student in product(("tiny", "small", "medium", "maze"), ("mdlm", "bd3lm")):
        plain, noise = two_stage.two_stage_parts(student, ShardStore.open(store), read_recipe(preset))
        assert noise.model.noise.layers == tuple(range(1, plain.model.num_layers + 1))


def test_the_command_trains_both_and_goes_on(store: Path, tmp_path: Path, capsys: Capsys) -> None:
    """--config, --set and --init-from reach the parts, which are named and seen."""
    (tmp_path / "own.toml").write_text("[model]\nhidden_size = 16\nnum_heads = 2\n")
    words = ["two-stage", "--store", store, "--config", tmp_path / "own.toml", "--set"]
    words += ["training.num_steps=3", "--set", "training.global_batch_size=4", "--out"]
    run, other = tmp_path / "run", tmp_path / "other"
    assert call("gdistill-train", *words, run) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "part 1 of 2" and lines[1].startswith("mdlm, conditioning none")
    assert lines[lines.index("part 2 of 2") + 1].startswith("mdlm, conditioning gumbel")
    assert [part.split()[-1] for part in status_text(run).split("\n\n")] == ["True", "True"]
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["hidden_size"] == 16 and config["training"]["num_steps"] == 3
    assert config["model"]["num_layers"] == 2, "as preset tiny has it"
    places = (run / "plain/model/student.json", run / "model/student.json")
    plain, noisy = (json.loads(place.read_text()) for place in places)
    assert plain["step"] == noisy["step"] == 3
    assert noisy["run"]["init_from"]["weights_sha256"] == weights_sha256(run / "plain/model")
    weights = (run / "model/model.safetensors").read_bytes()
    (run / "model/model.safetensors").unlink()
    assert call("gdistill-train", *words, run) == 0
    assert (run / "model/model.safetensors").read_bytes() == weights
    assert call("gdistill-train", *words, other, "--init-from", run / "plain") == 0
    assert not (other / "plain").exists()
    shutil.rmtree(run)
    assert call("gdistill-train", *words, other, "--init-from", run / "plain") == 0, "begun, it needs it no more"
    assert (other / "model/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("codec", ["posterior", "seeded", "topk", "quantized", "full"])
def test_every_codec_has_the_recipe(codec: str, tmp_path: Path) -> None:
    """Prior noise, asked for, is drawn where a store keeps distributions; one draw leaves none."""
    path = write_store(tmp_path / "store", codec)
    found = parts_of(path)
    assert two_stage.train_two_stage(found, path, tmp_path / "run")
    asked = parts_of(path, "mdlm", "model.noise.prior_share=0.1")
    assert asked[1].model.noise.prior_share == 0.1
    if codec != "posterior":
        with pytest.raises(UsageError, match="keeps one draw"):
            two_stage.train_two_stage(asked, path, tmp_path / "asked")
        assert not (tmp_path / "asked" / "plain").exists(), "said before the first part"
