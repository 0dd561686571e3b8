"""``gdistill-eval compare``: hand-worked differences, what pairing buys, what is refused."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from evaluation.cli import app
from evaluation.compare import compare_scores, read_run
from evaluation.score import PerSample, Score
from shards.errors import GdistillError, UsageError

JUDGE = {"judge": "tiny", "judge_sha256": "ab" * 32, "stride_tokens": 8, "max_tokens": 64}


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if done.exception:
        raise done.exception
    return done.output


def recorded(values: Sequence[float], indices: Sequence[int] | None = None) -> Score:
    kept = PerSample.of_mean(indices or range(len(values)), values)
    return Score("x", kept.value(), len(values), per_sample=kept)


def perplexity(nats: Sequence[float], **settings: Any) -> Score:
    kept = PerSample(tuple(range(len(nats))), tuple(nats), (2.0,) * len(nats), True)
    name = "generative_perplexity"
    return Score(name, kept.value(), len(nats), kept.interval(), JUDGE | settings, {}, (), kept)


def write_run(folder: Path, nats: Sequence[float], seed: int = 0, **settings: Any) -> Path:
    """As ``gdistill-eval`` leaves it."""
    folder.mkdir(parents=True)
    mauve = Score("mauve", 0.5, len(nats), settings={"seeds": [25]})
    part = {
        "name": "samples",
        "nfe_mean": 4.0,
        "drawn_with": {"seed": seed},
        "code_version": "0.1.0",
        "scores": [perplexity(nats, **settings).to_json(), mauve.to_json()],
    }
    (folder / "results.json").write_text(json.dumps({"samples.jsonl": part}))
    return folder


def test_differences_and_changes_by_hand(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", [2 * math.log(100)] * 5)
    better = write_run(tmp_path / "w1", [2 * math.log(80)] * 5)
    out = tmp_path / "out"
    text = run(plain, better, "--out", out)
    assert "-20.0%" in text and "baseline" in text
    told = json.loads((out / "results.json").read_text())["runs"]["w1"]["scores"]
    score = told["generative_perplexity"]
    assert score["difference"] == pytest.approx(-20.0)
    assert score["difference_interval_95"] == pytest.approx([-20.0, -20.0])
    assert score["change_percent"] == pytest.approx(-20.0) and score["num_pairs"] == 5
    assert told["mauve"]["difference"] == 0 and told["mauve"]["difference_interval_95"] is None
    (header, first, second) = csv.reader((out / "comparison.csv").read_text().splitlines())
    assert header[0] == "run" and first[0] == "plain" and "-20.0%" in second
    assert "| w1 |" in (out / "tables.md").read_text()
    other = run(plain, better, "--baseline", "w1", "--out", out)
    assert "+25.0%" in other


def test_a_pair_shares_its_luck() -> None:
    """What both runs share cancels in pairs: the interval shrinks from 2.8 to 0.14 noise units."""
    generator = np.random.default_rng(0)
    shared = generator.normal(0, 1.0, 200)
    ours = recorded((shared + generator.normal(0.1, 0.05, 200)).tolist())
    theirs = recorded((shared + generator.normal(0, 0.05, 200)).tolist())
    paired = compare_scores(ours, theirs, is_paired=True)
    alone = compare_scores(ours, theirs, is_paired=False)
    assert paired.interval is not None and alone.interval is not None
    width = (paired.interval[1] - paired.interval[0]) / (alone.interval[1] - alone.interval[0])
    assert width == pytest.approx(0.05, rel=0.3)
    assert paired.is_clear and not alone.is_clear
    assert (paired.num_pairs, alone.num_pairs) == (200, 0)


def test_pairs_are_found_by_index_not_by_place() -> None:
    ours = recorded([1.0, 2.0, 3.0], [2, 0, 1])
    theirs = recorded([2.0, 3.0, 1.0], [0, 1, 2])
    compared = compare_scores(ours, theirs, is_paired=True)
    assert compared.difference == 0 and compared.interval == (0.0, 0.0)
    fewer = compare_scores(ours, recorded([2.0, 3.0], [0, 1]), is_paired=True)
    assert fewer.num_pairs == 0  # not all have a partner: resampled each on its own


def test_an_unpaired_interval_covers_the_truth() -> None:
    """95% of 200 intervals of a difference of 0.3, within four standard errors."""
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        ours = recorded(generator.normal(1.3, 1, 60).tolist())
        theirs = recorded(generator.normal(1.0, 1, 60).tolist())
        interval = compare_scores(ours, theirs, is_paired=False).interval
        assert interval is not None
        covered += interval[0] <= 0.3 <= interval[1]
    assert covered / 200 > 0.95 - 0.062


def test_other_seeds_are_never_paired(tmp_path: Path) -> None:
    nats = [1.0, 2.0, 3.0, 4.0]
    one, two = write_run(tmp_path / "one", nats), write_run(tmp_path / "two", nats, seed=1)
    run(one, two, "--out", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    score = told["runs"]["two"]["scores"]["generative_perplexity"]
    assert score["num_pairs"] == 0
    low, high = score["difference_interval_95"]
    assert low < 0 < high


@pytest.mark.parametrize(
    ("field", "value"),
    [("judge_sha256", "cd" * 32), ("stride_tokens", 4), ("max_tokens", 32), ("judge", "other")],
)
def test_numbers_measured_differently_share_no_column(
    tmp_path: Path, field: str, value: object
) -> None:
    one = write_run(tmp_path / "one", [1.0, 2.0])
    two = write_run(tmp_path / "two", [1.0, 2.0], **{field: value})
    with pytest.raises(
        UsageError, match=rf"measured differently \[two: {field}\]; got .* as in one"
    ):
        run(one, two, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "mauve" in run(one, two, "--scores", "mauve", "--out", tmp_path / "out")


def test_what_cannot_be_compared_is_one_line(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [1.0, 2.0])
    with pytest.raises(UsageError, match="one run cannot be compared"):
        run(one)
    with pytest.raises(UsageError, match="runs of one name"):
        run(one, one)
    with pytest.raises(UsageError, match=r"no scores there.*run gdistill-eval"):
        run(one, tmp_path)
    with pytest.raises(UsageError, match="no such run"):
        run(one, f"two={one}", "--baseline", "three")
    with pytest.raises(UsageError, match=r"not every run has this score.*--scores"):
        run(one, f"two={one}", "--scores", "nothing")
    broken = write_run(tmp_path / "broken", [1.0, 2.0])
    text = (broken / "results.json").read_text()
    for change in (text.replace('"value": 0.5', '"value": null'), "[]", "{", '{"a": {}}'):
        (broken / "results.json").write_text(change)
        with pytest.raises(GdistillError, match=r"scores cannot be read|no scores there"):
            run(one, broken)


def test_budgets_stand_in_their_order(tmp_path: Path) -> None:
    """``nfe16`` comes before ``nfe4`` in a file of sorted keys, not in a table."""
    folder = write_run(tmp_path / "a", [3.0, 4.0])
    part = json.loads((folder / "results.json").read_text())["samples.jsonl"]
    budgets = {f"nfe{n}.jsonl": part | {"name": f"nfe{n}", "nfe_mean": float(n)} for n in (16, 4)}
    (folder / "results.json").write_text(json.dumps(budgets, sort_keys=True))
    assert [part.nfe for part in read_run(str(folder))] == [4, 16]
