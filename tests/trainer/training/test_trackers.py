"""Weights & Biases: refused where it is not installed, and one run there for one run here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import LoggerType

from shards.errors import GdistillError, UsageError
from tests.trainer.run_cases import tiny_run
from trainer.training.loop import train

WANDB = {"training__trackers": '["wandb"]'}
FAKE = """
started, logged = [], []

class Run:
    def log(self, values, step=None, **_): logged.append((step, values))
    def finish(self): pass

def init(project, **options):
    if options["dir"].endswith("refused"):
        raise RuntimeError("api_key not configured\\nsee the manual")
    started.append((project, options))
    return Run()
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package that keeps what it is told."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    # Accelerate looks once, when it is imported.
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.WANDB])
    yield importlib.import_module("wandb")
    del sys.modules["wandb"]


def test_a_resumed_run_is_the_same_one_there(wandb: Any, store: Path, tmp_path: Path) -> None:
    for steps, out in ((4, "out"), (10, "out"), (1, "other")):
        assert train(tiny_run(training__num_steps=steps, **WANDB), store, tmp_path / out)
    projects, options = zip(*wandb.started, strict=True)
    assert set(projects) == {"gdistill"} and options[0] == options[1]
    assert options[0]["resume"] == "allow" and options[0]["name"] == "out"
    assert options[2]["id"] != options[0]["id"]
    steps = [step for step, values in wandb.logged[:-2] if "train/loss" in values]
    assert steps == sorted(steps) and steps[-1] == 10
    with pytest.raises(GdistillError, match=r"does not start.*api_key not configured") as caught:
        train(tiny_run(**WANDB), store, tmp_path / "refused")
    assert "manual" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_one_line(store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not installed.*pip install wandb"):
        train(tiny_run(**WANDB), store, tmp_path / "out")
    assert not (tmp_path / "out").exists()
