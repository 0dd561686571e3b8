"""Variety over samples: by hand, and where it must not move."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.quality.variety import frequency_divergence_nats, line_of, variety
from shards.errors import UsageError
from tests.trainer.run_cases import VOCAB, write_store


def test_divergence_by_hand() -> None:
    """Samples 3 : 1; corpus 5.5 : 1.5 : 0.5 of 7.5, half a token being added to each."""
    found = frequency_divergence_nats([[0, 0], [1, 0]], [[0] * 5, [1]], 3)
    expected = 0.75 * math.log(0.75 * 7.5 / 5.5) + 0.25 * math.log(0.25 * 7.5 / 1.5)
    assert found == pytest.approx(expected, abs=1e-12)


def test_what_the_corpus_lacks_costs_most_and_never_infinitely_much() -> None:
    corpus = [[0, 1] * 50]
    alike, foreign = ([[0, 1]], [[2, 2]])
    near, far = (frequency_divergence_nats(rows, corpus, 3) for rows in (alike, foreign))
    assert 0 <= near < 0.01 and far == pytest.approx(math.log(101.5 / 0.5), abs=1e-12)


def test_a_line_counts_over_all_samples() -> None:
    same, other = list(range(8)), list(range(1, 9))
    cells = line_of("name", [same, same, other], [same], 9).split(" | ")
    assert cells[:5] == ["| name", "3", "0.38", "0.40", "0.67"], "8 of 21, 6 of 15, 2 of 3"


def folder_of(path: Path, rows: list[list[int]]) -> Path:
    path.mkdir()
    lines = [json.dumps({"index": i, "tokens": row, "text": None}) for i, row in enumerate(rows)]
    (path / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (path / "settings.json").write_text("{}", encoding="utf-8")
    return path


def test_the_given_token_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = write_store(tmp_path / "store")
    rows = [[1, 2, 3, 2], [1, 3, 2, 3]]
    one = folder_of(tmp_path / "one", [[0, *row] for row in rows])
    other = folder_of(tmp_path / "other", [[4, *row] for row in rows])
    variety([one, other], store)
    first, second, last = capsys.readouterr().out.splitlines()[2:]
    assert first.split(" | ")[1:] == second.split(" | ")[1:]
    assert first.split(" | ")[2] == "0.67", "12, 23, 32 and 13 of six pairs"
    assert last.startswith("| validation rows | 2 |")


@pytest.mark.parametrize("row", [[1, VOCAB], [1]])
def test_samples_of_something_else(row: list[int], tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    with pytest.raises(UsageError, match=rf"not samples of this.*vocabulary of {VOCAB}"):
        variety([folder_of(tmp_path / "samples", [row])], store)
