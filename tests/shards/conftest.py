"""What several tests of this folder start from."""

from __future__ import annotations

import pytest

from shards.codec.registry import make_codec
from shards.store.store import ShardStore
from tests.commands import call
from tests.shards.cli_cases import VOCAB, Run, write_encoded


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code and output of one call."""

    def run_once(*arguments: object) -> tuple[int, str]:
        code = call("gdistill-shards", *arguments)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run_once


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    """A store with every probability (num_entries = V)."""
    folder = tmp_path_factory.mktemp("posterior") / "store"
    return write_encoded(folder, make_codec("posterior", num_entries=VOCAB))
