"""``gdistill-sample``: a folder holds the samples of one run, drawn by one process at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel

from shards.atomic import exclusive
from tests.trainer.sample_cli_cases import command, save, save_models
from trainer.sampling.verifier import load_verifier


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def test_other_settings_in_the_same_folder_are_refused(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (models_folder / "mdlm", "--num", 2, "--nfe", 2, "--out", tmp_path)
    assert command(*arguments) == 0
    before = (tmp_path / "samples.jsonl").read_bytes()
    assert command(*arguments, "--seed", 1) == 2
    assert "seed]; got 1; expected 0 as there" in capsys.readouterr().err
    assert command(*arguments[:-2], "--tau", 0.5, "--out", tmp_path) == 2
    assert "sampler.tau" in capsys.readouterr().err
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def with_config(model: Path, folder: Path, **fields: Any) -> Path:
    """The same weights under another config."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.mark.parametrize(
    ("model", "fields", "named"),
    [
        ("bd3lm", {"block_size": 6}, "student_config.block_size"),
        ("mdlm", {"codec": {"name": "topk", "parameters": {"num_entries": 4}}}, "codec"),
        ("mdlm", {"eos_token_id": 3}, "eos_id"),
    ],
)
def test_the_same_weights_under_another_config_are_another_run(
    model: str,
    fields: dict[str, Any],
    named: str,
    models_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments, out = ("--num", 2, "--out", tmp_path / "out"), tmp_path / "out"
    assert command(models_folder / model, *arguments) == 0
    before = {name: (out / name).read_bytes() for name in ("samples.jsonl", "settings.json")}
    other = with_config(models_folder / model, tmp_path / "other", **fields)
    capsys.readouterr()
    assert command(other, *arguments) == 2
    assert f"out: {named}]" in capsys.readouterr().err
    assert {name: (out / name).read_bytes() for name in before} == before


def test_another_verifier_in_the_same_place_is_another_run(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verifier = save(tmp_path / "verifier", "ar", "none")
    arguments = ("--sampler", "apd", "--verifier", verifier, "--num", 2, "--out", tmp_path / "out")
    assert command(models_folder / "mdlm", *arguments) == 0
    load_verifier.cache_clear()
    assert command(models_folder / "mdlm", *arguments) == 0
    changed = AutoModel.from_pretrained(verifier)
    changed.backbone.output_layer.linear.bias.data += 1
    changed.save_pretrained(verifier)
    load_verifier.cache_clear()  # a new process remembers none
    assert command(models_folder / "mdlm", *arguments) == 2
    assert "out: verifier_sha256]" in capsys.readouterr().err


def test_two_commands_do_not_fill_one_folder(
    models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (models_folder / "mdlm", "--num", 2, "--out", tmp_path)
    with exclusive(tmp_path):
        assert command(*arguments) == 2
    error = capsys.readouterr().err.strip()
    assert "another run is writing here" in error and "\n" not in error
    assert not list(tmp_path.glob("*.json*"))
    assert command(*arguments) == 0


def test_what_tolerates_tf32_is_sampled_with_it_and_says_so(
    models_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not under a verifier, whose two passes must agree; nor where autocast has bfloat16."""
    asked: list[str] = []
    monkeypatch.setattr(
        "trainer.sampling.command.allow_tf32",
        lambda device: (asked.append(device.type), "TF32")[1],
    )
    verified = ("--sampler", "apd", "--verifier", save(tmp_path / "verifier", "ar", "none"))
    cases = {"TF32": (), "float32": verified, "bf16": ("--precision", "bf16")}
    for name, words in cases.items():
        out = tmp_path / name
        assert command(models_folder / "mdlm", *words, "--num", 1, "--out", out) == 0
        settings = json.loads((out / "settings.json").read_text())
        assert settings["products"] == ("TF32" if name == "TF32" else "float32")
        assert "products" not in settings["identity"]
        said = " ".join(capsys.readouterr().err.split())
        assert ("NVIDIA_TF32_OVERRIDE=0" in said) == (name == "TF32")
    assert asked == ["cpu"]
