"""Interrupted runs equal uninterrupted ones, to the last bit; other runs are refused by name.

Checkpoints are whole or absent, restored by name, and pruned by rule.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from shards.errors import GdistillError, IntegrityError, Stopped, UsageError
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import backbone_run, store_of
from tests.trainer.run_cases import assert_same_run, tiny_run, write_store
from trainer.training.checkpoint import FILES, CheckpointFolder, ExponentialMovingAverage, Trainee, make_optimizer, seal
from trainer.training.loop import StepWindow, Trainer, train
from trainer.training.resume import read_state, restore
from trainer.training.settings import OptimizationConfig, RunConfig


def demanding_run(**changes: Any) -> RunConfig:
    """Everything that has a state: dropout, accumulation, epochs (of 5 batches), threads, averages,
    search."""
    model = {"block_size": 4, "dropout": 0.1, "diffusion": {"search_schedule": True}}
    training = {"num_steps": 14, "micro_batch_size": 3, "precision": "bf16", "num_workers": 2}
    training |= {"log_every_steps": 4, "validate_every_steps": 7, "num_validation_rows": 4}
    parts = {"model": model, "training": training, "optimization": {"schedule": "cosine"}}
    return tiny_run({"student": "bd3lm", **parts}, **changes)


def run_with_signal(
    config: RunConfig, store: Path, out: Path, at_step: int, number: int = signal.SIGTERM, makes_ahead: bool = False
) -> bool:
    """Train; this process gets the signal while it works on step ``at_step`` + 1."""
    trainer = Trainer(config, ShardStore.open(store), out)
    trainer.makes_ahead = makes_ahead
    report = trainer._report

    def report_and_signal(*arguments: Any) -> None:
        report(*arguments)
        if trainer.step == at_step:
            os.kill(os.getpid(), number)

    trainer._report = report_and_signal  # type: ignore[method-assign]
    try:
        return bool(trainer.run())
    except Stopped:
        return False


class Ahead(str):
    """A device where the next batch is made while it works: as a GPU is told, and here the CPU."""

    type = "cuda"


@pytest.fixture(scope="module")
def uninterrupted(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert train(demanding_run(), store, out)
    return out


@pytest.mark.parametrize("makes_ahead", [False, True])
def test_two_interruptions_change_nothing(
    makes_ahead: bool, store: Path, uninterrupted: Path, tmp_path: Path, capsys: Any
) -> None:
    """Nor does a batch that is made while the device, a GPU, is at the one before it."""
    out = tmp_path / "run"
    assert not run_with_signal(demanding_run(), store, out, 2, makes_ahead=makes_ahead)
    assert not (out / "model").exists()
    assert not run_with_signal(demanding_run(), store, out, 9, makes_ahead=makes_ahead)
    assert run_with_signal(demanding_run(), store, out, 99, makes_ahead=makes_ahead)
    assert_same_run(out, uninterrupted)
    begun = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bd3lm, ")]
    assert [line.partition(" tokens in all")[2] for line in begun] == ["", ", from step 3 on", ", from step 10 on"]


def test_a_power_cut_changes_nothing(store: Path, uninterrupted: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "run", demanding_run(training__checkpoint_every_steps=5)
    trainer = Trainer(config, ShardStore.open(store), out)
    advance = trainer.optimizer.step

    def step(*arguments: Any) -> Any:
        if trainer.step == 9:
            raise RuntimeError("power cut")
        return advance(*arguments)

    trainer.optimizer.step = step  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="power cut"):
        trainer.run()
    with open(out / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "st')  # a line that was being written
    assert json.loads((out / "metrics.jsonl").read_bytes().splitlines()[-2])["step"] == 8
    assert train(config, store, out)
    assert_same_run(out, uninterrupted)


def test_a_finished_run_is_left_as_it_is(store: Path, uninterrupted: Path) -> None:
    model = ("model/model.safetensors", "model/student.json", "model/README.md")
    files = [uninterrupted / name for name in ("metrics.jsonl", *model)]
    before = [file.read_bytes() for file in files]
    left = uninterrupted / ".writing-model"  # of an export that was killed
    left.mkdir()
    (left / "config.json").touch()
    assert train(demanding_run(), store, uninterrupted)
    assert not left.exists()
    assert [file.read_bytes() for file in files] == before


def test_ctrl_c_saves_and_says_so(store: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_with_signal(tiny_run(), store, tmp_path / "run", 3, signal.SIGINT)
    assert list((tmp_path / "run" / "checkpoints").glob("step-00000004/state.json"))


@pytest.fixture
def stopped(store: Path, tmp_path: Path) -> Path:
    run_with_signal(tiny_run(), store, tmp_path / "run", 3)
    return tmp_path / "run"


def test_another_run_is_named(store: Path, stopped: Path, tmp_path: Path) -> None:
    for field, old, new in (
        ("seed", "0", "5"),
        ("optimization.learning_rate", "0.01", "0.02"),
        ("model.num_layers", "1", "2"),
        ("training.global_batch_size", "8", "4"),
    ):
        with pytest.raises(UsageError) as caught:
            train(tiny_run(**{field.replace(".", "__"): new}), store, stopped)
        assert (caught.value.where, caught.value.got) == (field, new)
        assert caught.value.expected.startswith(old)
    for changes, message in (
        ({"teacher": {"id": "trigram", "weights_sha256": "0" * 64}}, r"store\.teacher\.id.*trigram.*bigram"),
        ({"files": {"tokenizer/vocab.txt": b"b a"}}, r"another setting.*\[store\.sha256\]"),
    ):
        other = write_store(tmp_path / message[:9], **changes)
        with pytest.raises(UsageError, match=message):
            train(tiny_run(), other, stopped)


def test_how_a_run_is_carried_out_may_change(store: Path, stopped: Path, llama: Path, tmp_path: Path) -> None:
    """Not its end, if that is past; where the backbone lies is nothing but a place."""
    with pytest.raises(UsageError, match=r"longer already.*got 3 steps.*at least the 4"):
        train(tiny_run(training__num_steps=3), store, stopped)
    changed = tiny_run(training__num_workers=1, training__keep_last=1, training__num_steps=12)
    assert train(changed, store, stopped)
    assert [path.name for path in (stopped / "checkpoints").glob("step-*")] == ["step-00000012"]
    scored, moved = store_of(tmp_path / "scored", llama), shutil.copytree(llama, tmp_path / "moved")
    for steps, place in enumerate((llama, moved), 2):
        assert train(backbone_run(place, training__num_steps=steps), scored, tmp_path / "medusa")


# Checkpoints.


STATE: dict[str, Any] = {"run": {"config": {"seed": 0}}, "stream": {"epoch": 1}}
STATE |= {"window": StepWindow().state_dict(), "validation": None}


def make_trainee(seed: int, reverse: bool = False) -> Trainee:
    torch.manual_seed(seed)
    layers = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    student = nn.ModuleDict(dict(reversed(layers.items())) if reverse else layers)
    student.register_buffer("clips", torch.tensor([0.0, float(seed)]))
    optimizer = make_optimizer(student.parameters(), OptimizationConfig())
    trainee = Trainee(student, optimizer, ExponentialMovingAverage(student, 0.9))
    for _ in range(3):
        for parameter in student.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        trainee.ema.update()
    return trainee


def save(folder: CheckpointFolder, trainee: Trainee, *steps: int) -> None:
    for step in steps:
        folder.save(step, trainee, STATE, Accelerator(cpu=True))


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """The first step's checkpoint is there."""
    made = CheckpointFolder(tmp_path / "checkpoints", keep_last=2, keep_every_steps=None)
    save(made, make_trainee(1), 1)
    return made


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("reverse", [False, True])
def test_everything_comes_back_by_name_and_goes_on(folder: CheckpointFolder, reverse: bool) -> None:
    saved, other = make_trainee(1), make_trainee(2, reverse)
    for trainee in (saved, other):
        del trainee.optimizer.state[trainee.student.get_parameter("a.weight")]  # as without a gradient so far
    save(folder, saved, 5)
    state = read_state(folder.path(5))
    assert (state.step, state.stream, state.ema_num_updates) == (5, {"epoch": 1}, 3)
    restore(other, folder.path(5), state.ema_num_updates)
    for name, value in saved.student.state_dict().items():
        assert torch.equal(other.student.state_dict()[name], value)
        if name in saved.ema.shadows:
            assert torch.equal(other.ema.shadows[name], saved.ema.shadows[name])
    theirs = dict(other.student.named_parameters())
    for name, parameter in saved.student.named_parameters():
        for key, value in saved.optimizer.state[parameter].items():
            assert torch.equal(other.optimizer.state[theirs[name]][key], value)
        parameter.grad = torch.full_like(parameter, 0.1)
        theirs[name].grad = parameter.grad.clone()
    saved.optimizer.step()
    other.optimizer.step()
    assert all(torch.equal(theirs[name], p) for name, p in saved.student.named_parameters())


