"""Stores that several test files of this folder train on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.backbone_cases import write_backbone
from tests.trainer.run_cases import write_store


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny shapes: a second thread costs more than it gives, the more so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished store of the posterior codec."""
    return write_store(tmp_path_factory.mktemp("store") / "posterior")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model of Llama's form, which fits that store."""
    return write_backbone(tmp_path_factory.mktemp("models") / "llama")
