"""``gdistill-eval curve``: folders of a sweep become a table at one entropy, or one error line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from evaluation.cli import app
from evaluation.curve import read_run
from evaluation.text.diversity import unigram_entropy_nats
from shards.errors import GdistillError, UsageError

LENGTH = 8


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception:
        raise done.exception
    return done.output


def write_sweep(
    folder: Path, values: dict[float, int], nfe: tuple[int, ...] = (4,), **changes: Any
) -> Path:
    """Samples over the words a and b; a setting's value says how many of eight are b."""
    for setting, num_b in values.items():
        home = folder / f"nucleus_p={setting}"
        home.mkdir(parents=True)
        for budget in nfe:
            settings = {"sampler": "ancestral", "nfe": budget, "nucleus_p": setting}
            settings |= changes.get("sampler", {})
            lines = []
            for index in range(6):
                tokens = [0] * (LENGTH - num_b) + [1] * num_b
                text = " ".join("ab"[token] for token in tokens)
                record = {"index": index, "tokens": tokens, "text": text, "nfe": budget, "seed": 3}
                lines.append(json.dumps(record | {"settings": settings}) + "\n")
            (home / f"samples-nfe{budget}.jsonl").write_text("".join(lines))
        known = {"student": "mdlm", "vocab_size": 4, "precision": "fp32"}
        known |= {"identity": {"weights_sha256": "00"}} | changes.get("settings", {})
        (home / "settings.json").write_text(json.dumps(known))
    return folder


def entropy(num_b: int) -> float:
    return unigram_entropy_nats([0] * (LENGTH - num_b) + [1] * num_b)


def test_the_table_is_what_the_points_say_at_the_entropy(
    tmp_path: Path, judge_folder: Path, cache: Path
) -> None:
    one = write_sweep(tmp_path / "one", {0.5: 1, 1.0: 4}, nfe=(4, 16))
    two = write_sweep(tmp_path / "two", {0.5: 0, 0.9: 1})
    target = (entropy(1) + entropy(4)) / 2
    out = tmp_path / "out"
    words = (one, f"other={two}", "--judge", judge_folder, "--entropy", target, "--out", out)
    text = run("curve", *words)
    results = json.loads((out / "results.json").read_text())
    points = {(p["model"], p["nfe"], p["setting"]): p for p in results["points"]}
    assert set(points) >= {("one", 4, 0.5), ("one", 16, 1.0), ("other", 4, 0.9)}
    cells = {(cell["model"], cell["nfe"]): cell for cell in results["matched"]}
    ends = [points["one", 4, setting]["perplexity"]["value"] for setting in (0.5, 1.0)]
    assert cells["one", 4]["perplexity"] == pytest.approx(math.sqrt(ends[0] * ends[1]))
    assert cells["one", 4]["is_reached"] and not cells["other", 4]["is_reached"]
    assert cells["other", 4]["entropy_nats"] == pytest.approx(entropy(1))
    other = next(line for line in text.splitlines() if line.startswith("other"))
    assert f"(H = {entropy(1):.2f})" in other and other.rstrip().endswith("-")
    assert (out / "curve.png").stat().st_size > 5000
    assert len(results["judge"]["judge_sha256"]) == 64
    (kept,) = cache.rglob("*.judged")
    assert len(kept.read_text().splitlines()) == 3  # these differ; the others were read before
    run("curve", *words)
    assert len(kept.read_text().splitlines()) == 3


def write_tokens(folder: Path, rows: list[list[int]]) -> Path:
    """A finished stage 1, as far as it is read here."""
    (folder / "validation").mkdir(parents=True)
    length = len(rows[0]) if rows else LENGTH
    flat = pa.array([token for row in rows for token in row], pa.int32())
    column = pa.FixedSizeListArray.from_arrays(flat, length)
    pq.write_table(pa.table({"input_ids": column}), folder / "validation" / "part-00000.parquet")
    part = {"name": "part-00000.parquet", "num_rows": len(rows)}
    record = {
        "row_length": length,
        "fingerprint": "f",
        "vocab_size": 4,
        "tokenizer": None,
        "bos_id": 2,
        "eos_id": 2,
        "splits": {"validation": {"parts": [part]}},
    }
    (folder / "tokens.json").write_text(json.dumps(record))
    return folder


def test_the_datas_entropy_is_taken_at_the_samples_length(
    tmp_path: Path, judge_folder: Path
) -> None:
    sweep = write_sweep(tmp_path / "one", {0.5: 1, 1.0: 4})
    rows = [[0, 1] * 4 + [3] * 4, [0] * 8 + [1] * 4]  # longer than the samples
    tokens = write_tokens(tmp_path / "run" / "tokens", rows)
    out = tmp_path / "out"
    run("curve", sweep, "--judge", judge_folder, "--data", tokens.parent, "--out", out)
    results = json.loads((out / "results.json").read_text())
    assert results["entropy_nats"] == pytest.approx(math.log(2) / 2)
    assert "2 rows of 12 tokens" in results["entropy_source"]
    short = write_tokens(tmp_path / "short", [[0, 1]])
    with pytest.raises(UsageError, match="shorter than the samples"):
        run("curve", sweep, "--judge", judge_folder, "--data", short)
    empty = write_tokens(tmp_path / "empty", [])
    with pytest.raises(UsageError, match="the split is empty"):
        run("curve", sweep, "--judge", judge_folder, "--data", empty)
    (tokens / "tokens.json").write_text("{}")
    with pytest.raises(GdistillError, match="damaged token dataset"):
        run("curve", sweep, "--judge", judge_folder, "--data", tokens)


def test_runs_that_mean_different_things_are_refused(tmp_path: Path, judge_folder: Path) -> None:
    one = write_sweep(tmp_path / "one", {0.5: 1, 1.0: 4})
    other = write_sweep(tmp_path / "other", {0.5: 1}, settings={"vocab_size": 9})
    with pytest.raises(UsageError, match=r"cannot be compared \[other: vocab_size\]"):
        run("curve", one, other, "--judge", judge_folder, "--entropy", 1)
    mixed = write_sweep(tmp_path / "mixed", {0.5: 1})
    write_sweep(mixed / "again", {1.0: 1}, settings={"identity": {"weights_sha256": "11"}})
    with pytest.raises(UsageError, match=r"mixes samples of several curves.*weights_sha256"):
        read_run(str(mixed))
    twice = write_sweep(tmp_path / "twice", {0.5: 1})
    write_sweep(twice / "again", {1.0: 1}, sampler={"tau": 0.5})
    with pytest.raises(UsageError, match="nucleus_p and tau"):
        read_run(str(twice))
    with pytest.raises(UsageError, match="two runs of one name"):
        run("curve", one, one, "--judge", judge_folder, "--entropy", 1)


@pytest.mark.parametrize("words", [(), ("--entropy", 1, "--data", "x"), ("--entropy", -1)])
def test_one_entropy_must_be_named(
    tmp_path: Path, judge_folder: Path, words: tuple[object, ...]
) -> None:
    sweep = write_sweep(tmp_path / "one", {0.5: 1})
    with pytest.raises(UsageError, match="--entropy"):
        run("curve", sweep, "--judge", judge_folder, *words, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
