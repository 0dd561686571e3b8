"""``gdistill-eval`` as it is called: what it writes, and that every mistake is told in one line."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from evaluation import frontier
from evaluation.figures import figure_file
from evaluation.frontier import Point, dominance, nearest, pareto
from evaluation.infilling import filled_spans, make_infill_rows, read_infill_rows
from evaluation.maze import Maze
from evaluation.samples import DataRows, named_folder, read_data_rows, read_samples
from evaluation.scorers import make_scorers
from evaluation.text.distance import RANKING, Estimate, naive_samples, unigram_entropy_nats
from evaluation.text.reading import JudgeModel, Judging
from evaluation.text.reference import ReferenceText, Ruler
from shards.errors import GdistillError, UsageError
from tests.evaluation.kit import evaluate, markov_text, nll_nats, results, scores_by_name, write_lines, write_tokens

PATHS = (("right", "right"), ("up", "right", "right", "down"))
MAZE = Maze(("...", "S.T"), (1, 0), (1, 2), PATHS, 4)


def write_samples(file: Path, *texts: str | None) -> Path:
    return write_lines(file, *({"tokens": [0, 1, 0], "text": text, "nfe": 2} for text in texts))


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "samples.jsonl", "a b a b a b", "b a a").parent


def test_perplexity_and_entropy_of_a_folder(samples: Path, judge_folder: Path) -> None:
    table = evaluate(samples, "--judge", judge_folder, "--stride", 4, "--max-tokens", 6)
    assert "generative_perplexity" in table and "entropy_nats" in table
    (part,) = results(samples).values()
    assert part["nfe_mean"] == 2.0
    score = scores_by_name(part)["generative_perplexity"]
    assert score["settings"]["stride_tokens"] == 4 and score["settings"]["max_tokens"] == 6
    assert score["details"]["num_tokens"] == 5 + 3  # the token in front does not count
    entropy = scores_by_name(part)["entropy_nats"]["details"]
    (row,) = tables(samples)["Scores"]
    shown = [f"{entropy[name]:.3f}" for name in ("distinct_2", "repeated_4")]
    assert [row["distinct-2"], row["repeated 4-grams"]] == shown and "0.000" not in shown[:1]
    assert row["mean per sample"] == f"{score['details']['per_sample_mean']:.3f}"
    value, low, high = (f"{figure:.3f}" for figure in (score["value"], *score["interval_95"]))
    assert row["generative_perplexity"] == f"{value} [{low}, {high}]" and (row["n"], row["passes"]) == ("2", "2.0")
    page, parts = (samples / "report.html").read_text(), score["per_sample"]
    for nats, tokens in zip(parts["numerators"], parts["denominators"], strict=True):
        assert f"perplexity {math.exp(nats / tokens):.3f}</b>" in page


def tables(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Rows of the report's tables by title, each by column."""
    found = {}
    for part in (folder / "tables.md").read_text().split("### ")[1:]:
        title, header, _, *rows = (line.strip("| ").split(" | ") for line in part.splitlines() if line)
        of_header = (row for row in rows if len(row) == len(header))
        found[title[0]] = [dict(zip(header, row, strict=True)) for row in of_header]
    return found


