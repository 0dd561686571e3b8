"""Sampling noise is truncated as a student's training noise was, whoever asks the student."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.trainer.run_cases import tiny_run, write_store
from tests.trainer.sample_cli_cases import command, read, save
from tests.trainer.sampling_cases import LENGTH, VOCAB, tiny_student
from trainer.loading import generate
from trainer.sampling.noise import sampling_noise
from trainer.students.folder import STUDENT_FILE, export_model, open_model
from trainer.students.registry import Student
from trainer.training.checkpoint import run_identity
from trainer.training.construction import build_student

TOP_2 = {"name": "topk", "parameters": {"num_entries": 2}}


def edit_config(model: Path, codec: Any = None) -> Path:
    """Name a codec in the config, or take the field out as in older models."""
    config = json.loads((model / "config.json").read_text())
    del config["codec"]
    extra = {} if codec is None else {"codec": codec}
    (model / "config.json").write_text(json.dumps({**config, **extra}))
    return model


def generated(student: Student) -> list[list[int]]:
    return generate(student.eval(), num_samples=6, nfe=3, seed=5).tolist()


def test_generate_and_the_command_truncate_alike(tmp_path: Path) -> None:
    model = edit_config(save(tmp_path / "model"), TOP_2)
    arguments = ("--num", 6, "--nfe", 3, "--seed", 5, "--out", tmp_path / "out")
    assert command(model, *arguments) == 0
    sampled = [record["tokens"] for record in read(tmp_path / "out" / "samples.jsonl")]
    assert generated(AutoModel.from_pretrained(model)) == sampled
    assert generated(tiny_student()) != sampled


def test_models_without_a_codec_take_the_whole_prior(tmp_path: Path) -> None:
    """Older models name it in ``student.json`` only, where the command finds it."""
    model = edit_config(save(tmp_path / "model"))
    assert generated(AutoModel.from_pretrained(model)) == generated(tiny_student())
    assert open_model(model).student.codec is None
    (model / STUDENT_FILE).write_text(json.dumps({"run": {"store": {"codec": TOP_2}}}))
    named = tiny_student()
    named.config.codec = TOP_2
    assert generated(open_model(model).student) == generated(named)


@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
def test_an_exported_model_names_the_codec(tmp_path: Path, conditioning: str) -> None:
    store = ShardStore.open(write_store(tmp_path / "store", "topk"))
    config = tiny_run(model__conditioning=conditioning)
    student = build_student(config, store, None)
    record = {"run": run_identity(config, store.manifest, None), "validation": None, "step": 0}
    export_model(tmp_path / "model", student, student.state_dict(), record, store)
    exported = AutoModel.from_pretrained(tmp_path / "model")
    expected = store.codec if conditioning == "gumbel" else None
    assert exported.codec == expected


@pytest.mark.parametrize("codec", ["topk", {"name": "topk"}, {"name": "top", "parameters": {}}])
def test_a_bad_codec_is_named(codec: Any) -> None:
    student = tiny_student()
    student.config.codec = codec
    with pytest.raises(UsageError, match="codec"):
        generate(student, num_samples=1, nfe=1)


def test_noise_given_is_taken_as_it_is() -> None:
    student = tiny_student()
    whole = generated(student)
    student.config.codec = TOP_2
    noise = sampling_noise(5, torch.arange(6), LENGTH, VOCAB)
    assert generate(student, num_samples=6, nfe=3, seed=5, noise=noise).tolist() == whole
