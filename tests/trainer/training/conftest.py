"""Finished runs that several files of this folder read and copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.run_cases import tiny_run
from trainer.training.loop import train


@pytest.fixture(scope="session")
def finished(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student with noise."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert train(tiny_run(training__trackers='["tensorboard"]'), store, out)
    return out


@pytest.fixture(scope="session")
def plain(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student without noise."""
    out = tmp_path_factory.mktemp("plain") / "run"
    assert train(tiny_run(model__conditioning="none"), store, out)
    return out
