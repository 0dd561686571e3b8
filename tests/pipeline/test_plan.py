"""What a run would write, how long it would take and what it would cost, before it is begun."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from transformers import CLIPConfig, PreTrainedConfig, T5Config

from pipeline.plan import count_tokens, measured_bytes_per_token, plan_lines
from pipeline.run import check_teacher, known_teacher
from pipeline.settings import PlanOptions, Worker, resolve_request
from pipeline.teacher import Teacher
from shards.codec.protocol import CODECS, make_codec
from shards.errors import GdistillError, UsageError
from tests.pipeline import extract_cases
from tests.pipeline.conftest import Asked
from tests.pipeline.extract_cases import ROW_LENGTH, VOCAB_SIZE, options, run


def planned(out: Path, given: dict[str, Any], **figures: float) -> dict[str, str]:
    """Label -> the rest of its line."""
    lines = plan_lines(resolve_request(out, given), PlanOptions(**figures), Worker())
    return {line[:10].strip(): " ".join(line[10:].split()) for line in lines}


def counted(out: Path, given: dict[str, Any]) -> tuple[float, str, float]:
    request = resolve_request(out, given)
    files = known_teacher(request)
    return count_tokens(check_teacher(request, files)[0], files)


def test_figures_out_of_range_and_unreadable_rates_are_refused_by_name(tmp_path: Path, asked: Asked) -> None:
    rates = ["{", "[]", '{"tokens_per_second": null}']
    for value in (0.0, -1.0, float("inf"), float("nan")):
        rates.append(json.dumps({"tokens_per_second": value}))
        for name in ("rate", "tokens", "price"):
            with pytest.raises(UsageError, match=rf"out of range \[--plan\.{name}\]"):
                PlanOptions(**{name: value})
    for text in rates:
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(GdistillError, match=r"cannot read an earlier run's rate.*--rate"):
            planned(tmp_path, asked())


@pytest.mark.parametrize("config", [T5Config(vocab_size=VOCAB_SIZE), CLIPConfig()], ids=type)
def test_a_model_that_writes_no_text_is_refused(tmp_path: Path, corpus: Path, config: PreTrainedConfig) -> None:
    config.save_pretrained(tmp_path / "model")
    extract_cases.save_tokenizer(tmp_path / "model")
    with pytest.raises(UsageError, match="causal language model"):
        planned(tmp_path, options(tmp_path / "model", corpus))


def test_a_plan_by_hand_loads_no_teacher_and_writes_nothing(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Teacher, "load", lambda *_, **__: pytest.fail("the teacher was loaded"))
    monkeypatch.setattr("pipeline.plan.measured_bytes_per_token", lambda *_: 50.0)
    plan = planned(tmp_path / "out", asked(), rate=1000.0, tokens=7_200_001.0, price=3.0)
    assert not (tmp_path / "out").exists()
    # GPT-2: embeddings, 2 blocks, final norm; D = 16, head tied.
    block = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16) + 4 * 16
    parameters = (VOCAB_SIZE + extract_cases.CONTEXT_LENGTH) * 16 + 2 * block + 32
    assert plan["teacher"].startswith(f"{parameters:,} parameters") and f"V = {VOCAB_SIZE}" in plan["teacher"]
    assert plan["tokens"] == "7,200,001 as given; 600,001 rows of 12"
    assert plan["stage 2"].startswith("2 hours at 1,000 tokens/s") and plan["price"].startswith("6 at 3")
    assert plan["posterior"] == "360.0 MB 50.0 B/token, the codec asked for"
    assert plan["full"] == "360.0 MB 50.0 B/token" and set(CODECS) <= set(plan)
    for dtype, peak in (("float32", 67e12), ("bfloat16", 989e12)):  # two FLOPs for each weight, 40% of the peak
        rate = planned(tmp_path, asked(teacher={"dtype": dtype}), tokens=1.0)["stage 2"]
        assert f"hours at {0.4 * peak / (2 * parameters):,.0f} tokens/s of one H100" in rate and dtype in rate


def test_tokens_are_estimated_then_counted(tmp_path: Path, asked: Asked) -> None:
    estimate, origin, tokens_per_second = counted(tmp_path, asked())
    assert "estimated from 60 of 60 documents" in origin and tokens_per_second > 0
    assert "stage 1" in planned(tmp_path, asked())
    run(tmp_path, asked())
    exact, origin, _ = counted(tmp_path, asked())
    assert "counted" in origin and exact % ROW_LENGTH == 0
    # All 54 training documents are in the sample; what differs is the remainder of the packing.
    assert abs(estimate - exact) < 0.1 * exact
    summary = json.loads((tmp_path / "summary.json").read_text())
    rate = planned(tmp_path, asked())["stage 2"]
    assert f"{summary['tokens_per_second']:,.0f} tokens/s of one process, measured by the run" in rate


def test_every_split_and_every_part_of_a_corpus_is_counted(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
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
    given: dict[str, Any] = {}
    for name, fraction, packing, expected in cases:
        given = options(teacher, tmp_path / name, corpus={"validation_fraction": fraction, "packing": packing})
        found, origin, _ = counted(tmp_path, given)
        assert found == pytest.approx(expected, rel=0.02)
        # Of 800 documents not all are read, but a padded one is a row whatever it holds.
        assert ("+-" in origin) == (name == "many.txt" and packing != "pad")
    limited, _, _ = counted(tmp_path, {**given, "store": {"rows": 7}})
    assert limited == 2 * 7 * ROW_LENGTH
    (tmp_path / "few.txt").write_text("w1 w2\n" * 10)
    corpus = {"validation_documents": 4, "separate_validation": False}
    assert counted(tmp_path, options(teacher, tmp_path / "few.txt", corpus=corpus))[0] == 6 * 3 + 4 * 2


def test_neighbours_that_are_alike_widen_the_error(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks of equal documents of 3 and of 7 tokens: a hundred documents tell as much as two do."""
    (tmp_path / "a.txt").write_text("w1 w2\n" * 60 + "w1 w2 w3 w4 w5 w6\n" * 60)
    monkeypatch.setattr("pipeline.plan.SAMPLE_BLOCKS", 2)
    found, origin, _ = counted(tmp_path, options(teacher, tmp_path / "a.txt", corpus={"validation_fraction": 0.0}))
    share = 2.13 * stdev([3, 7]) / 2**0.5 / fmean([3, 7])
    assert found == pytest.approx(5 * 120)
    assert f"+- {share:.1%} from 64 of 120 documents" in origin


