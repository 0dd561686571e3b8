"""``gdistill-sample``: files, resume, the same samples whatever the batch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from tests.trainer.sample_cli_cases import WORDS, command, read, save, save_models, without_seconds
from tests.trainer.sampling_cases import LENGTH, VOCAB, tiny_student
from trainer.sampling import command as run_module
from trainer.sampling.command import SampleFile, SampleRun
from trainer.sampling.noise import sampling_noise


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def test_files_and_records(models_folder: Path, tmp_path: Path) -> None:
    arguments = ("--num", 5, "--nfe", 4, "--nucleus-p", 0.9, "--seed", 7, "--out", tmp_path)
    assert command(models_folder / "mdlm", *arguments) == 0
    records = read(tmp_path / "samples.jsonl")
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert [record["index"] for record in records] == list(range(5))
    for record in records:
        assert len(record["tokens"]) == LENGTH and max(record["tokens"]) < VOCAB
        assert record["text"].split() == [WORDS[token] for token in record["tokens"][1:]]
        assert record["seed"] == 7 and 1 <= record["nfe"] <= 5 and record["seconds"] > 0
        assert record["settings"]["nucleus_p"] == 0.9 and record["settings"]["tau"] == 0.85
        assert record["config_sha256"] == settings["config_sha256"]
    assert settings["student"] == "mdlm" and settings["vocab_size"] == VOCAB
    assert settings["files"]["samples.jsonl"]["nfe"] == 4
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("model", ["mdlm", "plain", "bd3lm", "ar"])
def test_batch_size_changes_no_sample(model: str, models_folder: Path, tmp_path: Path) -> None:
    for size in (1, 3, 32):
        out = tmp_path / str(size)
        assert command(models_folder / model, "--num", 7, "--batch-size", size, "--out", out) == 0
    expected = without_seconds(tmp_path / "32" / "samples.jsonl")
    assert without_seconds(tmp_path / "1" / "samples.jsonl") == expected
    assert without_seconds(tmp_path / "3" / "samples.jsonl") == expected


def test_a_batch_is_cut_where_kernels_could_not_index_its_log_probabilities(
    models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, sizes, draw = 2 * LENGTH * (VOCAB + 1) + 1, [], SampleRun.draw

    def watched(run: SampleRun, sampler: Any, indices: list[int]) -> Any:
        sizes.append(len(indices))
        return draw(run, sampler, indices)

    monkeypatch.setattr(run_module, "largest_batch", lambda elements, device: limit // elements)
    monkeypatch.setattr(SampleRun, "draw", watched)
    assert command(models_folder / "mdlm", "--num", 5, "--nfe", 2, "--out", tmp_path) == 0
    assert sizes == [2, 2, 1]


def test_curve_writes_one_file_per_nfe(models_folder: Path, tmp_path: Path) -> None:
    arguments = (models_folder / "mdlm", "--num", 3, "--nfe", "1,2,8", "--out", tmp_path)
    assert command(*arguments) == 0
    for nfe in (1, 2, 8):
        records = read(tmp_path / f"samples-nfe{nfe}.jsonl")
        assert all(record["settings"]["nfe"] == nfe for record in records)
    single = (models_folder / "mdlm", "--num", 3, "--nfe", "8", "--out", tmp_path / "single")
    assert command(*single) == 0
    ours = [record["tokens"] for record in read(tmp_path / "samples-nfe8.jsonl")]
    alone = [record["tokens"] for record in read(tmp_path / "single" / "samples.jsonl")]
    assert ours == alone


def test_interrupted_run_resumes(
    models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (models_folder / "mdlm", "--num", 9, "--nfe", 3, "--batch-size", 2)
    assert command(*arguments, "--out", tmp_path / "whole") == 0
    written, append = [], SampleFile.append

    def stop_in_the_third_batch(self: SampleFile, records: Any) -> None:
        written.append(1)
        if len(written) == 3:
            with open(self.partial, "a") as file:
                file.write('{"index": 4, "tok')  # a torn line, as a power cut leaves it
            raise KeyboardInterrupt
        append(self, records)

    with monkeypatch.context() as patch:
        patch.setattr(SampleFile, "append", stop_in_the_third_batch)
        assert command(*arguments, "--out", tmp_path / "torn") == 130
    assert not (tmp_path / "torn" / "samples.jsonl").exists(), "unfinished must not look finished"
    assert command(*arguments, "--out", tmp_path / "torn") == 0
    expected = without_seconds(tmp_path / "whole" / "samples.jsonl")
    assert without_seconds(tmp_path / "torn" / "samples.jsonl") == expected


BLOCKED_AT_THE_FOURTH = """
import time
from trainer.sample_cli import main
from trainer.sampling.command import SampleFile

