"""``gdistill-sample``: every mistake is one line on stderr, found before the first sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.sample_cli_cases import command, save, save_models
from tests.trainer.sampling_cases import LENGTH


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("mdlm", ["--nfe", "0"], "bad NFE"),
        ("mdlm", ["--nfe", "4,x"], "bad NFE"),
        ("mdlm", ["--nfe", "4,4"], "named twice"),
        ("mdlm", ["--nfe", "9" * 5000], "bad NFE"),
        ("mdlm", ["--sampler", "first_hitting", "--nfe", "4"], "takes no NFE"),
        ("mdlm", ["--sampler", "ancestrel"], "did you mean 'ancestral'"),
        ("mdlm", ["--sampler", "block"], "an MDLM"),
        ("bd3lm", ["--sampler", "ancestral"], "--sampler block"),
        ("bd3lm", ["--length", "10"], "block size does not divide"),
        ("bd3lm", ["--nfe", "2"], "fewer forward passes than blocks"),
        ("mdlm", ["--length", "24"], "longer than the student's"),
        ("plain", ["--tau", "0.85"], "takes no noise"),
        ("mdlm", ["--tau", "0"], "tau"),
        ("mdlm", ["--tau", "inf"], "tau"),
        ("mdlm", ["--nfe", "99999999999999"], "too many forward passes"),
        ("mdlm", ["--min-entropy", "inf"], "min_entropy"),
        ("mdlm", ["--min-entropy", "1"], "--set stop.entropy_window=12"),
        ("ar", ["--min-entropy", "1"], "--set stop.entropy_window=12"),
        ("mdlm", ["--sampler", "apd"], "apd needs a verifier [--sampler apd]; --verifier FOLDER"),
        ("mdlm", ["--verifier", "x"], "ancestral sampler takes no verifier [--verifier]"),
        ("bd3lm", ["--verifier", "x"], "take --sampler apd"),
        ("ar", ["--tau", "1"], "takes no noise [tau]"),
        ("mdlm", ["--sampler", "sequential"], "an autoregressive student"),
        ("bd3lm", ["--nfe", "2"], "--passes-per-block counts the passes of each block"),
        ("bd3lm", ["--nfe", "4", "--passes-per-block", "2"], "exclude each other"),
        ("mdlm", ["--passes-per-block", "2"], "--nfe counts the passes of a sequence"),
        ("bd3lm", ["--passes-per-block", "0"], "bad NFE [--passes-per-block]"),
        ("mdlm", ["--top-k", "0"], "top_k"),
        ("mdlm", ["--top-k", "3", "--decision", "argmax"], "top_k"),
        ("mdlm", ["--set", "stop.max_tries=3"], "no sample is redrawn [stop.max_tries]"),
        ("mdlm", ["--temperature", "0"], "temperature"),
        ("mdlm", ["--temperature", "2", "--decision", "argmax"], "temperature"),
        ("mdlm", ["--nucleus-p", "0.9", "--decision", "argmax"], "nucleus_p"),
        ("mdlm", ["--sweep", "nucleus_p"], "bad sweep"),
        ("mdlm", ["--sweep", "nucleus_p=0.7,,1"], "bad sweep"),
        ("mdlm", ["--sweep", "nucleus_p=0.7,0.7"], "a value is named twice"),
        ("mdlm", ["--sweep", "nucleus_p=0.7,2"], "nucleus_p"),
        ("mdlm", ["--sweep", "nukleus_p=0.7"], "did you mean 'nucleus_p'"),
        ("mdlm", ["--sweep", "tau=1,2", "--tau", "3"], "named beside the sweep"),
        ("mdlm", ["--sweep", "nfe=1,2", "--nfe", "3"], "exclude each other"),
        ("timed", ["--sampler", "first_hitting"], "use --sampler ancestral"),
        ("timed", ["--sampler", "apd", "--verifier", "x"], "use --sampler ancestral"),
        ("timed_blocks", [], "--set inner=ancestral --set use_cache=false"),
        ("timed_blocks", ["--set", "use_cache=false", "--set", "inner=first_hitting"], "ancestral"),
        ("mdlm", ["--sampler", "apd", "--verifier", "absent"], "cannot find the verifier"),
        ("mdlm", ["--nucleus-p", "0"], "nucleus_p"),
        ("mdlm", ["--decision", "beam"], "decision"),
        ("mdlm", ["--set", "finalargmax=false"], "did you mean 'final_argmax'"),
        ("mdlm", ["--prompt", "up " * LENGTH], "longer than the row"),
        ("mdlm", ["--prompt", "up", "--prompt-file", "x"], "exclude each other"),
        ("mdlm", ["--prompt-file", "absent.txt"], "cannot read"),
        ("mdlm", ["--infill", "absent.jsonl"], "cannot read"),
        ("mdlm", ["--infill", "x", "--length", "8"], "exclude each other [--infill, --length]"),
        ("mdlm", ["--prompt", "\udcff"], "not UTF-8"),
        ("mdlm", ["--sampler", ""], "unknown sampler"),
        ("mdlm", ["--num", "0"], "--num"),
        ("mdlm", ["--batch-size", "0"], "--batch-size"),
        ("mdlm", ["--seed", "-1"], "bad seed"),
        ("mdlm", ["--device", "abacus"], "no such device"),
        ("mdlm", ["--device", "meta"], "no such device"),
        ("mdlm", ["--device", "hpu"], "no such device"),
        ("mdlm", ["--precision", "int3"], "unknown precision"),
        ("absent", [], "no model there"),
    ],
)
def test_mistakes_are_one_line(
    model: str,
    arguments: list[str],
    message: str,
    models_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(models_folder / model, *arguments, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and message in error and "\n" not in error
    assert not (tmp_path / "out").exists()


def test_unwritable_folder_is_one_line(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert command(models_folder / "mdlm", "--out", tmp_path / "file" / "out") == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: cannot write there") and "\n" not in error


def test_verifiers_that_cannot_be_judged_are_refused(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No causal model, one without a tokenizer; a training run's folder is as good as its model."""
    arguments = (models_folder / "mdlm", "--sampler", "apd", "--num", 2, "--verifier")
    assert command(*arguments, models_folder / "mdlm", "--out", tmp_path / "a") == 2
    assert "expected a causal language model" in capsys.readouterr().err
    bare = save(tmp_path / "run" / "model", "ar", "none")
    assert command(*arguments, tmp_path / "run", "--out", tmp_path / "b") == 0
    for file in bare.glob("tokenizer*"):
        file.unlink()
    capsys.readouterr()
    assert command(*arguments, bare, "--out", tmp_path / "c") == 2
    assert "no tokenizer to compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"tokens": [0, 99]}', "position 1"),
        ('{"tokens": [0, 3, 4]}', "nothing to fill"),
        ('{"tokens": [null, 3, 4]}', "position 0"),
        ('{"tokens": [0, 3], "masked": [7]}', "bad positions"),
        ('{"words": []}', "not a row to fill"),
        ("[1, 2", "not JSON"),
        pytest.param("[" * 100_000, "not JSON", id="deeply nested"),
        ('{"text": 5, "masked": [1]}', "text is no string"),
        ('{"text": "\\ud800", "masked": [1]}', "not UTF-8"),
        (json.dumps({"tokens": [0] * 40, "masked": [3]}), "cannot be filled"),
    ],
)
def test_bad_infill_lines_are_named(
    line: str,
    message: str,
    models_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"tokens": [0, null]}\n' + line + "\n")
    assert command(models_folder / "mdlm", "--infill", rows, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error and f"{rows}:2" in error


def test_every_row_is_looked_at_before_the_first_pass(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text('{"tokens": [0, null, 5, 6]}\n{"tokens": [0, 1, null, 3, 4, 5]}\n')
    arguments = ("--infill", rows, "--out", out)
    assert command(models_folder / "bd3lm", *arguments) == 2
    error = capsys.readouterr().err
    assert "row 1" in error and "does not divide the length" in error and "got 6" in error
    assert not out.exists()
    assert command(models_folder / "bd3lm", *arguments, "--num", 1) == 0, "row 1 is not asked for"


@pytest.mark.parametrize(
    "line",
    [
        '{"index": [1]}',
        '{"index": "a"}',
        '{"index": 0}\n{"index": 0}',
        "[1]",
        pytest.param("[" * 100_000, id="deeply nested"),
    ],
)
def test_lines_that_are_no_samples_are_named(
    line: str, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (models_folder / "mdlm", "--num", 2, "--nfe", 2, "--out", tmp_path)
    assert command(*arguments) == 0
    (tmp_path / "samples.jsonl").write_text(line + "\n")
    capsys.readouterr()
    assert command(*arguments) == 1
    error = capsys.readouterr().err.strip()
    assert "a sample line is damaged" in error and "\n" not in error


def test_samples_beyond_the_number_asked_for_are_refused(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of different lengths are not drawn in order: one sample may be the fifth."""
    arguments = (models_folder / "mdlm", "--nfe", 2, "--out", tmp_path)
    assert command(*arguments, "--num", 5) == 0
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    (tmp_path / "samples.jsonl").unlink()
    (tmp_path / "samples.jsonl.partial").write_text(lines[4] + "\n")
    capsys.readouterr()
    assert command(*arguments, "--num", 2) == 2
    assert "got --num 2; expected at least 5" in capsys.readouterr().err


def test_a_folder_in_place_of_a_file_is_one_line(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.json").mkdir()
    assert command(models_folder / "mdlm", "--num", 2, "--out", tmp_path) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: cannot write there") and "\n" not in error


@pytest.mark.parametrize("text", ["[]", '{"run": 3}', '{"run": {"store": {"codec": "x"}}}', "{"])
def test_damaged_records_of_a_model_are_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save(tmp_path / "model")
    (model / "student.json").write_text(text)
    assert command(model, "--out", tmp_path / "out") in (1, 2)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and ("student.json" in error or "codec" in error)
    assert not (tmp_path / "out").exists()


def test_damaged_files_fail_without_loss(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (models_folder / "mdlm", "--num", 3, "--nfe", 2, "--out", tmp_path)
    assert command(*arguments) == 0
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    damaged = "\n".join([lines[0], lines[1][:40], lines[2]]) + "\n"
    (tmp_path / "samples.jsonl").write_text(damaged)
    assert command(*arguments) == 1
    assert "samples.jsonl:2" in capsys.readouterr().err
    assert (tmp_path / "samples.jsonl").read_text() == damaged


def test_model_that_is_not_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert command(tmp_path, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and str(tmp_path) in error


def test_unfinished_training_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints" / "step-00000050").mkdir(parents=True)
    (tmp_path / "config.json").write_text('{"student": "mdlm"}')  # of the run, not of a model
    assert command(tmp_path, "--out", tmp_path / "samples") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "unfinished training run" in error
