"""``gdistill-shards couplings``: the table of a store whose teacher is a bigram."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from shards.cli import app
from shards.errors import UsageError
from shards.noise.probabilities import DenseProbabilities
from shards.store.store import ShardStore
from shards.tools import couplings as module
from shards.tools.couplings import CLASSES, measure_couplings
from tests.trainer.run_cases import VOCAB, write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("couplings") / "store", num_entries=VOCAB)


def test_behind_one_token_a_bigram_says_the_same_so_every_coupling_agrees(store: Path) -> None:
    """Equal but for p_x, which is stored exactly, and the others' half precision."""
    report = measure_couplings(ShardStore.open(store), num_pairs=300)
    couplings, (most, least) = report.figures[:-2], report.figures[-2:]
    assert len(couplings) == 6
    for line in couplings:
        assert line.agreement is not None
        assert line.same_last_token == pytest.approx(1, abs=5e-3)
        assert line.random_pairs <= most.random_pairs + 1e-9 < 0.9
        assert 0.98 < line.agreement <= 1
    assert least.random_pairs <= couplings[0].random_pairs + 1e-9
    assert report.pairs_by_variation[0] >= 300 and sum(report.pairs_by_variation) == 600
    sizes = {line.name.split(",")[0]: line.bytes_per_token for line in couplings}
    assert sizes["uniform"] == 8
    assert sizes["path"] == pytest.approx(4, abs=1)  # a uniform unigram over 12 tokens


def test_chunks_and_repetition_change_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ShardStore.open(store)
    whole = measure_couplings(opened, num_pairs=40)
    assert measure_couplings(opened, num_pairs=40) == whole
    other = measure_couplings(opened, num_pairs=40, seed=1)
    monkeypatch.setattr(module, "CHUNK_ENTRIES", 5 * VOCAB)
    parts = measure_couplings(opened, num_pairs=40)
    for first, second, third in zip(whole.figures, parts.figures, other.figures, strict=True):
        assert first.random_pairs == pytest.approx(second.random_pairs, abs=1e-12)
        assert first.by_variation == pytest.approx(second.by_variation, abs=1e-12)
        assert first.random_pairs != third.random_pairs


def test_the_command_prints_a_table_and_json(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app(["couplings", str(store), "--pairs", "20"], standalone_mode=False)
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:3] == ["coupling", "B/token", "agreement"]
    assert any(line.startswith("path, huffman") for line in table)
    assert len({len(line) for line in table}) == 1
    app(["couplings", str(store), "--pairs", "20", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["classes_of_total_variation"] == list(CLASSES)
    assert found["num_pairs"] == 20 and len(found["figures"]) == 8


def test_pairs_are_of_two_positions_and_all_of_them() -> None:
    before = torch.tensor([4, 2, 4, 7, 2, 4])
    probabilities = DenseProbabilities(torch.zeros(6, 3).log_softmax(1))
    positions = module._Positions(torch.zeros(6, dtype=torch.int64), before, probabilities)
    random = np.random.default_rng(0)
    alike = {tuple(pair) for pair in positions.alike_pairs(400, random).tolist()}
    assert alike == {*permutations((0, 2, 5), 2), (1, 4), (4, 1)}
    assert {tuple(pair) for pair in positions.random_pairs(900, random).tolist()} == {
        *permutations(range(6), 2)
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pairs": 0}, "too few pairs"),
        ({"split": "test"}, "split"),
    ],
)
def test_mistakes(store: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure_couplings(ShardStore.open(store), **options)  # type: ignore[arg-type]


def test_a_frozen_draw_has_no_probabilities(tmp_path: Path) -> None:
    frozen = ShardStore.open(write_store(tmp_path / "store", "topk"))
    with pytest.raises(UsageError, match="stores a draw of the noise"):
        measure_couplings(frozen)
