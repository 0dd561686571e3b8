"""``gdistill-eval`` as it is called: what it writes, and that every mistake is told in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel
from typer.testing import CliRunner

from evaluation.cli import app
from evaluation.text.reading import JudgeModel, generative_perplexity, load_judge
from shards.errors import GdistillError, UsageError
from tests.evaluation.text.test_distance import markov_text, write_tokens

MAZE = {
    "rows": ["...", "S.T"],
    "start": [1, 0],
    "target": [1, 2],
    "paths": [["right", "right"], ["up", "right", "right", "down"]],
    "max_moves": 4,
}


def evaluate(*arguments: object) -> str:
    """Output of the command; what it raises is raised."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception:
        raise done.exception
    return done.output


def write_samples(file: Path, *texts: str | None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    records = ({"tokens": [0, 1, 0], "text": text, "nfe": 2} for text in texts)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "samples.jsonl", "a b a b a b", "b a a").parent


@pytest.fixture(scope="module")
def judge(judge_folder: Path) -> JudgeModel:
    return load_judge(str(judge_folder))


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_perplexity_and_entropy_of_a_folder(samples: Path, judge_folder: Path) -> None:
    table = evaluate(samples, "--judge", judge_folder, "--stride", 4, "--max-tokens", 6)
    assert "generative_perplexity" in table and "entropy_nats" in table
    (part,) = results(samples).values()
    assert part["nfe_mean"] == 2.0
    score = next(s for s in part["scores"] if s["name"] == "generative_perplexity")
    assert score["settings"]["stride_tokens"] == 4 and score["settings"]["max_tokens"] == 6
    assert score["details"]["num_tokens"] == 5 + 3  # the token in front does not count


@pytest.mark.parametrize("words", [8, 40])
def test_a_limit_that_is_given_is_kept(tmp_path: Path, judge_folder: Path, words: int) -> None:
    """Beyond the judge's context too: that is what windows are for."""
    write_samples(tmp_path / "samples.jsonl", "a " * 60)
    evaluate(tmp_path, "--judge", judge_folder, "--max-tokens", words)
    (part,) = results(tmp_path).values()
    assert part["scores"][1]["details"]["num_tokens"] == words - 1


def test_nested_folders_give_rows_that_differ(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_samples(tmp_path / name / "samples.jsonl", "a")
    table = evaluate(tmp_path)
    assert "one/samples" in table and "two/samples" in table
    assert "one/samples" not in evaluate(tmp_path / "one")


def test_the_maze_is_compared_with_what_its_name_says(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.jsonl", *["<bos> right right <eos>"] * 4)
    maze = tmp_path / "maze.json"
    maze.write_text(json.dumps(MAZE))
    table = evaluate(tmp_path, "--maze", maze)
    assert "total_variation_to_uniform" in table and "teacher" not in table
    (part,) = results(tmp_path).values()
    scores = {score["name"]: score for score in part["scores"]}
    assert scores["maze_success"]["value"] == 1.0
    assert scores["maze_success"]["details"]["total_variation_to_uniform"] == 0.5
    assert scores["total_variation_to_uniform"]["value"] == 0.5
    assert "teacher" not in json.dumps(part)


@pytest.mark.parametrize("option", ["--judge", "--maze"])
def test_samples_without_text_are_named(tmp_path: Path, judge_folder: Path, option: str) -> None:
    """As the sampler writes them for a student without a tokenizer."""
    file = write_samples(tmp_path / "samples.jsonl", "a", None)
    maze = tmp_path / "maze.json"
    maze.write_text(json.dumps(MAZE))
    with pytest.raises(GdistillError, match=r"no text \[.*samples\.jsonl:2\]"):
        evaluate(file, option, {"--judge": judge_folder, "--maze": maze}[option])
    assert "entropy_nats" in evaluate(file)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--stride", 0), ("--stride", -2), ("--stride", 64)]
    + [("--max-tokens", value) for value in (-3, 0, 1)]
    + [("--device", "nonsense"), ("--device", "meta"), ("--device", "cuda:99")],
)
def test_values_of_no_use_are_refused(
    samples: Path, judge_folder: Path, option: str, value: object
) -> None:
    with pytest.raises(UsageError) as caught:
        evaluate(samples, "--judge", judge_folder, option, value)
    error = caught.value
    assert option in error.where and error.got and (error.expected or error.remedy)
    assert not (samples / "results.json").exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--stride", 8), ("--max-tokens", 8), ("--device", "cpu")]
)
def test_options_of_the_judge_need_one(samples: Path, option: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"needs a judge \[{option}\]"):
        evaluate(samples, option, value)


def test_zero_is_not_the_default_in_the_library_either(judge: JudgeModel) -> None:
    for options in ({"stride": 0}, {"max_tokens": 0}, {"max_tokens": -3}):
        with pytest.raises(UsageError):
            generative_perplexity(judge, ["a b a b"], **options)  # type: ignore[arg-type]


