"""``gdistill-sample``: files, resume, the same samples whatever the batch; every mistake is one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoModel

from shards.atomic import exclusive
from shards.errors import UsageError
from tests.trainer.sampling_cases import LENGTH, VOCAB, WORDS, command, read, save, save_models, without_seconds
from trainer.sampling import command as run_module
from trainer.sampling.command import SampleRun, files_of_same_run
from trainer.sampling.given import encode, prompted
from trainer.sampling.noise import noise_of_rows
from trainer.sampling.verifier import load_verifier
from trainer.students.registry import StudentConfig


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def sampled(*arguments: object, out: Path, file: str = "samples.jsonl") -> list[dict[str, Any]]:
    """The records that a call writes, without the time they took."""
    assert command(*arguments, "--out", out) == 0
    return without_seconds(out / file)


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "settings.json").read_text())


def edited(model: Path, **fields: Any) -> Path:
    """The model, whose config says otherwise."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **fields}))
    return model


def tokens_of(records: list[dict[str, Any]]) -> list[list[int]]:
    return [record["tokens"] for record in records]


def test_files_and_records(models: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Its time is a sample's share of its batch's; of 64 samples, where no number is given."""
    clock = SimpleNamespace(perf_counter=count(0, 10).__next__, process_time=count(0, 5).__next__)
    monkeypatch.setattr(run_module, "time", clock)
    arguments = ("--nfe", 4, "--nucleus-p", 0.9, "--nucleus-rule", "crossing", "--seed", 7)
    sampled(models / "mdlm", *arguments, out=tmp_path)
    settings, records = settings_of(tmp_path), read(tmp_path / "samples.jsonl")
    assert len(records) == settings["num_samples"] == 64
    for index, record in enumerate(records):
        assert record["index"] == index
        assert len(record["tokens"]) == LENGTH and max(record["tokens"]) < VOCAB
        assert record["text"].split() == [WORDS[token] for token in record["tokens"][1:]]
        assert record["seed"] == 7 and 1 <= record["nfe"] <= 5
        assert (record["seconds"], record["processor_seconds"]) == (10 / 32, round(5 / 32, 6))
        assert record["settings"]["nucleus_p"] == 0.9 and record["settings"]["tau"] == 0.85
        assert record["settings"]["nucleus_rule"] == "crossing"
        assert record["config_sha256"] == settings["config_sha256"]
    assert settings["student"] == "mdlm" and settings["vocab_size"] == settings["mask_id"] == VOCAB
    assert settings["files"]["samples.jsonl"]["nfe"] == 4
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("model", ["mdlm", "plain", "bd3lm", "ar"])
def test_batch_size_changes_no_sample(model: str, models: Path, tmp_path: Path) -> None:
    settings = ("--min-entropy", 1.7, "--set", "stop.entropy_window=8", "--set", "stop.max_tries=2")
    redrawn = settings if model == "plain" else ()
    arguments = (models / model, "--num", 7, *redrawn, "--batch-size")
    one, three, all_seven = (sampled(*arguments, n, out=tmp_path / str(n)) for n in (1, 3, 32))
    assert one == three == all_seven and len(one) == 7
    assert len({record.get("attempt") for record in one}) == (1 if model != "plain" else 2)


def test_batches_fit_what_kernels_can_index(models: Path, tmp_path: Path, monkeypatch: Any) -> None:
    limit, sizes, draw = 3 * LENGTH * (VOCAB + 1) - 1, [], SampleRun.draw

    def watched(run: SampleRun, sampler: Any, batch: list[int]) -> Any:
        sizes.append(len(batch))
        return draw(run, sampler, batch)

    monkeypatch.setattr(run_module, "largest_batch", lambda elements, device: limit // elements)
    monkeypatch.setattr(SampleRun, "draw", watched)
    sampled(models / "mdlm", "--num", 5, "--nfe", 2, out=tmp_path)
    assert sizes == [2, 2, 1]


def test_a_curve_writes_one_file_per_nfe(models: Path, tmp_path: Path) -> None:
    arguments = (models / "mdlm", "--num", 3, "--nfe")
    curve = sampled(*arguments, "8,1,2", out=tmp_path, file="samples-nfe8.jsonl")
    for nfe in (1, 2, 8):
        for record in read(tmp_path / f"samples-nfe{nfe}.jsonl"):
            assert record["settings"]["nfe"] == nfe
    alone = sampled(*arguments, "8", out=tmp_path / "single")
    assert tokens_of(curve) == tokens_of(alone)
    sampled(*arguments, "2,4", out=tmp_path, file="samples-nfe4.jsonl")
    files = settings_of(tmp_path)["files"]
    assert {file["nfe"] for file in files.values()} == {1, 2, 4, 8}, "all that lie there"


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


def test_a_killed_run_resumes(models: Path, tmp_path: Path) -> None:
    arguments = [models / "mdlm", "--num", 12, "--nfe", 11, "--batch-size", 1]
    partial = tmp_path / "killed" / "samples.jsonl.partial"
    words = [sys.executable, "-c", BLOCKED_AT_THE_FOURTH, *map(str, arguments)]
    words += ["--out", str(partial.parent)]
    process = subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while process.poll() is None and not (partial.is_file() and partial.stat().st_size):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 1 <= partial.read_bytes().count(b"\n") < 12
    assert not partial.with_suffix("").exists(), "unfinished must not look finished"
    with open(partial, "a") as file:
        file.write('{"index": 4, "tok')  # a torn line, as a power cut leaves it
    resumed = sampled(*arguments, out=partial.parent)
    assert resumed == sampled(*arguments, out=tmp_path / "whole")


def test_a_finished_run_is_left_alone_and_can_grow(models: Path, tmp_path: Path) -> None:
    arguments, file = (models / "mdlm", "--nfe", 2, "--num"), tmp_path / "samples.jsonl"
    sampled(*arguments, 3, out=tmp_path)
    before = file.read_bytes()
    sampled(*arguments, 3, out=tmp_path)
    assert file.read_bytes() == before
    sampled(*arguments, 5, out=tmp_path)
    assert file.read_bytes().startswith(before) and file.read_bytes().count(b"\n") == 5


def test_prompts(models: Path, tmp_path: Path) -> None:
    arguments = (models / "mdlm", "--nfe", 4)
    records = sampled(*arguments, "--prompt", "up up left", "--length", 8, out=tmp_path / "a")
    assert len(records) == 64 and settings_of(tmp_path / "a")["row_length"] == 8
    for record in records:
        assert record["tokens"][:4] == [0, 2, 2, 4] and record["num_given"] == 4 and len(record["tokens"]) == 8
        assert record["text"].startswith("up up left") and "filled" not in record
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("\ufeffup\r\n\r\ndown down\r\n".encode())  # as editors of Windows write it
    first, second, again = sampled(*arguments, "--num", 3, "--prompt-file", prompts, out=tmp_path / "b")
    assert first["tokens"][:2] == again["tokens"][:2] == [0, 2] and second["tokens"][:3] == [0, 3, 3]
    prompts.write_text("up\ndown up\n")
    words = (*arguments, "--prompt-file", prompts, "--out")
    assert command(*words, tmp_path / "b", "--num", 3) == 2, "another second prompt is another run"
    assert command(*words, tmp_path / "c") == 0 and len(read(tmp_path / "c" / "samples.jsonl")) == 2


@pytest.mark.parametrize(("bos", "first"), [(None, 1), (5, 5)])
def test_a_row_begins_with_the_models_bos_or_the_prompt_or_eos(
    bos: int | None, first: int, models: Path, tmp_path: Path
) -> None:
    """The first token is no text where nobody asked for it."""
    model = edited(shutil.copytree(models / "mdlm", tmp_path / "model"), bos_token_id=bos)
    (free,) = sampled(model, "--num", 1, out=tmp_path / "free")
    assert free["tokens"][0] == first and len(free["text"].split()) == LENGTH - 1
    given, file = [*([] if bos is None else [bos]), 2, 2, 4], tmp_path / "prompts"
    file.write_text("up up left")
    for option, value in (("--prompt", "up up left"), ("--prompt-file", file)):
        (asked,) = sampled(model, "--num", 1, option, value, out=tmp_path / option)
        assert asked["tokens"][: len(given)] == given and asked["text"].startswith("up up left")


def test_infilling(models: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [
        {"tokens": [0, 5, None, 7, None, 2]},
        {"tokens": [0, 5, 6, 7, 8, 9, 10, 2], "masked": [2, 3, 4]},
        {"text": "up up down left", "masked": [2, 4]},
    ]
    rows.write_text("\n".join(map(json.dumps, lines)))
    records = sampled(models / "mdlm", "--infill", rows, out=tmp_path / "out")
    assert [record["filled"] for record in records] == [[2, 4], [2, 3, 4], [2, 4]]
    expected = [[0, 5, None, 7, None, 2], [0, 5, *[None] * 3, 9, 10, 2], [0, 2, None, 3, None]]
    for record, given in zip(records, expected, strict=True):
        pairs = zip(record["tokens"], given, strict=True)
        assert all(theirs is None or ours == theirs for ours, theirs in pairs)
    file = tmp_path / "out/samples.jsonl"
    file.with_name("samples.jsonl.partial").write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    file.unlink()
    assert sampled(models / "mdlm", "--infill", rows, out=tmp_path / "out") == records, "those that are missing"


@pytest.mark.parametrize("model", ["plain", "bd3lm", "ar"])
def test_variable_length(model: str, models: Path, tmp_path: Path) -> None:
    lengths = set()
    for record in sampled(models / model, "--num", 40, "--stop-at-eos", out=tmp_path):
        tokens = record["tokens"]
        assert 1 not in tokens[1:-1], "nothing stands behind the first eos"
        assert len(tokens) == LENGTH or tokens[-1] == 1
        lengths.add(len(tokens))
    assert len(lengths) > 1


def test_monotonous_samples_are_flagged(models: Path, tmp_path: Path, capsys: Any) -> None:
    """More entropy than eight tokens can have, so that no draw will do."""
    least = ("--min-entropy", 3, "--set", "stop.entropy_window=8", "--set", "stop.max_tries=2")
    records = sampled(models / "plain", "--num", 3, *least, out=tmp_path)
    assert "3 samples stayed below the least entropy" in capsys.readouterr().err
    assert [(record["low_entropy"], record["attempt"]) for record in records] == [(True, 1)] * 3
    sampled(models / "plain", "--num", 3, "--min-entropy", 0.01, *least[2:], out=tmp_path / "others")
    assert "least entropy" not in capsys.readouterr().err


def test_a_sweep_writes_a_folder_that_describes_itself(models: Path, tmp_path: Path) -> None:
    arguments = (models / "mdlm", "--num", 3, "--nfe", 3, "--seed", 4)
    assert command(*arguments, "--sweep", "nucleus_p = 0.7, 1", "--out", tmp_path) == 0
    for value in ("0.7", "1"):
        folder, alone = tmp_path / f"nucleus_p={value}", tmp_path / "alone" / value
        swept = without_seconds(folder / "samples.jsonl")
        assert swept == sampled(*arguments, "--nucleus-p", value, out=alone)
        settings = settings_of(folder)
        assert settings["identity"] == settings_of(alone)["identity"]
        assert settings["code_version"] and settings["precision"] == "fp32"
        assert len(settings["identity"]["weights_sha256"]) == 64
        assert str(models) not in (folder / "settings.json").read_text()
        drawn = {"sampler": "ancestral", "nucleus_p": float(value), "nfe": 3, "tau": 0.85}
        drawn |= {"decision": "categorical", "temperature": 1}
        assert all(record["settings"] | drawn == record["settings"] for record in swept)


def test_a_cached_model_is_sampled_by_its_id(models: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    repository = tmp_path / "cache" / "models--someone--student"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abc")
    shutil.copytree(models / "mdlm", repository / "snapshots" / "0123abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    few = ("--num", 2, "--nfe", 2)
    by_id = sampled("someone/student", *few, out=tmp_path / "hub")
    assert tokens_of(by_id) == tokens_of(sampled(models / "mdlm", *few, out=tmp_path / "folder"))
    capsys.readouterr()
    assert command("someone/else", "--out", tmp_path / "none") == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and "cannot find the student [someone/else]" in error


# A folder holds the samples of one run.


OTHER_RUNS = [
    ("mdlm", {}, ("--seed", 1), "seed]; got 1; expected 0 as there; give another --out"),
    ("mdlm", {}, ("--tau", 0.5), "sampler.tau"),
    ("mdlm", {}, ("--prompt", "up"), "given_rows_sha256"),
    ("mdlm", {}, ("--precision", "bf16"), "precision"),
    ("bd3lm", {"block_size": 6}, (), "student_config.block_size"),
    ("mdlm", {"codec": {"name": "topk", "parameters": {"num_entries": 4}}}, (), "codec"),
    ("mdlm", {"eos_token_id": 3}, (), "eos_id"),
    ("mdlm", {"bos_token_id": 3}, (), "bos_id"),
    ("mdlm", {"row_length": 24}, ("--length", LENGTH), "row_length"),
    ("mdlm", {}, ("--nfe", "1,2"), "kind"),
]


@pytest.mark.parametrize(("model", "fields", "words", "named"), OTHER_RUNS)
def test_what_decides_the_samples_is_another_run(
    model: str, fields: Any, words: Any, named: str, models: Path, tmp_path: Path, capsys: Any
) -> None:
    arguments, out = ("--num", 2, "--out", tmp_path / "out"), tmp_path / "out"
    assert command(models / model, *arguments) == 0
    before = {name: (out / name).read_bytes() for name in ("samples.jsonl", "settings.json")}
    other = edited(shutil.copytree(models / model, tmp_path / "other"), **fields)
    capsys.readouterr()
    assert command(other, *words, *arguments) == 2
    assert f"out: {named}" in capsys.readouterr().err
    assert {name: (out / name).read_bytes() for name in before} == before


def test_what_only_one_of_two_versions_knows_is_another_run(tmp_path: Path) -> None:
    for saved, ours in (({"a": 1}, {}), ({}, {"a": 1})):
        (tmp_path / "settings.json").write_text(json.dumps({"identity": saved, "files": {}}))
        with pytest.raises(UsageError, match=": a"):
            files_of_same_run(tmp_path / "settings.json", ours)


def test_another_verifier_is_another_run(models: Path, tmp_path: Path, capsys: Any) -> None:
    verifier = save(tmp_path / "verifier", "ar", "none")
    arguments = ("--sampler", "apd", "--verifier", verifier, "--num", 2, "--out", tmp_path / "out")
    for _ in range(2):
        load_verifier.cache_clear()  # a new process remembers none
        assert command(models / "mdlm", *arguments) == 0
    changed = AutoModel.from_pretrained(verifier)
    changed.backbone.output_layer.linear.bias.data += 1
    changed.save_pretrained(verifier)
    load_verifier.cache_clear()
    assert command(models / "mdlm", *arguments) == 2
    assert "out: verifier_sha256]" in capsys.readouterr().err


def test_what_tolerates_tf32_has_it_and_says_so(models: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Not under a verifier, whose two passes must agree; nor where autocast has bfloat16."""
    asked: list[str] = []
    narrow: list[bool] = []

    def watched(*given: Any) -> Any:
        narrow.append(torch.is_autocast_enabled("cpu"))
        return noise_of_rows(*given)

    def allowed(device: torch.device) -> str:
        asked.append(device.type)
        return "TF32"

    monkeypatch.setattr(run_module, "allow_tf32", allowed)
    monkeypatch.setattr(run_module, "noise_of_rows", watched)
    verified = ("--sampler", "apd", "--verifier", models / "ar")
    cases = {"TF32": (), "float32": verified, "bf16": ("--precision", "bf16")}
    for name, words in cases.items():
        sampled(models / "mdlm", *words, "--num", 1, out=tmp_path / name)
        settings = settings_of(tmp_path / name)
        assert settings["products"] == ("TF32" if name == "TF32" else "float32")
        assert "products" not in settings["identity"]
        assert str(models) not in json.dumps(settings)
        said = " ".join(capsys.readouterr().err.split())
        assert ("NVIDIA_TF32_OVERRIDE=0" in said) == (name == "TF32")
    assert asked == ["cpu"] and narrow == [False, False, True]


# Mistakes: one line on stderr, before the first sample.


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
        ("mdlm", "--sampler first_hitting --nfe 4", "unknown config key [first_hitting.nfe]"),
        ("mdlm", "--passes-per-block 2", "unknown config key [ancestral.passes_per_block]"),
        ("bd3lm", "--nfe 2", "at least 3, one for each block of 4 tokens; --passes-per-block"),
        ("bd3lm", "--nfe 4 --passes-per-block 2", "exclude each other"),
        ("bd3lm", "--nfe 4 --set passes_per_block=2", "exclude each other"),
        ("bd3lm", "--passes-per-block 0", "bad NFE [--passes-per-block]"),
        ("bd3lm", "--nfe 4 --set inner=first_hitting", "another order [nfe]"),
        ("bd3lm", "--passes-per-block 2 --set inner=first_hitting", "another order [passes_per_block]"),
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
        ("mdlm", "--sampler apd --verifier absent", "cannot find the verifier"),
        ("bd3lm", "--verifier x", "unknown config key [block.verifier]"),
        # settings
        ("mdlm", "--nucleus-p 0", "nucleus_p"),
        ("mdlm", "--nucleus-p 0.9 --decision argmax", "nucleus_p"),
        ("mdlm", "--temperature 0.9 --decision argmax", "temperature"),
        ("mdlm", "--top-k 9 --decision argmax", "top_k"),
        ("mdlm", "--top-k 0", "top_k"),
        ("mdlm", "--temperature 0", "temperature"),
        ("mdlm", "--decision beam", "decision"),
        ("plain", "--tau 0.85", "takes no noise [tau]"),
        ("mdlm", "--set finalargmax=false", "did you mean 'final_argmax'"),
        ("bd3lm", "--set inner=confidence --set final_argmax=false", "inner=ancestral"),
        ("bd3lm", "--set confidence=probability", "inner=ancestral; leave it out, or inner=conf"),
        ("mdlm", "--min-entropy inf", "out of range [stop.min_entropy_nats]"),
        ("mdlm", "--min-entropy 1", "--set stop.entropy_window=12"),
        ("bd3lm", "--set stop.max_tries=3", "no sample is redrawn [stop.max_tries]"),
        ("mdlm", "--set stop.entropy_window=8", "no sample is redrawn [stop.entropy_window]"),
        *(("mdlm", f"--sweep {text}", "bad sweep") for text in ("nucleus_p=0.7,,1", "=1,2", "nucleus_p")),
        ("bd3lm", "--sweep nfe=4,2", "at least 3"),
        ("mdlm", "--sweep decision=argmax,Argmax", "a value is named twice"),
        ("mdlm", "--sweep nukleus_p=0.7", "did you mean 'nucleus_p'"),
        ("mdlm", "--sweep tau=1,2 --tau 3", "named beside the sweep"),
        ("mdlm", "--sweep nfe=1,2 --nfe 3", "named beside the sweep"),
        # rows
        ("bd3lm", "--length 10", "block size does not divide"),
        ("mdlm", "--length 24", "longer than the student's"),
        ("ar", "--length 24", "longer than the student's"),
        ("mdlm", "--length 1", "nothing to fill [--length]"),
        ("mdlm", "--prompt " + "up," * (LENGTH - 1), f"longer than the row [prompt 0]; got {LENGTH} tokens with bos"),
        ("mdlm", "--prompt \udcff", "not UTF-8"),
        *(("mdlm", f"--prompt up --{name} x", "exclude each other") for name in ("prompt-file", "infill")),
        ("mdlm", "--infill absent.jsonl", "cannot read"),
        ("mdlm", "--infill x --length 8", "exclude each other [--infill, --length]"),
        # the run
        ("mdlm", "--num 0", "--num"),
        ("mdlm", "--batch-size 0", "--batch-size"),
        ("mdlm", "--seed -1", "--seed"),
        ("mdlm", f"--seed {2**63}", "--seed"),
        ("mdlm", "--device abacus", "unknown device [--device]; got abacus"),
        ("mdlm", "--precision int3", "--precision"),
    ],
)
def test_mistakes_are_one_line(model: str, words: str, message: str, models: Path, tmp_path: Path, capsys) -> None:
    arguments = [word.replace(",", " ") if "up," in word else word for word in words.split()]
    assert message in refusal(capsys, models / model, *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_has_its_own_ids_alone() -> None:
    config = StudentConfig(vocab_size=4, row_length=9, bos_token_id=None)
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [3] * add_special_tokens + [*map(int, text)])
    assert encode("12", tokenizer, config, "here") == [1, 2]
    for text, message in (("14", "ids outside .*expected below 4"), ("", "an empty prompt and no bos token")):
        with pytest.raises(UsageError, match=message):
            prompted([text], tokenizer, config, 9)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"tokens": [0, 11]}', "position 1"),
        ('{"tokens": [0, true, null]}', "position 1"),
        ('{"tokens": [0, 3], "masked": [true]}', "bad positions"),
        ('{"tokens": [0]}', "cannot be filled"),
        ('{"tokens": [0, 3, 4]}', "nothing to fill"),
        ('{"tokens": [null, 3, 4]}', "position 0"),
        ('{"tokens": [0, 3], "masked": [7]}', "bad positions"),
        ('{"tokens": [0, 3], "masked": [-1]}', "bad positions"),
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
    rows.write_text('{"tokens": [0, null]}\n\n' + line + "\n")
    error = refusal(capsys, models / "mdlm", "--infill", rows, "--out", tmp_path / "out")
    assert message in error and f"{rows}:3" in error


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
    for option, data, message in (
        ("--infill", b"\n", "no row in the file"),
        ("--prompt-file", b"\n \n", "no prompt in the file"),
        ("--prompt-file", b"\xff", "not UTF-8 text"),
    ):
        rows.write_bytes(data)
        assert f"{message} [{rows}]" in refusal(capsys, models / "mdlm", option, rows, "--out", out)


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
    words["up"], words["down"], words["word"] = words["down"], words["up"], 11
    (bare / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert "'word' is 11; expected absent" in refusal(capsys, *arguments, bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer to compare" in refusal(capsys, *arguments, bare)
    assert "no tokenizer [--prompt]" in refusal(capsys, bare, "--prompt", "up", "--out", tmp_path)


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
        *(("settings.json", text, 1, "damaged settings") for text in ("{", "[]")),
    ],
)
def test_a_damaged_folder_of_samples_is_left_as_it_is(
    file: str, text: str, code: int, message: str, models: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / file).write_text(text)
    arguments = (models / "mdlm", "--num", 2, "--nfe", 2, "--out", tmp_path)
    assert message in refusal(capsys, *arguments, code=code)
    assert (tmp_path / file).read_text() == text
    assert (tmp_path / "settings.json").exists() == (file == "settings.json")


def test_a_folder_that_cannot_be_written_is_named(models: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(capsys, models / "mdlm", "--out", tmp_path / "file" / "out")
    assert error.startswith(f"error: cannot write there [{tmp_path / 'file'}")
    (tmp_path / "settings.json").mkdir()
    error = refusal(capsys, models / "mdlm", "--num", 2, "--out", tmp_path)
    assert error.startswith(f"error: cannot write there [{tmp_path}/")
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
    small = save(tmp_path / "small", vocab_size=8)  # of eleven words
    assert "ids outside the student's vocabulary" in refusal(capsys, small, "--prompt", "e", "--out", tmp_path / "out")