def test_a_corpus_out_of_reach_is_planned_by_its_size_alone(tmp_path: Path, teacher: Path) -> None:
    given = options(teacher, tmp_path / "absent.txt")
    with pytest.raises(UsageError, match=r"cannot be counted here.*absent\.txt.*--tokens"):
        planned(tmp_path, given)
    assert planned(tmp_path, given, tokens=1e9)["tokens"].startswith("1,000,000,000 as given")


def test_a_teacher_that_writes_is_planned_as_it_is_run(tmp_path: Path) -> None:
    """It writes as many training rows as asked for; of validation no more than there are, but for
    a number of its own."""
    given: dict[str, Any] = {"corpus": {"spec": "maze:k4"}, "mode": "sequential"}
    for store, rows in (
        ({"rows": 800}, 800 + 500),
        ({"rows": 3000}, 3000 + 500),
        ({"rows": 10, "validation_rows": 600}, 10 + 600),
        ({}, 2000 + 500),
    ):
        plan = planned(tmp_path, {**given, "store": store})
        assert plan["tokens"] == f"{rows * 11:,} one row a document; {rows:,} rows of 11"


def test_codec_sizes_are_those_of_real_shards() -> None:
    # 2 V bytes that hardly compress, and some bytes for the token itself.
    assert 0.85 * 2000 < measured_bytes_per_token(make_codec("full"), 1000, 8) < 1.05 * 2000 + 20
    assert 230 < measured_bytes_per_token(make_codec("hidden"), 50257, 256) < 290
    posteriors = (make_codec("posterior", num_entries=count) for count in (4, 64, 128))
    few, usual, many = (measured_bytes_per_token(codec, 50257, 8) for codec in posteriors)
    assert few < usual < many and usual == pytest.approx(111, rel=0.1), "README's bytes a token"