def test_references_are_read_by_a_reader_of_their_own(
    samples: Path, tmp_path: Path, judge_folder: Path
) -> None:
    """Text alone passes the reader; what stops the command is the number of samples."""
    file = tmp_path / "elsewhere" / "reference.json"
    file.parent.mkdir()
    file.write_text('{"text": "a b"}\n' * 30)
    with pytest.raises(UsageError, match=r"too few samples.*got 2; expected at least 128"):
        evaluate(samples, "--judge", judge_folder, "--reference", file)
    with pytest.raises(UsageError, match=r"cannot read the reference file.*none\.jsonl"):
        evaluate(samples, "--judge", judge_folder, "--reference", tmp_path / "none.jsonl")


@contextmanager
def texts_read_by_a_model() -> Iterator[list[int]]:
    """Texts of every forward pass of any model of transformers, its head left out."""
    read: list[int] = []

    def count(module: torch.nn.Module, _: object, output: Any) -> None:
        if isinstance(module, PreTrainedModel) and module.base_model is module:
            read.append(len(output.last_hidden_state))

    handle = register_module_forward_hook(count)
    try:
        yield read
    finally:
        handle.remove()


@pytest.mark.slow
def test_mauve_of_two_files_reads_the_references_once(
    tmp_path: Path, judge_folder: Path, judge: JudgeModel
) -> None:
    near = ["a " * (1 + number % 3) for number in range(260)]
    far = ["b " * (4 + number % 5) for number in range(260)]
    references = write_samples(tmp_path / "reference.jsonl", *near)
    write_samples(tmp_path / "samples" / "far.jsonl", *far)
    write_samples(tmp_path / "samples" / "near.jsonl", *near)
    scored = [tmp_path / "samples", "--judge", judge_folder]
    evaluate(*scored)  # what perplexity reads is kept
    with texts_read_by_a_model() as loading:
        evaluate(*scored)
    with texts_read_by_a_model() as first:
        table = evaluate(*scored, "--reference", references)
    with texts_read_by_a_model() as again:
        evaluate(*scored, "--reference", references)
    # near.jsonl has the references' own texts: features are found by content.
    assert sum(first) == sum(loading) + 260 + 260
    assert sum(again) == sum(loading)
    assert "Against the text" in table and "words" in table
    far_scores, near_scores = (
        {score["name"]: score for score in part["scores"]}
        for part in results(tmp_path / "samples").values()
    )
    assert near_scores["mauve"]["value"] == pytest.approx(1.0, abs=1e-3)
    for name in (
        "mauve",
        "frechet_distance",
        "gradient_moment",
        "energy_distance",
        "typicality_gap",
    ):
        value, near = far_scores[name]["value"], near_scores[name]
        assert value < 0.99 if name == "mauve" else value > near["value"]
        assert near["details"]["floor_samples"] == 130 and near["details"]["least_samples"] == 128
        assert near["interval_95"][0] <= near["value"] <= near["interval_95"][1]
    assert far_scores["mauve"]["settings"]["max_tokens"] == judge.context_length  # what was read
    cautions = [" ".join(part["mauve"]["cautions"]) for part in (far_scores, near_scores)]
    assert all("260 samples and 260 references" in text for text in cautions)
    assert "6 tokens on average and references 2" in cautions[0]
    assert "tokens on average" not in cautions[1]


def test_texts_without_tokens_name_their_file(tmp_path: Path, judge_folder: Path) -> None:
    file = write_samples(tmp_path / "samples.jsonl", "", "<eos>")
    with pytest.raises(GdistillError, match=r"no sample has a token to score \[.*samples\.jsonl"):
        evaluate(file, "--judge", judge_folder)


def test_a_judge_of_broken_weights_is_refused(tmp_path: Path, judge_folder: Path) -> None:
    judge = load_judge(str(judge_folder))
    torch.nn.init.constant_(judge.model.lm_head.weight, float("nan"))
    with pytest.raises(GdistillError, match="a likelihood that is no number"):
        generative_perplexity(judge, ["a b"])


def test_a_damaged_judge_is_refused(tmp_path: Path, judge_folder: Path) -> None:
    for file in judge_folder.iterdir():
        data = file.read_bytes()
        cut = -40 if file.suffix == ".safetensors" else len(data)
        (tmp_path / file.name).write_bytes(data[:cut])
    with pytest.raises(GdistillError, match=r"cannot load the judge|damaged"):
        load_judge(str(tmp_path))


def test_an_out_that_is_no_folder_is_refused_before_the_work(samples: Path) -> None:
    taken = samples / "taken"
    taken.write_text("")
    with pytest.raises(UsageError, match=r"cannot write there \[.*taken\]"):
        evaluate(samples, "--out", taken)


