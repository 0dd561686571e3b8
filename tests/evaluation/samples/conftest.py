"""The stage on which hostile samples are tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.samples.hostile_samples import Stage, V
from tests.trainer.sampling.test_adaptive import tiny_llama


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    tiny_llama(vocab_size=V).save_pretrained(folder)
    return folder


@pytest.fixture
def stage(
    tmp_path: Path, judge_folder: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> Stage:
    monkeypatch.chdir(tmp_path)
    return Stage(tmp_path, judge_folder, teacher)
