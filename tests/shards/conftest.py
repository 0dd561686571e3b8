"""What several tests of this folder start from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shards.codec.protocol import make_codec
from shards.store.store import ShardStore
from tests.commands import call
from tests.shards.store_cases import VOCAB, Run, write_encoded, write_store


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code and output of one call."""

    def run_once(*arguments: object) -> tuple[int, str]:
        code = call("gdistill-shards", *arguments)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run_once


@pytest.fixture(scope="session")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    """A store with every probability (num_entries = V)."""
    folder = tmp_path_factory.mktemp("posterior") / "store"
    return write_encoded(folder, make_codec("posterior", num_entries=VOCAB))


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small store, finished; nobody changes it."""
    folder = tmp_path_factory.mktemp("sound") / "store"
    write_store(folder)
    return folder


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    """A store of one's own, to be spoilt."""
    return Path(shutil.copytree(sound, tmp_path / "store"))