def test_unknown_nfe_is_a_dash(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"tokens": [1, 2]}\n')
    row = next(line for line in evaluate(tmp_path).splitlines() if line.startswith("samples  1"))
    assert row.split()[2] == "-"
    (part,) = results(tmp_path).values()
    assert part["nfe_mean"] is None


# Against the text: a store of one Markov chain, with samples of the chain and of a coin.


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder whose tokens/ hold 1,000 training and 400 validation rows."""
    splits = {"train": markov_text(1000, 32, 5), "validation": markov_text(400, 32, 6)}
    return write_tokens(tmp_path_factory.mktemp("chain"), splits, vocab_size=40, bos_id=None)


def write_rows(file: Path, rows: np.ndarray, **fields: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    records = ({"index": i, "tokens": row, **fields} for i, row in enumerate(rows.tolist()))
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_scores_against_a_store_need_no_model(tmp_path: Path, chain: Path) -> None:
    near, training = markov_text(200, 32, 7), markov_text(1000, 32, 5)
    far = np.random.default_rng(1).integers(40, size=(200, 32))
    known = {"nfe": 8, "processor_seconds": 0.25}
    for name, rows in (("a-near", near), ("b-far", far), ("c-learnt", training[:200])):
        write_rows(tmp_path / f"{name}.jsonl", rows, **known)
    table = evaluate(tmp_path, "--reference", chain)
    assert "0.25" in table and "8.0" in table and "passes" in table
    scores = [{s["name"]: s for s in part["scores"]} for part in results(tmp_path).values()]
    assert [part["processor_seconds_mean"] for part in results(tmp_path).values()] == [0.25] * 3
    energy = [one["energy_distance"] for one in scores]
    for one in energy:
        assert one["details"]["floor"] == energy[0]["details"]["floor"]
        assert one["details"]["floor_samples"] == 200 and one["num_samples"] == 200
        assert one["interval_95"][0] < one["value"] < one["interval_95"][1]
    low, high = energy[0]["details"]["floor_interval_95"]
    assert energy[0]["interval_95"][0] < high and energy[1]["interval_95"][0] > 2 * high > low
    assert energy[1]["settings"]["n-grams of"] == "tokens"
    memorised = [one["memorised_16_grams"]["value"] for one in scores]
    assert memorised[2] == 1.0 and max(memorised[:2]) < 0.1
    assert "mauve" not in scores[0] and {"repeated_4_grams", "distinct_beginnings"} < set(scores[0])
    write_rows(tmp_path / "few" / "s.jsonl", near[:127])
    with pytest.raises(UsageError, match=r"too few samples.*s\.jsonl\]; got 127;"):
        evaluate(tmp_path / "few", "--reference", chain)


def test_a_sweep_is_a_frontier(tmp_path: Path, chain: Path) -> None:
    """The setting is chosen on the even samples: odd ones alone, however near, choose nothing."""
    rows = markov_text(300, 32, 7)
    coin = np.random.default_rng(1).integers(40, size=(300, 32))
    mixed = coin.copy()
    mixed[1::2] = rows[1::2]
    for name, drawn, tau in (("mdlm", rows, 1), ("mdlm", mixed, 2), ("coin", coin, 1)):
        settings = {"sampler": "ancestral", "tau": tau}
        file = tmp_path / name / f"tau={tau}" / "samples.jsonl"
        write_rows(file, drawn, nfe=4, processor_seconds=0.5, settings=settings)
    runs = [tmp_path / "mdlm", f"other={tmp_path / 'coin'}"]
    table = evaluate("frontier", *runs, "--data", chain, "--out", tmp_path / "out")
    assert "mdlm beats 1 of 1 settings of other" in table
    row = next(line for line in table.splitlines() if line.startswith("mdlm "))
    assert "tau 1" in row and "0.5" in row.split()
    found = results(tmp_path / "out")
    assert found["ranking"] == "energy_distance" and len(found["points"]) == 3
    by_tau = {point["setting"][-1]: point for point in found["points"] if point["model"] == "mdlm"}
    assert by_tau["2"]["chosen_by"] > 3 * abs(by_tau["2"]["distance"]["high"])
    assert (tmp_path / "out" / "frontier.png").stat().st_size > 1000


def test_naive_samplers_win_what_does_not_rank(tmp_path: Path, chain: Path) -> None:
    write_rows(tmp_path / "s.jsonl", markov_text(200, 32, 9))
    words = ("--data", chain, "--samples", tmp_path / "s.jsonl", "--num", 200)
    evaluate("check-scores", *words, "--out", tmp_path / "out")
    found = results(tmp_path / "out")
    assert found["ranks"]["energy_distance"]
    assert not found["ranks"]["repeated_4_grams"] and not found["ranks"]["-entropy_nats"]
    assert set(found["scores"]) >= {"the text itself", "student: s", "periodic text"}
    with pytest.raises(UsageError, match=r"--num.*got 64"):
        evaluate("check-scores", "--data", chain, "--num", 64)