append, calls = SampleFile.append, []

def append_three(self, records):
    calls.append(1)
    if len(calls) == 4:
        time.sleep(1e6)  # until the kill, however late it comes
    append(self, records)

SampleFile.append = append_three
main()
"""


def test_killed_run_resumes(models_folder: Path, tmp_path: Path) -> None:
    arguments = [models_folder / "mdlm", "--num", 60, "--nfe", 11, "--batch-size", 1]
    partial = tmp_path / "killed" / "samples.jsonl.partial"
    words = [sys.executable, "-c", BLOCKED_AT_THE_FOURTH, *map(str, arguments)]
    words += ["--out", str(partial.parent)]
    process = subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while process.poll() is None and not (partial.is_file() and partial.stat().st_size):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 1 <= partial.read_bytes().count(b"\n") < 60
    assert command(*arguments, "--out", partial.parent) == 0
    assert command(*arguments, "--out", tmp_path / "whole") == 0
    expected = without_seconds(tmp_path / "whole" / "samples.jsonl")
    assert without_seconds(partial.parent / "samples.jsonl") == expected


def test_finished_run_is_left_alone_and_can_grow(models_folder: Path, tmp_path: Path) -> None:
    arguments = (models_folder / "mdlm", "--nfe", 2, "--out", tmp_path)
    assert command(*arguments, "--num", 3) == 0
    before = (tmp_path / "samples.jsonl").read_bytes()
    assert command(*arguments, "--num", 3) == 0
    assert (tmp_path / "samples.jsonl").read_bytes() == before
    assert command(*arguments, "--num", 5) == 0
    after = (tmp_path / "samples.jsonl").read_bytes()
    assert after.startswith(before) and after.count(b"\n") == 5


def test_noise_is_found_again_from_seed_and_index(models_folder: Path, tmp_path: Path) -> None:
    """What evaluation relies on: argmax at NFE 1 is a function of the regenerated noise."""
    arguments = ("--num", 4, "--nfe", 1, "--decision", "argmax", "--tau", 1.0, "--seed", 5)
    assert command(models_folder / "mdlm", *arguments, "--out", tmp_path) == 0
    student = tiny_student("mdlm")
    noise = sampling_noise(5, torch.arange(4), LENGTH, VOCAB)
    condition = student.embed_noise(noise).view(4, LENGTH, -1)
    tokens = torch.full((4, LENGTH), student.mask_id)
    tokens[:, 0] = 0
    with torch.no_grad():
        expected = student.predict(tokens, condition).argmax(-1)
    assert [record["tokens"] for record in read(tmp_path / "samples.jsonl")] == expected.tolist()


def test_prompts(models_folder: Path, tmp_path: Path) -> None:
    arguments = (models_folder / "mdlm", "--nfe", 4)
    assert command(*arguments, "--num", 3, "--prompt", "up up left", "--out", tmp_path / "a") == 0
    for record in read(tmp_path / "a" / "samples.jsonl"):
        assert record["tokens"][:4] == [0, 2, 2, 4] and record["num_given"] == 4
        assert record["text"].startswith("up up left")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("up\n\ndown down\n")
    assert command(*arguments, "--prompt-file", prompts, "--out", tmp_path / "b") == 0
    records = read(tmp_path / "b" / "samples.jsonl")
    assert [record["tokens"][:3] for record in records][1] == [0, 3, 3]
    assert records[0]["tokens"][:2] == [0, 2] and len(records) == 2


def test_infilling(models_folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [
        {"tokens": [0, 5, None, 7, None, 2]},
        {"tokens": [0, 5, 6, 7, 8, 9, 10, 2], "masked": [2, 3, 4]},
        {"text": "up up down left", "masked": [2]},
    ]
    rows.write_text("\n".join(map(json.dumps, lines)))
    assert command(models_folder / "mdlm", "--infill", rows, "--out", tmp_path / "out") == 0
    records = read(tmp_path / "out" / "samples.jsonl")
    assert [record["filled"] for record in records] == [[2, 4], [2, 3, 4], [2]]
    expected = [[0, 5, None, 7, None, 2], [0, 5, *[None] * 3, 9, 10, 2], [0, 2, None, 3, 4]]
    for record, given in zip(records, expected, strict=True):
        assert len(record["tokens"]) == len(given)
        for ours, theirs in zip(record["tokens"], given, strict=True):
            assert theirs is None or ours == theirs


def test_variable_length(models_folder: Path, tmp_path: Path) -> None:
    for model in ("plain", "bd3lm", "ar"):
        out = tmp_path / model
        assert command(models_folder / model, "--num", 40, "--stop-at-eos", "--out", out) == 0
        lengths = set()
        for record in read(out / "samples.jsonl"):
            tokens = record["tokens"]
            assert 1 not in tokens[1:-1], "nothing stands behind the first eos"
            assert len(tokens) == LENGTH or tokens[-1] == 1
            lengths.add(len(tokens))
        assert len(lengths) > 1


def test_monotonous_samples_are_flagged(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More entropy than eight tokens can have, so that no draw will do."""
    least = ("--min-entropy", 3, "--set", "stop.entropy_window=8", "--set", "stop.max_tries=2")
    assert command(models_folder / "plain", "--num", 3, *least, "--out", tmp_path) == 0
    assert "3 samples stayed below the least entropy" in capsys.readouterr().err
    records = read(tmp_path / "samples.jsonl")
    assert [(record["low_entropy"], record["attempt"]) for record in records] == [(True, 1)] * 3


