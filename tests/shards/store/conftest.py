"""A sound store, and copies of it to be spoilt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.shards.store_cases import write_store


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small store, which nobody changes."""
    root = tmp_path_factory.mktemp("sound") / "store"
    write_store(root)
    return root


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    """A store of one's own, to be spoilt."""
    return Path(shutil.copytree(sound, tmp_path / "store"))
