"""The model that verifies drafts, and the authors' numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.trainer.sampling.test_adaptive import tiny_llama


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its folder."""
    folder = tmp_path_factory.mktemp("verifier")
    tiny_llama().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def ops(golden: Path) -> dict[str, Tensor]:
    """What the authors' single operations gave."""
    return load_file(golden / "ops.safetensors")
