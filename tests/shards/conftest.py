"""What several tests of this folder start from."""

from __future__ import annotations

import sys

import pytest

from shards import cli
from shards.codec.registry import make_codec
from shards.store.store import ShardStore
from tests.shards.cli_cases import VOCAB, Run, write_encoded


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Exit code and output of one call."""

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gdistill-shards", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as done:
            code = int(done.code or 0)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    """A store with every probability (num_entries = V)."""
    folder = tmp_path_factory.mktemp("posterior") / "store"
    return write_encoded(folder, make_codec("posterior", num_entries=VOCAB))