def test_a_file_has_a_row_of_its_own_and_no_claim_that_it_does_not_make(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_samples(tmp_path / name / "samples.jsonl", "a")
    table = evaluate(tmp_path)
    assert "one/samples" in table and "two/samples" in table
    assert "one/samples" not in evaluate(tmp_path / "one")
    assert "one sample has no spread (all files)" in (tmp_path / "one/report.html").read_text()
    write_lines(tmp_path / "three" / "samples.jsonl", {"tokens": [1, 2]})
    lines = evaluate(tmp_path / "three").splitlines()
    assert next(line for line in lines if line.startswith("samples  1")).split()[2] == "-"
    (part,) = results(tmp_path / "three").values()
    assert part["nfe_mean"] is None
    write_samples(tmp_path / "four" / "samples.jsonl", "a", "b")
    evaluate(tmp_path)
    alone = "one sample has no spread (one/samples, three/samples, two/samples)"
    assert alone in (tmp_path / "report.html").read_text()


def test_samples_that_cannot_be_read_are_named(tmp_path: Path, judge_folder: Path) -> None:
    """Without a text, as the sampler writes them for a student without a tokenizer; the rest of a maze is scored."""
    file, maze = write_samples(tmp_path / "samples.jsonl", "a", None), write_lines(tmp_path / "maze.json", asdict(MAZE))
    for words in (("--judge", judge_folder), ("--maze", maze)):
        with pytest.raises(GdistillError, match=r"no text \[.*samples\.jsonl:2\]"):
            evaluate(file, *words)
    assert "entropy_nats" in evaluate(file)
    write_samples(file, "", "<eos>")
    with pytest.raises(GdistillError, match=r"no sample has a token to score \[.*samples\.jsonl"):
        evaluate(file, "--judge", judge_folder)
    write_samples(file, "<eos>", "a b")  # a text without a token that counts has its place on the page
    assert "texts without a token" in evaluate(file, "--judge", judge_folder)
    write_samples(file, *["<bos> right right <eos>"] * 4)
    assert "teacher" not in evaluate(file, "--maze", maze)
    (part,) = results(tmp_path).values()
    success, variation = (scores_by_name(part)[name] for name in ("maze_success", "total_variation_to_uniform"))
    assert (success["value"], variation["value"]) == (1.0, 0.5) and "teacher" not in json.dumps(part)


def test_values_of_no_use_are_refused(samples: Path, judge_folder: Path) -> None:
    values = {"--stride": (0, -2, 64), "--max-tokens": (-3, 0, 1), "--device": ("nonsense", "meta", "cuda:99")}
    for option, value in ((name, value) for name, several in values.items() for value in several):
        with pytest.raises(UsageError) as caught:
            evaluate(samples, "--judge", judge_folder, option, value)
        error = caught.value
        assert option in error.where and error.got and (error.expected or error.remedy), value
    for option, value in (("--stride", 8), ("--max-tokens", 8), ("--device", "cpu")):
        with pytest.raises(UsageError, match=rf"needs a judge \[{option}\]"):
            evaluate(samples, option, value)
    # References are read by a reader of their own, whom a text suffices.
    file = write_lines(samples / "elsewhere" / "reference.json", *[{"text": "a b"}] * 30)
    for words in ((samples, "--judge", judge_folder, "--reference"), ("check-scores", "--samples", samples, "--data")):
        with pytest.raises(UsageError, match=r"too few samples.*got 2; expected at least 128"):
            evaluate(*words, file)
    with pytest.raises(UsageError, match=r"cannot read the reference file.*none\.jsonl"):
        evaluate(samples, "--judge", judge_folder, "--reference", samples / "none.jsonl")
    taken = write_lines(samples / "taken")
    commands = [
        (samples,),
        ("frontier", samples, "--data", file),
        ("check-scores", "--data", file),
        ("passes", "x=y"),
        ("rows", file),
    ]
    for words in commands:  # before a model is opened
        with pytest.raises(UsageError, match=r"cannot write there \[.*taken"):
            evaluate(*words, "--out", taken / "p.html" if words[0] in ("passes", "rows") else taken)
    assert not (samples / "results.json").exists()
    assert "certify" in evaluate("--help")


# Against the text: a store of one Markov chain, with samples of the chain and of a coin.


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose tokens/ hold 1,000 training and 400 validation rows, of 40 tokens."""
    splits = {"train": markov_text(1000, 40, 5), "validation": markov_text(400, 40, 6)}
    facts = {"vocab_size": 40, "bos_id": None, "tokenizer": {"sha256": "ours"}}
    return write_tokens(tmp_path_factory.mktemp("chain"), splits, **facts)


def write_rows(file: Path, rows: np.ndarray, **fields: object) -> Path:
    records = ({"index": i, "tokens": row, **fields} for i, row in enumerate(rows.tolist()))
    return write_lines(file, *records)


def test_scores_against_a_store_need_no_model(tmp_path: Path, chain: Path) -> None:
    near, training = markov_text(200, 32, 7), markov_text(1000, 40, 5)[:, 8:]  # memory has no place
    far = np.random.default_rng(1).integers(40, size=(180, 30))
    for tau, rows in ((1, near), (2, far), (3, training[:200])):
        facts = {"nfe": 8, "processor_seconds": 0.25, "settings": {"tau": tau}}
        write_rows(tmp_path / f"{'abc'[tau - 1]}.jsonl", rows, **facts)
    table = evaluate(tmp_path, "--reference", chain)
    assert "0.25" in table and "8.0" in table and "passes" in table
    parts = results(tmp_path).values()
    assert [part["processor_seconds_mean"] for part in parts] == [0.25] * 3
    drawn = tables(tmp_path)["How the samples were drawn"]
    assert [tuple(row.values()) for row in drawn] == [("a", "1", "32"), ("b", "2", "30"), ("c", "3", "32")]
    assert "All files: nfe 8, seed 0." in (tmp_path / "tables.md").read_text()
    scores = [scores_by_name(part) for part in parts]
    energy = [one["energy_distance"] for one in scores]
    # Rows as long as the longest samples are: the first 32 tokens.
    other, floor = (Ruler(ReferenceText.read(chain, 400, 32), num, None).floor for num in (180, 200))
    for one, num, own in zip(energy, (200, 180, 200), (floor, other, floor), strict=True):
        assert one["details"]["floor"] == own["energy_distance"].value
        assert one["details"]["floor_samples"] == num == one["num_samples"]
        assert one["interval_95"][0] < one["value"] < one["interval_95"][1]
    low, high = energy[0]["details"]["floor_interval_95"]
    assert energy[0]["interval_95"][0] < high and energy[1]["interval_95"][0] > 2 * high > low
    assert energy[1]["settings"]["n-grams of"] == "tokens"
    shown = {(row["samples"], row["score"]): row for row in tables(tmp_path)["Against the text"]}
    far_row = shown["b", "energy_distance"]
    assert [far_row[name] for name in ("n", "rows", "least")] == ["180", "180", "128"]
    shown, own = {score: row for (name, score), row in shown.items() if name == "c"}, floor["energy_distance"]
    figures = [energy[2]["value"], *energy[2]["interval_95"], own.value, own.low, own.high]
    value, low, high, *of_floor = (f"{figure:.3g}" for figure in figures)
    assert [*shown["energy_distance"].values()][2:5] == [value, f"{low}, {high}", of_floor[0]]
    assert shown["energy_distance"]["95% of floor"] == ", ".join(of_floor[1:])
    ranks = {name: row["ranks"] for name, row in shown.items()}
    assert ranks == dict.fromkeys(ranks, "no") | {"energy_distance": "yes"}
    memorised = [one["memorised_16_grams"]["value"] for one in scores]
    assert memorised[2] == 1.0 and max(memorised[:2]) < 0.1
    assert "mauve" not in scores[0] and {"repeated_4_grams", "distinct_beginnings"} < set(scores[0])
    write_rows(tmp_path / "few" / "s.jsonl", near[:127])
    with pytest.raises(UsageError, match=r"too few samples.*s\.jsonl\]; got 127;"):
        evaluate(tmp_path / "few", "--reference", chain)
    few = write_rows(tmp_path / "few" / "s.jsonl", np.tile(near, (2, 1)), nfe=8).parent
    (few / "settings.json").write_text('{"store": {"tokenizer": {"sha256": "other"}}}')
    for words in ((few, "--reference"), ("frontier", few, "--data"), ("check-scores", "--samples", few, "--data")):
        with pytest.raises(UsageError, match=r"of another tokenizer than the text \[.*s\.jsonl"):
            evaluate(*words, chain)


def test_a_sweep_is_a_frontier(tmp_path: Path, chain: Path) -> None:
    """The setting is chosen on the even samples: odd ones alone, however near, choose nothing."""
    rows = markov_text(300, 32, 7)
    coin = np.random.default_rng(1).integers(40, size=(300, 32))
    mixed = coin.copy()
    mixed[1::2] = rows[1::2]
    for name, drawn, tau in (("n=1", rows, 1), ("n=1", mixed, 2), ("coin", coin[:280, :30], 1)):
        settings = {"sampler": "ancestral", "temperature": 0, "tau": tau, "order_temperature": 2}
        file = tmp_path / name / f"tau={tau}" / "samples.jsonl"
        write_rows(file, drawn, nfe=4, processor_seconds=0.5, settings=settings)
    runs = [tmp_path / "n=1", f"other={tmp_path / 'coin'}"]
    table = evaluate("frontier", *runs, "--data", chain, "--out", tmp_path / "out")
    assert "n=1 beats 1 of 1 settings of other in distance, in no more passes." in table
    found = results(tmp_path / "out")
    ruler = Ruler(ReferenceText.read(chain, 280, 32), 140, None)
    floor = ruler.floor["energy_distance"]
    assert found["floor"] == asdict(floor), "of as many rows as the smallest half, as long as the longest sample"
    assert found["ranking"] == "energy_distance" and len(found["points"]) == 3
    by_tau = {point["setting"].split("tau ")[1][0]: point for point in found["points"] if point["model"] == "n=1"}
    assert by_tau["2"]["chosen_by"] > 3 * abs(by_tau["2"]["distance"]["high"])
    assert (tmp_path / "out" / "frontier.png").stat().st_size > 1000
    ours, _, text = tables(tmp_path / "out")["Nearest the text"]
    one, (first, second) = by_tau["1"], (ruler.measure(rows[n:280:2].tolist(), None) for n in (0, 1))
    assert (one["chosen_by"], one["distance"]) == (first["energy_distance"].value, asdict(second["energy_distance"]))
    entropy = pytest.approx(np.mean([unigram_entropy_nats(row) for row in rows[1:280:2].tolist()]))
    own, described = one["described"], ("entropy_nats", "distinct_beginnings", "memorised_16_grams")
    assert own == {"entropy_nats": entropy, **{name: score.value for name, score in second.items()}}
    figures = [str(second["energy_distance"]), "-", *(f"{own[n]:.3g}" for n in described)]
    assert [*ours.values()] == ["n=1", "4", "0.5", *figures, "tau 1"]
    assert "All were sampled with sampler ancestral, temperature 0, order_temperature 2." in table
    assert [*text.values()][:5] == ["the text itself", "-", "-", str(floor), "-"]
    assert "n=1 beats 1 of 1" in (tmp_path / "out/report.html").read_text()
    write_rows(tmp_path / "unknown" / "s.jsonl", rows)
    with pytest.raises(UsageError, match=r"without a number of forward passes \[.*s\.jsonl"):
        evaluate("frontier", tmp_path / "unknown", "--data", chain, "--out", tmp_path / "out")
    write_rows(tmp_path / "few" / "s.jsonl", rows[:255], nfe=4)
    with pytest.raises(UsageError, match=r"too few samples.*few/s\.jsonl\]; got 255; expected at least 256"):
        evaluate("frontier", *runs, tmp_path / "few", "--data", chain, "--out", tmp_path / "out")
    assert named_folder(f"{runs[0]}/..")[0] == tmp_path.name
    with pytest.raises(UsageError, match="two runs of one name"):
        evaluate("frontier", runs[0], runs[0], "--data", chain, "--out", tmp_path / "out")


def test_a_judge_adds_distances_of_its_states(
    tmp_path: Path, judge_folder: Path, judge: JudgeModel, cache: Path
) -> None:
    """Of samples that are the text's own rows."""
    texts = [" ".join("ab"[token] for token in row) for row in markov_text(256, 6, 1, vocab_size=2)]
    drawn = ({"tokens": [0], "text": text, "nfe": 2, "settings": {"tau": 1}} for text in texts)
    file = write_lines(tmp_path / "n" / "samples.jsonl", *drawn)
    reference = write_lines(tmp_path / "r.jsonl", *({"text": text} for text in texts))
    words = ("--judge", judge_folder, "--out", tmp_path)
    assert "beats" not in evaluate("frontier", file.parent, "--data", reference, *words)
    found, (row, _) = results(tmp_path), tables(tmp_path)["Nearest the text"]
    value = Judging.of(judge).perplexity(texts[1::2]).value
    assert found["points"][0]["perplexity"] == pytest.approx(value) and row["perplexity"] == f"{value:.1f}"
    assert found["judge"] == judge.identity and found["ranking"] == "frechet_distance"
    assert "No model beats" in (tmp_path / "report.html").read_text()
    assert list(cache.rglob("*.features.safetensors")), "what was read is kept"
    evaluate(file, "--reference", reference, *words, "--max-tokens", 40)
    assert (tmp_path / "report.html").read_text().count("<details") == 24
    (part,) = results(tmp_path).values()
    scores = scores_by_name(part)
    assert set(RANKING) < {*scores} and "256 samples and 256 references" in scores["mauve"]["cautions"][0]
    settings = scores["mauve"]["settings"]
    assert (settings["max_tokens"], settings["seeds"]) == (16, [25, 26, 27, 28, 29]), "at most the judge's context"
    ranks = {row["score"]: row["ranks"] for row in tables(tmp_path)["Against the text"]}
    assert ranks == {name: "yes" if name in RANKING else "no" for name in ranks}


def point(model: str, passes: float, value: float, perplexity: float, chosen_by: float = 0) -> Point:
    distance = Estimate(value, value, value)
    return Point(model, "", passes, None, chosen_by, distance, perplexity, {})


def test_who_is_nearest_and_who_beats_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearer, no more perplexing and in no more passes: of b's five settings a beats the fourth."""
    better = [point("b", 2.0, 2.0, 20.0), point("b", 8.0, 2.0, 9.0), point("b", 8.0, 0.5, 20.0, -1)]
    points = [point("a", 4.0, 1.0, 10.0), *better, point("b", 4.0, 2.0, 20.0), point("b", 4.0, 1.0, 10.0)]
    (sentence,) = dominance(points)
    assert sentence.startswith("a beats 1 of 5 settings of b ")
    assert list(nearest(points)) == [("b", 2), ("a", 4), ("b", 4), ("b", 8)]
    assert nearest(points)["b", 8] is better[2], "by the half that chooses"
    table = frontier._nearest_table([replace(points[0], passes=51.68)], "energy_distance", Estimate(0.1, 0, 1), 128)
    assert table.rows[0][1] == "51.7"
    assert pareto([(2.0, 3.0), (1.0, 5.0), (3.0, 4.0), (4.0, 2.0), (2.0, 2.0)]) == [(1.0, 5.0), (2.0, 2.0)]
    drawn = []

    @contextmanager
    def spied(path: Path, **settings: Any) -> Iterator[tuple[Any, Any]]:
        with figure_file(path, **settings) as (figure, panels):
            yield figure, panels
            drawn.append(panels[0])

    monkeypatch.setattr(frontier, "figure_file", spied)
    shown = [
        points[0],
        *(replace(p, distance=Estimate(n, 1.0, 5.0)) for n, p in zip((2.0, 3.0, 4.0), better, strict=True)),
    ]
    for one in (shown, [replace(p, perplexity=None) for p in shown]):
        frontier._figure(one, Estimate(0.1, 0, 1), "energy_distance", tmp_path / "f.png")
    (left, right), (alone,) = drawn
    for axes in (left, alone):
        a, b = axes.containers
        assert (a.get_label(), b.get_label()) == ("a", "b")
        assert b.lines[0].get_xydata().tolist() == [[2, 2], [8, 4]], "the nearest of each number of passes"
        assert b.lines[2][0].get_segments()[0].tolist() == [[2, 1], [2, 5]], "the interval"
    assert right.lines[2].get_xydata().tolist() == [[2, 20], [3, 9], [4, 20]], "every setting"


def test_naive_samplers_win_what_does_not_rank(tmp_path: Path, chain: Path) -> None:
    write_rows(tmp_path / "s.jsonl", markov_text(200, 32, 9))
    words = ("--data", chain, "--samples", tmp_path / "s.jsonl", "--num", 200)
    evaluate("check-scores", *words, "--out", tmp_path / "out")
    found = results(tmp_path / "out")
    assert found["ranks"]["energy_distance"]
    assert not found["ranks"]["repeated_4_grams"] and not found["ranks"]["-entropy_nats"]
    assert set(found["scores"]) >= {"the text itself", "student: s", "periodic text"}
    text = ReferenceText.read(chain, 400, 32)  # as many tokens a row as the samples have
    ruler, drawn = Ruler(text, 200, None), naive_samples(text.training[:, :32], 200)["periodic text"].tolist()  # type: ignore[index]
    for name, measured in (("the text itself", ruler.floor), ("periodic text", ruler.measure(drawn, None))):
        scores = {score: value for score, value in found["scores"][name].items() if score in measured}
        assert scores == {score: measured[score].value for score in scores} and "energy_distance" in scores
        assert found["scores"][name]["-distinct_beginnings"] == -measured["distinct_beginnings"].value
        assert found["scores"][name]["-entropy_nats"] < 0
    write_rows(tmp_path / "s.jsonl", np.random.default_rng(1).integers(40, size=(200, 32)))
    evaluate("check-scores", *words, "--out", tmp_path / "out")
    assert not results(tmp_path / "out")["ranks"]["energy_distance"], "a student that is no better than naive samplers"
    with pytest.raises(UsageError, match=r"--num.*got 64"):
        evaluate("check-scores", "--data", chain, "--num", 64)
    with pytest.raises(UsageError, match="no token ids to draw from"):
        evaluate("check-scores", "--data", write_samples(tmp_path / "r.jsonl", "a b"), "--out", tmp_path / "out")


def test_tokens_per_pass_of_a_teacher_by_hand(tmp_path: Path) -> None:
    """Each pass adds one. A distance that fewer than ten samples reached has no interval."""
    lines = (([1, 0, 0], [2, 1, 0], 3), ([2, 0, 0], [2, 0, 0], 1))
    records = [{"tokens": [1], "accepted": a, "reached": r, "verifier_nfe": n} for a, r, n in lines] * 5
    one = read_samples(write_lines(tmp_path / "s.jsonl", *records))
    (score,) = make_scorers([one])[0][1](one)
    assert score.value == (5 * (1 + 3) + 5 * (2 + 1)) / (5 * 3 + 5 * 1) and one.nfe_mean == 20 / 10
    near, far = score.details["conditional_acceptance_95"]
    assert near[0] < 15 / 20 < near[1] and far is None
    assert score.details["conditional_acceptance"] == [15 / 20, 0 / 5]
    assert (score.details["teacher_passes"], score.details["accepted_tokens"]) == (20, 15)
    plain = read_samples(write_lines(tmp_path / "plain.jsonl", {"tokens": [1]}))
    assert len(make_scorers([one, plain])[0]) == 1, "entropy alone, where not all files have passes of a teacher"


# Infilling: what counts as filled, against a judge's sums written out by hand.

TRUTHS = [[2, 0, 1, 0, 1], [2, 1, 1, 1, 0]]
MASKED = [[2, 4], [1, 2, 3]]
FILLED = [[2, 0, 1, 0, 0], [2, 0, 0, 1, 0]]  # right: one of two, one of three


@pytest.fixture
def filled(tmp_path: Path, judge_folder: Path) -> Path:
    """Samples of a student whose tokenizer is the judge's."""
    tokenizer = AutoTokenizer.from_pretrained(judge_folder)
    records = (
        {"index": index, "tokens": row, "text": tokenizer.decode(row[1:]), "nfe": 3 + index}
        for index, row in ((1, FILLED[1]), (2, FILLED[0]))  # 2 is the first row again
    )
    write_lines(tmp_path / "samples" / "samples.jsonl", *records)
    rows = ({"tokens": t, "masked": m[::-1] + m[:1]} for t, m in zip(TRUTHS, MASKED, strict=True))
    write_lines(tmp_path / "rows.jsonl", *rows)
    return tmp_path


def test_the_filled_part_and_the_whole_row_by_hand(filled: Path, judge_folder: Path, judge: JudgeModel) -> None:
    words = ("--infill", filled / "rows.jsonl", "--judge", judge_folder)
    evaluate(filled / "samples", *words, "--tokenizer", judge_folder)
    (part,) = results(filled / "samples").values()
    scores = scores_by_name(part)
    assert scores["infill_exact_match"]["value"] == pytest.approx(2 / 5)
    assert scores["infill_exact_match"]["settings"] == {"masked": "2..3", "tokens_per_row": "5"}
    whole = [nll_nats(judge, torch.tensor(row)) for row in FILLED]
    parts = [nll[torch.tensor(m) - 1] for nll, m in zip(whole, MASKED, strict=True)]
    for name, nats in (("generative_perplexity", whole), ("infill_perplexity", parts)):
        expected = float(torch.cat(nats).mean().exp())
        assert scores[name]["value"] == pytest.approx(expected, rel=1e-5)
    assert scores["infill_perplexity"]["details"]["num_tokens"] == 5
    assert all(score["per_sample"]["indices"] == [1, 2] for score in scores.values())
    assert re.findall(r"passes (\d)", (filled / "samples/report.html").read_text()) == ["4", "5"]


def test_a_judge_of_other_tokens_counts_those_over_the_filled_characters() -> None:
    """Position by position two letters, the first token silent."""
    letters = SimpleNamespace(decode=lambda tokens: "".join(2 * chr(97 + token) for token in tokens))
    assert filled_spans(letters, [9, 0, 1, 2], [1, 3], "aabbcc") == [(0, 2), (4, 6)]
    assert filled_spans(letters, [0, 1, 2], [1], "aabbcc") == [(2, 4)]
    with pytest.raises(GdistillError, match="does not give the samples' text"):
        filled_spans(letters, [9, 0], [1], "other")


def test_rows_are_masked_uniformly_and_read_back(tmp_path: Path, chain: Path) -> None:
    for option, value in (("--num", 0), ("--seed", -1)):
        with pytest.raises(SystemExit):
            evaluate("rows", chain, option, value)
    words = ("--split", "train", "--num", 5, "--masked", 2, "--seed", 3)
    evaluate("rows", chain, *words, "--out", tmp_path / "made.jsonl")
    expected = make_infill_rows(read_data_rows(chain, "train"), 5, 2, 3)
    assert read_infill_rows(tmp_path / "made.jsonl") == expected
    evaluate("rows", chain, "--out", tmp_path / "made.jsonl")
    paper = make_infill_rows(read_data_rows(chain, "validation"), 300, 32, 0)
    assert read_infill_rows(tmp_path / "made.jsonl") == paper
    data = DataRows(np.arange(400 * 6).reshape(400, 6), "x", "f", 4000)
    rows = make_infill_rows(data, 400, 2, seed=3)
    file = write_lines(tmp_path / "rows.jsonl", *map(asdict, rows))
    assert read_infill_rows(file) == rows
    assert rows == make_infill_rows(data, 400, 2, seed=3) != make_infill_rows(data, 400, 2, seed=4)
    counts = np.bincount([place for row in rows for place in row.masked], minlength=6)
    assert counts[0] == 0 and all(len(row.masked) == 2 for row in rows)
    # Each of five positions with chance 2/5: five standard errors of 400 rows are 49.
    assert abs(counts[1:] - 160).max() < 49
    for row in ({"tokens": [0, 1], "masked": []}, {"tokens": [-1, 1], "masked": [1]}):
        with pytest.raises(GdistillError, match="without its truth"):
            read_infill_rows(write_lines(file, row))
    for num, masked in ((401, 2), (1, 0), (1, 6)):
        with pytest.raises(UsageError, match="do not hold such rows"):
            make_infill_rows(data, num, masked, seed=0)


def test_infilling_without_a_judge_is_scored_and_with_one_needs_the_tokenizer(
    filled: Path, judge_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (filled / "samples", "--infill", filled / "rows.jsonl")
    write_lines(filled / "samples/second.jsonl", {"index": 1, "tokens": FILLED[1], "text": "a a b a"})
    evaluate(*words)  # each file by the rows that it filled
    matches = [scores_by_name(part)["infill_exact_match"]["value"] for part in results(filled / "samples").values()]
    assert matches == pytest.approx([2 / 5, 1 / 3])
    with pytest.raises(UsageError, match="--tokenizer"):
        evaluate(*words, "--judge", judge_folder)
    monkeypatch.chdir(shutil.copytree(judge_folder, filled / "student").parent)
    (filled / "samples/settings.json").write_text('{"checkpoint": "student"}')
    assert "infill_perplexity" in evaluate(*words, "--judge", judge_folder)
    assert results(filled / "samples")[str(filled / "samples/second.jsonl")]["settings"] == {"checkpoint": "student"}
    # What stands between texts does not count; a sample with nothing else in its filled part is left out.
    ends = [{"index": 0, "tokens": [2, 0, 2], "text": "a <eos>"}, {"index": 1, "tokens": [2, 0, 1], "text": "a b"}]
    words = (filled / "ends", "--infill", write_lines(filled / "rows.jsonl", {"tokens": [2, 0, 1], "masked": [2]}))
    words = (*words, "--judge", judge_folder, "--tokenizer", judge_folder)
    write_lines(filled / "ends/s.jsonl", *ends)
    evaluate(*words)
    (part,) = results(filled / "ends").values()
    assert scores_by_name(part)["infill_perplexity"]["per_sample"]["indices"] == [1]
    write_lines(filled / "ends/s.jsonl", ends[0])
    with pytest.raises(GdistillError, match="no filled part has a token that counts"):
        evaluate(*words)
