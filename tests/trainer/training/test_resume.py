"""Interrupted runs equal uninterrupted ones, to the last bit; other runs are refused by name."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shards.errors import IntegrityError, UsageError
from shards.interrupts import Stopped
from shards.store.store import ShardStore
from tests.trainer.run_cases import assert_same_run, tiny_run, write_store
from trainer.training.loop import Trainer, train
from trainer.training.settings import RunConfig


def demanding_run(**changes: Any) -> RunConfig:
    """Everything that has a state: dropout, accumulation, epochs, threads, averages, search."""
    settings: dict[str, Any] = {
        "student": "bd3lm",
        "model__block_size": 4,
        "model__dropout": 0.1,
        "model__diffusion__search_schedule": "true",
        "optimization__schedule": "cosine",
        "training__num_steps": 14,  # 5 batches an epoch
        "training__micro_batch_size": 3,
        "training__precision": "bf16",
        "training__num_workers": 2,
        "training__log_every_steps": 4,
        "training__validate_every_steps": 7,
        "training__num_validation_rows": 4,
    }
    return tiny_run(**{**settings, **changes})


def run_with_signal(
    config: RunConfig, store: Path, out: Path, at_step: int, number: int = signal.SIGTERM
) -> bool:
    """Train; this process gets the signal while it works on step ``at_step`` + 1."""
    trainer = Trainer(config, ShardStore.open(store), out)
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


@pytest.fixture(scope="module")
def uninterrupted(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert train(demanding_run(), store, out)
    return out


def test_two_interruptions_change_nothing(store: Path, uninterrupted: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert not run_with_signal(demanding_run(), store, out, 2)
    assert not (out / "model").exists()
    assert not run_with_signal(demanding_run(), store, out, 9)
    assert train(demanding_run(), store, out)
    assert_same_run(out, uninterrupted)


def test_lines_behind_the_last_checkpoint_are_written_again(
    store: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    config = demanding_run(training__checkpoint_every_steps=5)
    trainer = Trainer(config, ShardStore.open(store), out)
    trainer.optimizer.step = failing_after(trainer.optimizer.step, 9)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="power cut"):
        trainer.run()
    with open(out / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "train", "st')  # a line that was being written
    assert json.loads((out / "metrics.jsonl").read_bytes().splitlines()[-2])["step"] == 8
    assert train(config, store, out)
    assert_same_run(out, uninterrupted)


def failing_after(function: Any, num_calls: int) -> Any:
    calls = iter(range(num_calls))

    def wrapped(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise RuntimeError("power cut")
        return function(*arguments)

    return wrapped


def test_a_finished_run_is_left_as_it_is(store: Path, uninterrupted: Path) -> None:
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    model = (uninterrupted / "model" / "model.safetensors").read_bytes()
    assert train(demanding_run(), store, uninterrupted)
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before
    assert (uninterrupted / "model" / "model.safetensors").read_bytes() == model


def test_ctrl_c_saves_and_says_so(store: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_with_signal(tiny_run(), store, tmp_path / "run", 3, signal.SIGINT)
    assert list((tmp_path / "run" / "checkpoints").glob("step-00000004/state.json"))


@pytest.fixture
def stopped(store: Path, tmp_path: Path) -> Path:
    run_with_signal(tiny_run(), store, tmp_path / "run", 3)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("field", "old", "new"),
    [
        ("seed", "0", "5"),
        ("optimization.learning_rate", "0.01", "0.02"),
        ("model.num_layers", "1", "2"),
        ("training.global_batch_size", "8", "4"),
    ],
)
def test_a_changed_config_is_named(
    store: Path, stopped: Path, field: str, old: str, new: str
) -> None:
    with pytest.raises(UsageError) as caught:
        train(tiny_run(**{field.replace(".", "__"): new}), store, stopped)
    assert (caught.value.where, caught.value.got) == (field, new)
    assert caught.value.expected.startswith(old)


def test_another_store_and_a_damaged_checkpoint_are_named(
    store: Path, stopped: Path, tmp_path: Path
) -> None:
    other = write_store(tmp_path / "other", teacher={"id": "trigram", "weights_sha256": "0" * 64})
    with pytest.raises(UsageError, match=r"store\.teacher\.id.*trigram.*bigram"):
        train(tiny_run(), other, stopped)
    path = stopped / "checkpoints" / "step-00000004" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(IntegrityError, match=r"weights\.safetensors"):
        train(tiny_run(), store, stopped)


def test_how_a_run_is_carried_out_may_change(store: Path, stopped: Path) -> None:
    changed = tiny_run(training__num_workers=1, training__keep_last=1, training__num_steps=12)
    assert train(changed, store, stopped)
    assert list((stopped / "checkpoints").glob("step-*")) == [
        stopped / "checkpoints" / "step-00000012"
    ]


def test_a_cosine_run_cannot_be_prolonged(store: Path, tmp_path: Path) -> None:
    cosine = {"optimization__schedule": "cosine"}
    run_with_signal(tiny_run(**cosine), store, tmp_path / "run", 3)
    with pytest.raises(UsageError, match=r"training\.num_steps"):
        train(tiny_run(**cosine, training__num_steps=20), store, tmp_path / "run")
