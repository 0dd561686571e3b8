"""Infilling: what counts as filled, against a judge's sums written out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from evaluation.cli import app
from evaluation.infilling import filled_spans, make_infill_rows, read_infill_rows
from evaluation.samples import DataRows
from evaluation.text.reading import load_judge
from shards.errors import GdistillError, UsageError

TRUTHS = [[2, 0, 1, 0, 1], [2, 1, 1, 1, 0]]
MASKED = [[2, 4], [1, 2, 3]]
FILLED = [[2, 0, 1, 0, 0], [2, 0, 0, 1, 0]]  # right: one of two, one of three


@pytest.fixture
def folder(tmp_path: Path, judge_folder: Path) -> Path:
    """Samples of a student whose tokenizer is the judge's."""
    tokenizer = AutoTokenizer.from_pretrained(judge_folder)
    lines = [
        {"index": index, "tokens": row, "text": tokenizer.decode(row[1:])}
        for index, row in enumerate(FILLED)
    ]
    (tmp_path / "samples").mkdir()
    file = tmp_path / "samples" / "samples.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"tokens": t, "masked": m} for t, m in zip(TRUTHS, MASKED, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception:
        raise done.exception
    return done.output


def test_the_filled_part_and_the_whole_row_by_hand(folder: Path, judge_folder: Path) -> None:
    words = ("--infill", folder / "rows.jsonl", "--judge", judge_folder)
    run(folder / "samples", *words, "--tokenizer", judge_folder)
    (part,) = json.loads((folder / "samples" / "results.json").read_text()).values()
    scores = {score["name"]: score for score in part["scores"]}
    assert scores["infill_exact_match"]["value"] == pytest.approx(2 / 5)
    assert scores["infill_exact_match"]["settings"]["masked"] == "2..3"
    model = load_judge(str(judge_folder)).model
    whole, filled = [], []
    for row, places in zip(FILLED, MASKED, strict=True):
        ids = torch.tensor([row])
        log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        nll = -log_probs.gather(-1, ids[0, 1:, None])[:, 0]
        whole.append(nll)
        filled.append(nll[[place - 1 for place in places]])
    for name, parts in (("generative_perplexity", whole), ("infill_perplexity", filled)):
        expected = float(torch.cat(parts).mean().exp())
        assert scores[name]["value"] == pytest.approx(expected, rel=1e-5)
    assert scores["infill_perplexity"]["details"]["num_tokens"] == 5


def test_a_judge_of_other_tokens_counts_those_over_the_filled_characters() -> None:
    class Letters:
        """Position by position two letters, the first token silent."""

        def decode(self, tokens: list[int]) -> str:
            return "".join(f"{chr(97 + token)}{chr(97 + token)}" for token in tokens)

    assert filled_spans(Letters(), [9, 0, 1, 2], [1, 3], "aabbcc") == [(0, 2), (4, 6)]
    assert filled_spans(Letters(), [0, 1, 2], [1], "aabbcc") == [(2, 4)]
    with pytest.raises(GdistillError, match="does not give the samples' text"):
        filled_spans(Letters(), [9, 0], [1], "other")


def test_rows_are_masked_uniformly_and_read_back(tmp_path: Path) -> None:
    data = DataRows(np.arange(400 * 6).reshape(400, 6), "x", "f", 4000)
    rows = make_infill_rows(data, 400, 2, seed=3)
    lines = (json.dumps({"tokens": row.tokens, "masked": row.masked}) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    assert read_infill_rows(tmp_path / "rows.jsonl") == rows
    assert rows == make_infill_rows(data, 400, 2, seed=3) != make_infill_rows(data, 400, 2, seed=4)
    counts = np.bincount([place for row in rows for place in row.masked], minlength=6)
    assert counts[0] == 0 and all(len(row.masked) == 2 for row in rows)
    # Each of five positions with chance 2/5: five standard errors of 400 rows are 49.
    assert abs(counts[1:] - 160).max() < 49
    with pytest.raises(UsageError, match="do not hold such rows"):
        make_infill_rows(data, 401, 2, seed=0)


def test_samples_of_other_rows_are_refused(folder: Path, judge_folder: Path) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"tokens": [2, 1, 1, 0, 1], "masked": [2]}) + "\n")
    with pytest.raises(GdistillError, match=r"does not fill its row.*samples\.jsonl:1"):
        run(folder / "samples", "--infill", rows)
    for line in (
        {"tokens": [2, None], "masked": [1]},
        {"tokens": [2, 1]},
        {"tokens": [1], "masked": [0]},
    ):
        rows.write_text(json.dumps(line) + "\n")
        with pytest.raises(GdistillError, match=r"without its truth.*rows\.jsonl:1"):
            run(folder / "samples", "--infill", rows)


def test_a_missing_tokenizer_is_asked_for(folder: Path, judge_folder: Path) -> None:
    words = (folder / "samples", "--infill", folder / "rows.jsonl")
    assert "infill_exact_match" in run(*words)
    with pytest.raises(UsageError, match="--tokenizer"):
        run(*words, "--judge", judge_folder)
