"""What a scored row must be, and each way in which it is not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.scored import ScoreFiles, same_length, scored_row
from shards.errors import GdistillError, UsageError

HALF, QUARTER = math.log(0.5), math.log(0.25)
RECORD: dict[str, Any] = {
    "token_ids": [0, 3, 5],
    "token_log_probs": [None, HALF, QUARTER],
    "top_ids": [[], [3, 1], [1]],
    "top_log_probs": [[], [HALF, QUARTER], [HALF]],
}


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_one(path: Path) -> Any:
    return ScoreFiles.open([path], vocab_size=8, num_top=2).read(0, 1)[0]


def test_a_row_is_laid_out_likeliest_first() -> None:
    row = scored_row(
        [0, 3, 5],
        [None, HALF, QUARTER],
        [None, {1: QUARTER, 3: HALF, 2: math.log(0.1)}, {1: HALF}],
        vocab_size=8,
        num_top=2,
        where="here",
    )
    assert row.top_ids.tolist() == [[-1, -1], [3, 1], [1, -1]]
    np.testing.assert_allclose(row.top_log_probs[1], [HALF, QUARTER], rtol=1e-6)
    assert row.top_log_probs[2, 1] == -np.inf
    np.testing.assert_allclose(row.token_log_probs, [0, HALF, QUARTER], rtol=1e-6)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_of_the_documented_schema_are_read_by_index(tmp_path: Path, kind: str) -> None:
    records = [{**RECORD, "token_ids": [0, 3, 5 + i]} for i in range(3)]
    paths = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path, part in zip(paths, (records[:2], records[2:]), strict=True):
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(part), path, row_group_size=1)
        else:
            write_lines(path, *part)
    files = ScoreFiles.open(paths[::-1], vocab_size=8, num_top=2)
    assert files.num_rows == 3
    rows = files.read(1, 3)
    assert same_length(rows, 3, "x").tolist() == [[0, 3, 6], [0, 3, 7]]
    assert rows[0].top_ids.tolist() == [[-1, -1], [3, 1], [1, -1]]


def test_an_engines_batch_output_is_read(tmp_path: Path) -> None:
    tops = [None, {"3": {"logprob": HALF}, "1": {"logprob": QUARTER}}, {"5": {"logprob": QUARTER}}]
    body = {"prompt_token_ids": [0, 3, 5], "choices": [{"prompt_logprobs": tops}]}
    row = read_one(write_lines(tmp_path / "a.jsonl", {"response": {"body": body}}))
    assert row.token_ids.tolist() == [0, 3, 5]
    np.testing.assert_allclose(row.token_log_probs, [0, HALF, QUARTER], rtol=1e-6)


TOPS: list[Any] = [None, {"3": {"logprob": HALF}}, {"5": {"logprob": QUARTER}}]
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [0, 3, 8]}, "outside the vocabulary.*8"),
    ({"top_ids": [[], [3, 135], [1]]}, "outside the vocabulary.*135"),
    ({"token_log_probs": [None, 0.5, QUARTER]}, "not a log-probability.*0.5"),
    ({"token_log_probs": [None, None, QUARTER]}, "not a log-probability.*None"),
    ({"token_log_probs": [None, HALF]}, "lists differ in length"),
    (
        {"top_ids": [[], [], [1]], "top_log_probs": [[], [], [HALF]]},
        "without its most probable",
    ),
    ({"top_ids": [[], [3], [1]]}, "top_ids and top_log_probs differ"),
    ({"top_log_probs": [[], [HALF, math.log(0.7)], [HALF]]}, "more than 1.*1.2"),
    ({"top_log_probs": [[], [QUARTER, QUARTER], [HALF]]}, "two log-probabilities"),
    ({"top_log_probs": None}, "a column is missing.*top_log_probs"),
    ({"token_ids": [0, -1, 5]}, "outside the vocabulary.*-1"),
    ({"top_ids": [[], [3, -1], [1]]}, "outside the vocabulary.*-1"),
    ({"token_ids": [0, 3.5, 5]}, "not token ids.*3.5"),
    ({"token_ids": [0, "a", 5]}, "not token ids.*'a'"),
    ({"token_ids": [0, True, 5]}, "not token ids.*True"),
    ({"token_ids": [0, 1 << 80, 5]}, "not token ids.*1208"),
    ({"token_ids": 5}, "no list.*token_ids = 5"),
    ({"token_log_probs": [None, "x", HALF]}, "not a log-probability.*'x'"),
    ({"token_log_probs": "abc"}, "no list.*token_log_probs"),
    ({"top_ids": [[], ["a", "b"], [1]]}, "not token ids.*'a'"),
    ({"top_ids": [[], 7, [1]]}, "not token ids.*7"),
    ({"top_ids": [[], [3, 3], [1]]}, "an id is there twice.*3, 3"),
    ({"top_log_probs": [[], [HALF, QUARTER], [HALF], [HALF]]}, "top_log_probs differ.*position 3"),
    ({"top_log_probs": [[], 7, [HALF]]}, "top_ids and top_log_probs differ"),
    ({"top_ids": {}}, "no list.*top_ids"),
]
BAD_ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"response": None, "error": {"code": 500}}, "without token ids.*'error'"),
    ({"response": {"body": None}}, "without token ids"),
    ({"choices": None, "prompt_token_ids": [1, 2]}, "not an engine's answer"),
    ({"choices": [None], "prompt_token_ids": [1, 2]}, "not an engine's answer"),
    ({"choices": "x"}, "without token ids"),
    ({"choices": [{"prompt_logprobs": TOPS}], "prompt_token_ids": "abc"}, "not token ids"),
    ({"choices": [{"prompt_logprobs": 3}], "prompt_token_ids": [0, 3, 5]}, "another tokeniz"),
    (
        {
            "choices": [{"prompt_logprobs": [*TOPS[:2], {"5": {}}]}],
            "prompt_token_ids": [0, 3, 5],
        },
        "not a log-probability.*position 2.*None",
    ),
]


@pytest.mark.parametrize(
    ("record", "message"),
    [*(({**RECORD, **change}, message) for change, message in BAD_ROWS), *BAD_ANSWERS],
)
def test_bad_rows_and_answers_name_file_row_and_reason(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", record)
    with pytest.raises(GdistillError, match=message) as caught:
        read_one(path)
    assert "a.jsonl, row 1" in str(caught.value) and "\n" not in str(caught.value)


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{not json}\n")
    with pytest.raises(GdistillError, match=r"not a line of JSON.*line 1"):
        read_one(tmp_path / "a.jsonl")
    pq.write_table(pa.table({"token_ids": [[1]]}), tmp_path / "b.parquet")
    with pytest.raises(GdistillError, match=r"a column is missing.*token_log_probs"):
        read_one(tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(GdistillError, match="not a Parquet file"):
        read_one(tmp_path / "c.parquet")
    with pytest.raises(UsageError, match=r"no scored rows.*\.csv"):
        ScoreFiles.open([tmp_path / "d.csv"], 8, 2)


def test_rows_of_different_lengths_are_refused(tmp_path: Path) -> None:
    short = {name: value[:2] for name, value in RECORD.items()}
    path = write_lines(tmp_path / "a.jsonl", RECORD, short)
    rows = ScoreFiles.open([path], 8, 2).read(0, 2)
    with pytest.raises(GdistillError, match=r"different lengths.*2 tokens.*3"):
        same_length(rows, 3, str(path))
