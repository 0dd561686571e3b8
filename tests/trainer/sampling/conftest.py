"""The model that verifies drafts."""

from __future__ import annotations

import pytest

from tests.trainer.sampling.test_adaptive import tiny_llama


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its folder."""
    folder = tmp_path_factory.mktemp("verifier")
    tiny_llama().save_pretrained(folder)
    return str(folder)
