"""Checkpoints are whole or absent, restored by name, and pruned by rule."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from shards.errors import GdistillError, IntegrityError
from trainer.training.checkpoint import FILES, CheckpointFolder, Trainee
from trainer.training.construction import ExponentialMovingAverage, make_optimizer
from trainer.training.metrics import StepWindow
from trainer.training.resume import read_state, restore
from trainer.training.settings import OptimizationConfig

STATE: dict[str, Any] = {
    "run": {"config": {"seed": 0}},
    "stream": {"epoch": 1},
    "window": StepWindow().state_dict(),
    "validation": None,
}


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


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", keep_last=2, keep_every_steps=None)


def save(folder: CheckpointFolder, trainee: Trainee, *steps: int) -> None:
    for step in steps:
        folder.save(step, trainee, STATE, Accelerator(cpu=True))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("reverse", [False, True])
def test_everything_comes_back_by_name_and_goes_on(folder: CheckpointFolder, reverse: bool) -> None:
    saved, other = make_trainee(1), make_trainee(2, reverse)
    save(folder, saved, 3)
    state = read_state(folder.path(3))
    assert (state.step, state.stream, state.ema_num_updates) == (3, {"epoch": 1}, 3)
    restore(other, folder.path(3), state.ema_num_updates)
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


@pytest.mark.parametrize(
    ("keep_every", "expected"), [(None, [50, 60]), (20, [20, 40, 50, 60]), (25, [50, 60])]
)
def test_pruning(tmp_path: Path, keep_every: int | None, expected: list[int]) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", 2, keep_every)
    save(folder, make_trainee(1), 10, 20, 30, 40, 50, 60)
    assert folder.steps() == expected
    assert names(folder.directory) == {folder.path(step).name for step in expected}


def test_a_write_that_dies_leaves_nothing_that_looks_finished(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, make_trainee(1), 1)
    replace = os.replace

    def power_cut(source: Any, target: Any) -> None:
        if Path(target).name.startswith("step-"):
            raise OSError("power cut")
        replace(source, target)

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(GdistillError, match="power cut"):
        save(folder, make_trainee(2), 2)
    monkeypatch.undo()
    assert folder.steps() == [1]
    left = folder.directory / ".writing-step-00000001"  # of a process that was killed
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"half")
    save(folder, make_trainee(2), 2)
    assert names(folder.directory) == {"step-00000001", "step-00000002"}
    assert read_state(folder.path(2)).step == 2


def test_the_folder_is_renamed_when_every_file_in_it_is_synced(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the rename must find the bytes that state.json vouches for."""
    synced: set[int] = set()
    fsync, replace = os.fsync, os.replace

    def recorded(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(source: Any, target: Any) -> None:
        if Path(target).name.startswith("step-"):
            assert not [p.name for p in Path(source).iterdir() if p.stat().st_ino not in synced]
            synced.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "replace", checked)
    save(folder, make_trainee(1), 1)
    assert folder.steps() == [1]
    assert folder.directory.stat().st_ino in synced, "the rename itself must be synced"


def test_a_full_disk_is_one_line_and_leaves_room(folder: CheckpointFolder) -> None:
    """A limit on the size of files fails writes as a full disk does, safetensors' among them."""
    save(folder, make_trainee(1), 1)
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
        save(folder, make_trainee(1), 1)
    finally:
        os.umask(before)
    assert names(folder.path(1)) == {*FILES, "state.json"}
    assert {path.stat().st_mode & 0o777 for path in folder.path(1).iterdir()} == {0o640}
    parameters = ("a.weight", "a.bias", "b.weight", "b.bias")
    keys = {f"{name}/{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")}
    assert set(load_file(folder.path(1) / "optimizer.safetensors")) == keys


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
    save(folder, make_trainee(1), 1)
    path = folder.path(1) / "state.json"
    whole = path.read_bytes()
    for damage in DAMAGES:
        if isinstance(damage, dict):
            damage = json.dumps({**json.loads(whole), **damage}).encode()
        path.write_bytes(damage)
        with pytest.raises(IntegrityError, match=r"state\.json") as refused:
            read_state(folder.path(1))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_and_an_altered_file_are_named(folder: CheckpointFolder, name: str) -> None:
    save(folder, make_trainee(1), 1)
    path = folder.path(1) / name
    path.write_bytes(path.read_bytes()[:-3])
    for _ in range(2):
        with pytest.raises(IntegrityError, match=name):
            read_state(folder.path(1))
        path.unlink(missing_ok=True)