@pytest.mark.parametrize(("keep_every", "expected"), [(None, [50, 60]), (20, [20, 40, 50, 60]), (25, [50, 60])])
def test_pruning(tmp_path: Path, keep_every: int | None, expected: list[int]) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", 2, keep_every)
    save(folder, make_trainee(1), 10, 20, 30, 40, 50, 60)
    assert folder.steps() == expected
    assert names(folder.directory) == {folder.path(step).name for step in expected}


def test_a_write_that_dies_leaves_nothing_that_looks_finished(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def power_cut(source: Any, target: Any) -> None:
        if Path(target).name.startswith("step-"):
            raise OSError(5, "power cut", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(GdistillError, match=r"cannot write \[.*/step-00000002\]; got power cut;"):
        save(folder, make_trainee(2), 2)
    monkeypatch.undo()
    assert folder.steps() == [1]
    left = folder.directory / ".writing-step-00000001"  # of a process that was killed
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"half")
    save(folder, make_trainee(2), 2)
    assert names(folder.directory) == {"step-00000001", "step-00000002"}
    assert read_state(folder.path(2)).step == 2
    monkeypatch.setattr(shutil, "rmtree", mock.Mock(side_effect=OSError("power cut")))
    with pytest.raises(GdistillError, match="power cut"):
        save(folder, make_trainee(2), 3)
    assert folder.steps() == [2, 3], "one that is being deleted is whole no more"
    monkeypatch.undo()
    save(folder, make_trainee(2), 4)
    assert names(folder.directory) == {"step-00000003", "step-00000004"}, "and what was left of it goes"


def test_a_full_disk_is_one_line_and_leaves_room(folder: CheckpointFolder) -> None:
    """A limit on the size of files fails writes as a full disk does, safetensors' among them."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(GdistillError, match="cannot write") as caught:
            save(folder, make_trainee(2), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value) and "make room" in str(caught.value)
    assert names(folder.directory) == {"step-00000001"}
    assert read_state(folder.path(1)).step == 1


def test_files_hold_no_pickles_and_are_readable_as_the_umask_says(folder: CheckpointFolder) -> None:
    before = os.umask(0o027)
    try:
        save(folder, make_trainee(2), 2)
    finally:
        os.umask(before)
    assert names(folder.path(2)) == {*FILES, "state.json"}
    assert {path.stat().st_mode & 0o777 for path in folder.path(2).iterdir()} == {0o640}
    parts = product("ab", ("weight", "bias"), ("step", "exp_avg", "exp_avg_sq"))
    keys = {f"{layer}.{name}/{key}" for layer, name, key in parts}
    assert set(load_file(folder.path(2) / "optimizer.safetensors")) == keys


DAMAGES: list[Any] = [
    b"", b"{", b"[]", b"3", b"null", b"\xff", b"[" * 100_000,
    {"step": "many"}, {"step": -1}, {"step": 2}, {"step": None}, {"step": 1e999},
    {"files": {}}, {"files": None}, {"files": {"weights.safetensors": "0"}},
    {"stream": None}, {"stream": []}, {"run": 3}, {"validation": "good"},
    {"window": {}}, {"window": {"num_steps": "x"}}, {"window": {"num_steps": float("nan")}},
    {"window": {**STATE["window"], "num_tokens": -8}}, {"window": {**STATE["window"], "more": 1}},
    {"ema_num_updates": -10}, {"ema_num_updates": True}, {"format_version": 9},
    {"format_version": "1"}, {"unknown": 1}, {"stream": {"epoch": 2}}, {"sha256": "0" * 64},
]  # fmt: skip


def test_a_state_of_any_content_is_one_line(folder: CheckpointFolder) -> None:
    path = folder.path(1) / "state.json"
    whole = path.read_bytes()
    for damage in DAMAGES:
        if isinstance(damage, dict):
            damage = json.dumps({**json.loads(whole), **damage}).encode()
        path.write_bytes(damage)
        with pytest.raises(IntegrityError, match=r"state\.json") as refused:
            read_state(folder.path(1))
        assert "\n" not in str(refused.value)
    state = json.loads(whole)
    more = {"files": {**state["files"], "more": "0"}}
    for damage in ({"step": 2}, {"files": {}}, more, {"format_version": 0}, {"format_version": 2}):  # by what seals
        altered = {**state, **damage}
        path.write_text(json.dumps({**altered, "sha256": seal(altered)}))
        message = "another format version.*expected 1" if "format_version" in damage else "do not fit each other"
        with pytest.raises(IntegrityError, match=message):
            read_state(folder.path(1))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_and_an_altered_file_are_named(folder: CheckpointFolder, name: str) -> None:
    path = folder.path(1) / name
    path.write_bytes(path.read_bytes()[:-3])
    for _ in range(2):
        with pytest.raises(IntegrityError, match=rf"{name}.*delete .*/step-00000001 to go on"):
            read_state(folder.path(1))
        path.unlink(missing_ok=True)
