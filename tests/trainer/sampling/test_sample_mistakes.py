"""``gdistill-sample``: every mistake is one line on stderr, found before the first sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shards.atomic import exclusive
from tests.trainer.sample_cli_cases import command, save, save_models
from tests.trainer.sampling_cases import LENGTH


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    """The one line that a call ends with."""
    capsys.readouterr()
    assert command(*arguments) == code
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    return error


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("absent", "", "no model there"),
        # budgets
        ("mdlm", "--nfe 4,x", "bad NFE"),
        ("mdlm", "--nfe 4,4", "named twice"),
        ("mdlm", f"--nfe {'9' * 5000}", "bad NFE"),
        ("mdlm", "--nfe 9999999", "out of range [nfe]"),
        ("mdlm", "--set nfe=0", "out of range [nfe]"),
        ("mdlm", "--sampler first_hitting --nfe 4", "unknown config key [first_hitting.nfe]"),
        ("mdlm", "--passes-per-block 2", "unknown config key [ancestral.passes_per_block]"),
        ("bd3lm", "--nfe 2", "at least 3, one for each block of 4 tokens; --passes-per-block"),
        ("bd3lm", "--nfe 4 --passes-per-block 2", "exclude each other"),
        ("bd3lm", "--nfe 4 --set passes_per_block=2", "exclude each other"),
        ("bd3lm", "--passes-per-block 0", "bad NFE [--passes-per-block]"),
        ("bd3lm", "--nfe 4 --set inner=first_hitting", "another order [nfe]"),
        # samplers and students
        ("mdlm", "--sampler ancestrel", "did you mean 'ancestral'"),
        ("mdlm", "--sampler block", "use --sampler ancestral for an MDLM"),
        ("mdlm", "--sampler sequential", "an autoregressive student"),
        ("bd3lm", "--sampler ancestral", "use --sampler block"),
        ("timed", "--sampler first_hitting", "use --sampler ancestral"),
        ("timed_blocks", "", "--set inner=ancestral --set use_cache=false"),
        ("timed_blocks", "--set use_cache=false --set inner=first_hitting", "inner=ancestral"),
        ("mdlm", "--sampler apd", "apd needs a verifier [--sampler apd]; --verifier FOLDER"),
        ("mdlm", "--sampler coupled", "coupled needs a verifier"),
        ("mdlm", "--sampler coupled --verifier x --set max_lookahead=-1", "[max_lookahead]"),
        ("mdlm", "--sampler coupled --verifier x --tau 0", "[tau]"),
        ("mdlm", "--sampler apd --verifier absent", "cannot find the verifier"),
        ("mdlm", "--sampler apd --verifier x --set mixture_weight=1.5", "[mixture_weight]"),
        ("mdlm", "--sampler apd --verifier x --set max_lookahead=0", "[max_lookahead]"),
        ("bd3lm", "--verifier x", "unknown config key [block.verifier]"),
        # settings
        ("mdlm", "--nucleus-p 0", "nucleus_p"),
        ("mdlm", "--nucleus-p 0.9 --decision argmax", "nucleus_p"),
        ("mdlm", "--top-k 0", "top_k"),
        ("mdlm", "--temperature 0", "temperature"),
        ("mdlm", "--decision beam", "decision"),
        ("mdlm", "--tau inf", "tau"),
        ("plain", "--tau 0.85", "takes no noise [tau]"),
        ("mdlm", "--set finalargmax=false", "did you mean 'final_argmax'"),
        ("mdlm", "--sampler confidence --set order_temperature=nan", "order_temperature"),
        ("bd3lm", "--set inner=confidence --set order_temperature=-1", "order_temperature"),
        ("bd3lm", "--set inner=confidence --set final_argmax=false", "inner=ancestral"),
        ("bd3lm", "--set confidence=probability", "inner=ancestral; leave it out, or inner=conf"),
        ("mdlm", "--min-entropy inf", "min_entropy"),
        ("mdlm", "--min-entropy 1", "--set stop.entropy_window=12"),
        ("ar", "--min-entropy 1", "got 256 tokens for rows of 12"),
        ("mdlm", "--set stop.max_tries=3", "no sample is redrawn [stop.max_tries]"),
        ("mdlm", "--sweep nucleus_p=0.7,,1", "bad sweep"),
        ("mdlm", "--sweep nucleus_p=0.7,0.7", "a value is named twice"),
        ("mdlm", "--sweep nukleus_p=0.7", "did you mean 'nucleus_p'"),
        ("mdlm", "--sweep tau=1,2 --tau 3", "named beside the sweep"),
        ("mdlm", "--sweep nfe=1,2 --nfe 3", "named beside the sweep"),
        # rows
        ("bd3lm", "--length 10", "block size does not divide"),
        ("mdlm", "--length 24", "longer than the student's"),
        ("mdlm", "--length 1", "nothing to fill [--length]"),
        ("mdlm", "--prompt " + "up," * LENGTH, "longer than the row"),
        ("mdlm", "--prompt \udcff", "not UTF-8"),
        ("mdlm", "--prompt up --prompt-file x", "exclude each other"),
        ("mdlm", "--prompt-file absent.txt", "cannot read"),
        ("mdlm", "--infill absent.jsonl", "cannot read"),
        ("mdlm", "--infill x --length 8", "exclude each other [--infill, --length]"),
        # the run
        ("mdlm", "--num 0", "--num"),
        ("mdlm", "--batch-size 0", "--batch-size"),
        ("mdlm", "--seed -1", "--seed"),
        ("mdlm", f"--seed {2**63}", "--seed"),
        ("mdlm", "--device abacus", "unknown device [--device]; got abacus"),
        ("mdlm", "--device meta", "device not supported"),
        ("mdlm", "--precision int3", "--precision"),
    ],
)
def test_mistakes_are_one_line(model: str, words: str, message: str, models: Path, tmp_path: Path, capsys) -> None:
    arguments = [word.replace(",", " ") if "up," in word else word for word in words.split()]
    assert message in refusal(capsys, models / model, *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"tokens": [0, 99]}', "position 1"),
        ('{"tokens": [0, 3, 4]}', "nothing to fill"),
        ('{"tokens": [null, 3, 4]}', "position 0"),
        ('{"tokens": [0, 3], "masked": [7]}', "bad positions"),
        ('{"tokens": 3}', "tokens is no list"),
        ('{"words": []}', "not a row to fill"),
        ("[1, 2", "not JSON"),
        pytest.param("[" * 100_000, "not JSON", id="deeply nested"),
        ('{"text": 5, "masked": [1]}', "text is no string"),
        ('{"text": "\\ud800", "masked": [1]}', "not UTF-8"),
        (json.dumps({"tokens": [0] * 40, "masked": [3]}), "cannot be filled"),
    ],
)
def test_bad_infill_lines_are_named(line: str, message: str, models: Path, tmp_path: Path, capsys) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"tokens": [0, null]}\n' + line + "\n")
    error = refusal(capsys, models / "mdlm", "--infill", rows, "--out", tmp_path / "out")
    assert message in error and f"{rows}:2" in error


def test_every_row_is_looked_at_before_the_first_pass(models: Path, tmp_path: Path, capsys) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text('{"tokens": [0, null, 5, 6]}\n{"tokens": [0, 1, null, 3, 4, 5]}\n')
    arguments = (models / "bd3lm", "--infill", rows, "--out", out)
    error = refusal(capsys, *arguments)
    assert "row 1" in error and "does not divide the length" in error and "got 6" in error
    assert not out.exists()
    assert command(*arguments, "--num", 1) == 0, "row 1 is not asked for"
    rows.write_text('{"tokens": [0, null, 5, null]}\n')
    assert "cannot end early" in refusal(capsys, *arguments, "--stop-at-eos")


def test_verifiers_that_cannot_be_judged_are_refused(models: Path, tmp_path: Path, capsys) -> None:
    """No causal model, one without a tokenizer; a training run's folder is as good as its model."""
    arguments = (models / "mdlm", "--sampler", "apd", "--num", 2, "--out", tmp_path, "--verifier")
    assert "expected a causal language model" in refusal(capsys, *arguments, models / "mdlm")
    bare = save(tmp_path / "run" / "model", "ar", "none")
    assert command(*arguments, tmp_path / "run") == 0
    vocabulary = json.loads((bare / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["up"], words["down"] = words["down"], words["up"]
    (bare / "tokenizer.json").write_text(json.dumps(vocabulary))
    error = refusal(capsys, *arguments, bare)
    assert "another tokenizer" in error and "'down' is 2; expected 3" in error
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer to compare" in refusal(capsys, *arguments, bare)


@pytest.mark.parametrize(
    ("file", "text", "code", "message"),
    [
        ("samples.jsonl", '{"index": [1]}\n', 1, "samples.jsonl:1"),
        ("samples.jsonl", '{"index": "a"}\n', 1, "a sample line is damaged"),
        ("samples.jsonl", '{"index": 0}\n' * 2, 1, "samples.jsonl:2"),
        ("samples.jsonl", "[1]\n", 1, "a sample line is damaged"),
        pytest.param("samples.jsonl", "[" * 10**5, 1, "a sample line is damaged", id="deep"),
        ("samples.jsonl", '{"index": 0}\n{"ind\n{"index": 2}\n', 1, "samples.jsonl:2"),
        # Rows of different lengths are not drawn in order: one sample may be the fifth.
        ("samples.jsonl.partial", '{"index": 4}\n', 2, "got --num 2; expected at least 5"),
        ("settings.json", "{", 1, "damaged settings"),
    ],
)
def test_a_damaged_folder_of_samples_is_left_as_it_is(
    file: str, text: str, code: int, message: str, models: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / file).write_text(text)
    arguments = (models / "mdlm", "--num", 2, "--nfe", 2, "--out", tmp_path)
    assert message in refusal(capsys, *arguments, code=code)
    assert (tmp_path / file).read_text() == text


def test_a_folder_that_cannot_be_written_is_named(models: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(capsys, models / "mdlm", "--out", tmp_path / "file" / "out")
    assert error.startswith("error: cannot write there")
    (tmp_path / "settings.json").mkdir()
    error = refusal(capsys, models / "mdlm", "--num", 2, "--out", tmp_path)
    assert error.startswith("error: cannot write there")
    with exclusive(tmp_path / "held"):
        error = refusal(capsys, models / "mdlm", "--out", tmp_path / "held")
    assert "another run is writing here" in error and not list(tmp_path.glob("held/*.json*"))


@pytest.mark.parametrize("text", ["[]", '{"run": 3}', '{"run": {"store": {"codec": "x"}}}', "{"])
def test_damaged_records_of_a_model_are_named(text: str, tmp_path: Path, capsys) -> None:
    model = save(tmp_path / "model")
    (model / "student.json").write_text(text)
    assert command(model, "--out", tmp_path / "out") in (1, 2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and ("student.json" in error or "codec" in error)
    assert not (tmp_path / "out").exists()


def test_what_is_no_model_of_ours_is_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert str(tmp_path) in refusal(capsys, tmp_path, "--out", tmp_path / "out")
    (tmp_path / "checkpoints" / "step-00000050").mkdir(parents=True)
    (tmp_path / "config.json").write_text('{"student": "mdlm"}')  # of the run, not of a model
    assert "unfinished training run" in refusal(capsys, tmp_path, "--out", tmp_path / "samples")
    small = save(tmp_path / "small", vocab_size=8)  # of eleven words
    assert "ids outside the student's vocabulary" in refusal(capsys, small, "--prompt", "e", "--out", tmp_path / "out")
