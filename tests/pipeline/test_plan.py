"""What a run would write, how long it would take and what it would cost, before it is begun."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CLIPConfig, PreTrainedConfig, T5Config

from pipeline.plan import Estimate, Plan, make_plan, measured_bytes_per_token
from pipeline.settings import PlanOptions, resolve_request
from pipeline.teacher import Teacher
from shards.codec.registry import CODECS, make_codec
from shards.errors import GdistillError, UsageError
from tests.pipeline import extract_cases
from tests.pipeline.conftest import Asked
from tests.pipeline.extract_cases import ROW_LENGTH, VOCAB_SIZE, options, run

INFINITE, NOT_A_NUMBER = float("inf"), float("nan")
Planned = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    """The plan of a request whose outputs go into a folder, with figures given to it."""

    def plan(given: dict[str, Any], out: Path = tmp_path, **figures: float) -> Plan:
        return make_plan(resolve_request(out, given), PlanOptions(**figures))

    return plan


def test_figures_out_of_range_and_unreadable_rates_are_refused_by_name(
    tmp_path: Path, asked: Asked, planned: Planned
) -> None:
    rates = ["{", "[]", '{"tokens_per_second": null}']
    for value in (0.0, -1.0, INFINITE, NOT_A_NUMBER):
        rates.append(json.dumps({"tokens_per_second": value}))
        for name in ("rate", "tokens", "price"):
            with pytest.raises(UsageError, match=rf"out of range \[--{name}\]"):
                PlanOptions(**{name: value})
    for text in rates:
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(GdistillError, match=r"cannot read an earlier run's rate.*--rate"):
            planned(asked())


@pytest.mark.parametrize("config", [T5Config(vocab_size=VOCAB_SIZE), CLIPConfig()], ids=type)
def test_a_model_that_writes_no_text_is_refused(
    tmp_path: Path, corpus: Path, config: PreTrainedConfig, planned: Planned
) -> None:
    config.save_pretrained(tmp_path / "model")
    extract_cases.save_tokenizer(tmp_path / "model")
    with pytest.raises(UsageError, match="causal language model"):
        planned(options(tmp_path / "model", corpus))


def test_plan_runs_no_teacher_and_writes_nothing(
    tmp_path: Path, asked: Asked, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large one; a small one is asked about a few rows."""
    monkeypatch.setattr(Teacher, "load", lambda *_, **__: pytest.fail("the teacher was loaded"))
    monkeypatch.setattr("pipeline.plan.LARGEST_TRIED_TEACHER", 0)
    plan = planned(asked(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert set(plan.bytes_per_token) == set(CODECS)
    assert plan.num_tokens["OpenWebText"] == 9_000_000_000
    assert plan.num_tokens["FineWeb scale"] == 10**13
    assert plan.teacher.vocab_size == VOCAB_SIZE
    # GPT-2: embeddings, 2 blocks, final norm; D = 16, head tied.
    block = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16) + 4 * 16
    embeddings = (VOCAB_SIZE + extract_cases.CONTEXT_LENGTH) * 16
    assert plan.teacher.num_parameters == embeddings + 2 * block + 32
    text = "\n".join(plan.lines())
    assert "*posterior" in text and "hours of this CPU" in text and "measured just now" in text


def test_tokens_are_estimated_then_counted(tmp_path: Path, asked: Asked, planned: Planned) -> None:
    estimate = planned(asked())
    assert "estimated" in estimate.token_origin
    run(tmp_path, asked())
    counted = planned(asked())
    assert "counted" in counted.token_origin
    exact = counted.num_tokens["this corpus"]
    assert exact % ROW_LENGTH == 0
    # All 54 training documents are in the sample; what differs is the remainder of the packing.
    assert abs(estimate.num_tokens["this corpus"] - exact) < 0.1 * exact
    (rate,) = counted.rates
    assert "measured by the run" in rate.origin
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert rate.tokens_per_second == summary["tokens_per_second"]


def test_every_split_and_every_part_of_a_corpus_is_counted(
    tmp_path: Path, teacher: Path, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One document in two splits, all of it validation, and short documents before long ones."""
    (tmp_path / "one.txt").write_text(" ".join(f"w{i % 21}" for i in range(3000)))
    lines = ["w1 w2 w3"] * 400 + [" ".join(["w4"] * 60)] * 400
    (tmp_path / "many.txt").write_text("\n".join(lines) + "\n")
    every_line = sum(len(line.split()) + 1 for line in lines)
    # Of a document's 8,000 characters 740 are looked at: ten times its 21 words.
    monkeypatch.setattr("pipeline.plan.DOCUMENT_CHARACTERS", 740)
    cases = [("one.txt", 0.1, "concat", 3000), ("one.txt", 1.0, "concat", 3000)]
    cases += [("many.txt", 0.3, "wrap", every_line * ROW_LENGTH / (ROW_LENGTH - 2))]
    cases += [("many.txt", 0.3, "pad", 800 * ROW_LENGTH), ("many.txt", 0.3, "concat", every_line)]
    for name, fraction, packing, expected in cases:
        corpus = {"validation_fraction": fraction, "packing": packing}
        given = options(teacher, tmp_path / name, corpus=corpus)
        plan = planned(given, rate=1.0)
        assert plan.num_tokens["this corpus"] == pytest.approx(expected, rel=0.02)
        # Of 800 documents not all are read, but a padded one is a row whatever it holds.
        assert ("+-" in plan.token_origin) == (name == "many.txt" and packing != "pad")
    limited = planned({**given, "store": {"rows": 7}}, rate=1.0)
    assert limited.num_tokens["this corpus"] == 2 * 7 * ROW_LENGTH


def test_hours_and_price_follow_from_the_rate(asked: Asked, planned: Planned) -> None:
    plan = planned(asked(), rate=1000.0, tokens=7_200_001.0, price=3.0)
    plan = dataclasses.replace(plan, stage_1=2000.0, bytes_per_token={"full": 50.0})
    lines = (re.split(r"\s{2,}", line.strip()) for line in plan.table())
    rows = {name: figures for name, *figures in lines}
    assert rows["rows"] == ["600,001", "750,000,000", "833,333,333,334"]
    assert rows["full (50.0 B/token)"] == ["360.0 MB", "450.0 GB", "500.0 TB"]
    assert rows["stage 1: hours of this CPU"] == ["1", "1,250", "1,388,889"]
    assert rows["stage 2: hours of one process"] == ["2", "2,500", "2,777,778"]
    assert rows["price at 3 per hour"] == ["6", "7,500", "8,333,333"]


def test_float32_has_a_fifteenth_of_a_gpus_peak(asked: Asked, planned: Planned) -> None:
    rates = {}
    for dtype in ("float32", "bfloat16"):
        plan = planned(asked(device="auto", teacher={"dtype": dtype}))
        rate = plan.rates[0]
        assert rate.machine == "one H100" and dtype in rate.origin
        rates[dtype] = rate.tokens_per_second
    assert 14 < rates["bfloat16"] / rates["float32"] < 16
    flops = 2 * plan.teacher.num_parameters * rates["bfloat16"]
    assert flops == pytest.approx(0.4 * 989e12), "two for each weight, 40% of the peak"
    assert plan.stage_1 and "gdistill-extract tokens" in "\n".join(plan.lines())


def test_a_cpus_rate_follows_from_the_product_that_was_timed(
    asked: Asked, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two operations for each of 768^3 products in 2 ms; a token takes two for each weight."""
    timed = SimpleNamespace(mean=0.002)
    monkeypatch.setattr("pipeline.plan.Timer.blocked_autorange", lambda *_, **__: timed)
    plan = planned(asked(device="cpu"))
    (rate,) = plan.rates
    flops_per_second = 0.4 * 905_969_664 / 0.002
    assert rate.tokens_per_second * 2 * plan.teacher.num_parameters == pytest.approx(flops_per_second)


def test_bytes_are_those_the_run_writes(tmp_path: Path, teacher: Path, planned: Planned) -> None:
    corpus = extract_cases.write_corpus(tmp_path / "corpus.txt", 1000)
    given = {**options(teacher, corpus, corpus={"validation_fraction": 0.0}), "store": {}}
    expected = planned(given).bytes_per_token["posterior"]
    run(tmp_path, given)
    summary = json.loads((tmp_path / "summary.json").read_text())
    scored = summary["bytes_per_token"] * ROW_LENGTH / (ROW_LENGTH - 1)
    assert expected == pytest.approx(scored, rel=0.1)


def test_neighbours_that_are_alike_widen_the_error() -> None:
    """Sixteen blocks of equal documents: 256 documents tell as much as 16 do."""
    means = [float(10 + 3 * (block % 4)) for block in range(16)]
    alike = Estimate(10_000, [[mean] * 16 for mean in means], [])
    assert alike.num_tokens == pytest.approx(10_000 * sum(means) / 16)
    expected = 10_000 * stdev(means) / 4 * (1 - 256 / 10_000) ** 0.5
    assert alike.standard_error == pytest.approx(expected)
    assert Estimate(256, [[1.0] * 16] * 16, []).standard_error == 0


def test_a_corpus_out_of_reach_leaves_the_reference_columns(tmp_path: Path, teacher: Path, planned: Planned) -> None:
    plan = planned(options(teacher, tmp_path / "absent.txt"))
    assert list(plan.num_tokens) == ["OpenWebText", "FineWeb scale"]
    assert "cannot be read here" in plan.token_origin


def test_a_teacher_that_writes_is_planned_as_it_is_run(planned: Planned) -> None:
    """It writes as many training rows as asked for; of validation no more than there are, but for
    a number of its own."""
    given: dict[str, Any] = {"corpus": {"spec": "maze:k4"}, "mode": "sequential"}
    for store, rows in (
        ({"rows": 800}, 800 + 500),
        ({"rows": 3000}, 3000 + 500),
        ({"rows": 10, "validation_rows": 600}, 10 + 600),
        ({}, 2000 + 500),
    ):
        assert planned({**given, "store": store}).num_tokens["this corpus"] == rows * 11


def test_codec_sizes_are_those_of_real_shards() -> None:
    full = measured_bytes_per_token(make_codec("full"), 1000, 8, 33)
    # 2 V bytes that hardly compress, and some bytes for the token itself.
    assert 0.85 * 2000 < full < 1.05 * 2000 + 20
    hidden = measured_bytes_per_token(make_codec("hidden"), 50257, 256, 33)
    assert 230 < hidden < 290
    posteriors = (make_codec("posterior", num_entries=count) for count in (4, 128))
    few, many = (measured_bytes_per_token(codec, 1000, 8, 33) for codec in posteriors)
    assert few < many
