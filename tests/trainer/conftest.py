"""Stores, models and finished runs that several files of this folder read and copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.trainer.backbone_cases import write_backbone
from tests.trainer.run_cases import tiny_run, write_store
from tests.trainer.sampling_cases import tiny_llama
from trainer.training.loop import train


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


@pytest.fixture(scope="session")
def finished(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a student with noise."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert train(tiny_run(training__trackers='["tensorboard"]'), store, out)
    return out


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the model that verifies drafts."""
    folder = tmp_path_factory.mktemp("verifier")
    tiny_llama().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def ops(golden: Path) -> dict[str, Tensor]:
    """What the authors' single operations gave."""
    return load_file(golden / "ops.safetensors")