def test_longer_than_trained(models_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "long"
    assert command(models_folder / "bd3lm", "--length", 28, "--num", 2, "--out", out) == 0
    assert all(len(record["tokens"]) == 28 for record in read(out / "samples.jsonl"))


def test_adaptive_parallel_decoding(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (models_folder / "mdlm", "--sampler", "apd", "--num", 3)
    assert command(*arguments, "--out", tmp_path / "none") == 2
    assert "verifier" in capsys.readouterr().err
    own = ("--verifier", models_folder / "ar", "--set", "mixture_weight=0.5")
    assert command(*arguments, *own, "--out", tmp_path / "own") == 0
    for record in read(tmp_path / "own" / "samples.jsonl"):
        assert 1 <= record["nfe"] <= LENGTH - 1 and 0 < record["acceptance"] <= 1
    other = save(tmp_path / "other", "ar", "none")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["up"], vocabulary["down"] = vocabulary["down"], vocabulary["up"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    capsys.readouterr()
    assert command(*arguments, "--verifier", other, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "another tokenizer" in error and "'down' is 2; expected 3" in error


def test_a_sweep_writes_a_folder_that_describes_itself(models_folder: Path, tmp_path: Path) -> None:
    arguments = (models_folder / "mdlm", "--num", 3, "--nfe", 3, "--seed", 4)
    sweep = (*arguments, "--sweep", "nucleus_p=0.7,1", "--out", tmp_path)
    assert command(*sweep) == 0
    before = (tmp_path / "nucleus_p=1" / "samples.jsonl").read_bytes()
    for value in ("0.7", "1"):
        folder = tmp_path / f"nucleus_p={value}"
        alone = tmp_path / "alone" / value
        assert command(*arguments, "--nucleus-p", value, "--out", alone) == 0
        swept = without_seconds(folder / "samples.jsonl")
        assert swept == without_seconds(alone / "samples.jsonl")
        settings = json.loads((folder / "settings.json").read_text())
        assert settings["identity"] == json.loads((alone / "settings.json").read_text())["identity"]
        assert settings["code_version"] and settings["precision"] == "fp32"
        assert len(settings["identity"]["weights_sha256"]) == 64
        assert str(models_folder) not in (folder / "settings.json").read_text()
        for record in swept:
            drawn = record["settings"]
            assert drawn["sampler"] == "ancestral" and drawn["nucleus_p"] == float(value)
            assert drawn["nfe"] == 3 and drawn["tau"] == 0.85 and record["seed"] == 4
            assert drawn["decision"] == "categorical" and drawn["temperature"] == 1
    assert command(*sweep) == 0
    assert (tmp_path / "nucleus_p=1" / "samples.jsonl").read_bytes() == before


def test_a_model_in_the_hub_cache_is_sampled_by_its_id(
    models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    repository = tmp_path / "cache" / "models--someone--student"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abc")
    shutil.copytree(models_folder / "mdlm", repository / "snapshots" / "0123abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    arguments = ("--num", 2, "--nfe", 2, "--out")
    assert command("someone/student", *arguments, tmp_path / "hub") == 0
    assert command(models_folder / "mdlm", *arguments, tmp_path / "folder") == 0
    ours, theirs = (
        [record["tokens"] for record in read(tmp_path / name / "samples.jsonl")]
        for name in ("hub", "folder")
    )
    assert ours == theirs
    capsys.readouterr()
    assert command("someone/else", *arguments, tmp_path / "none") == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and "cannot find the student [someone/else]" in error
