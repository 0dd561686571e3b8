"""Noise of samples: named by seed, sample, position, step and attempt; truncated as in training."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from shards.errors import UsageError
from shards.noise.kinds import dense_arrivals
from shards.store.store import ShardStore
from tests.trainer.run_cases import tiny_run, write_store
from tests.trainer.sample_cli_cases import command, read, save
from tests.trainer.sampling_cases import LENGTH, VOCAB, draw, noise_for, tiny_student
from trainer.loading import generate
from trainer.sampling.fill import AncestralSampler
from trainer.sampling.noise import RowNoise, sampling_noise
from trainer.sampling.registry import make_sampler
from trainer.sampling.stopping import StopRule
from trainer.students.folder import STUDENT_FILE, export_model, open_model
from trainer.students.registry import BD3LM, MDLM, Student
from trainer.training.checkpoint import run_identity
from trainer.training.construction import build_student

TOP_2 = {"name": "topk", "parameters": {"num_entries": 2}}
IDS = torch.tensor([5, 0, 17])


def arrivals(seed: int, ids: Tensor, draw: int = 0) -> Tensor:
    noise = sampling_noise(seed, ids, LENGTH, VOCAB, draw=draw)
    return dense_arrivals(noise).view(len(ids), LENGTH, VOCAB)


def are_new(values: Tensor) -> bool:
    """Whether they are draws of their own; of many float32 numbers a few agree by rounding."""
    return len(values.unique()) > 0.99 * values.numel()


def test_every_name_gives_noise_of_its_own() -> None:
    """Exponentials of other names agree nowhere; those of one name agree whatever the batch."""
    ours = arrivals(3, IDS)
    assert torch.equal(arrivals(3, IDS[1:2])[0], ours[1])
    rows = [*ours, *arrivals(4, IDS), *arrivals(3, IDS, draw=1), *arrivals(3, IDS + 1)]
    assert are_new(torch.stack(rows))


def test_every_attempt_and_step_has_noise_of_its_own() -> None:
    use = RowNoise(noise_for(tiny_student(), IDS, 3), LENGTH, 1.0, redraw=True)
    rows = torch.tensor([2, 0])
    attempts = [use.of(rows, attempt).noise for attempt in range(3)]
    seen = [dense_arrivals(noise.redrawn(step)) for noise in attempts for step in range(LENGTH)]
    assert torch.equal(seen[0].view(2, LENGTH, VOCAB), arrivals(3, IDS)[rows])
    assert are_new(torch.stack(seen))


@pytest.mark.parametrize("redraw", [False, True])
@pytest.mark.parametrize("name", ["ancestral", "block"])
def test_noise_is_redrawn_at_every_step_or_at_none(
    name: str, redraw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"nfe": 6} if name == "ancestral" else {"use_cache": False}
    kind, size = (MDLM, None) if name == "ancestral" else (BD3LM, 6)
    student = tiny_student("mdlm" if size is None else "bd3lm", block_size=size)
    seen, original, compared = [], MDLM.predict_at, 0

    def spy(self, tokens, where, condition=None, *rest):
        seen.append((tokens[0] == self.mask_id, condition.embedding[0]))
        return original(self, tokens, where, condition, *rest)

    monkeypatch.setattr(kind, "predict_at", spy)
    draw(student, make_sampler(name, redraw_noise=redraw, **settings), IDS[:1])
    for before, after in itertools.pairwise(seen):
        width = min(len(before[0]), len(after[0]))
        both = before[0][:width] & after[0][:width]
        same = (before[1][:width][both] == after[1][:width][both]).all(dim=-1)
        compared += len(same)
        assert (~same).all() if redraw else same.all()
    assert compared >= LENGTH


def test_redrawn_noise_is_that_of_the_step() -> None:
    student = tiny_student()
    noise = noise_for(student, IDS, 3)
    masked = torch.ones(3, LENGTH, dtype=torch.bool)
    rows, steps = torch.tensor([2, 1]), torch.tensor([5, 2])
    both = RowNoise(noise, LENGTH, 1.0, redraw=True).embed(student, masked[rows], rows, steps=steps)
    for slot, (row, step) in enumerate(zip(rows, steps, strict=True)):
        fixed = RowNoise(noise.redrawn(int(step)), LENGTH, 1.0)
        expected = fixed.embed(student, masked, torch.arange(3)).embedding[row]
        assert torch.allclose(both.embedding[slot], expected)


def test_a_sample_drawn_anew_sees_other_noise() -> None:
    """argmax of x_0 in one pass is a function of the noise alone: it changes only with it."""
    student, ids = tiny_student(), torch.arange(40)
    entropic = StopRule(min_entropy_nats=100.0, entropy_window=LENGTH, max_tries=2)
    once = draw(student, AncestralSampler(nfe=1, decision="argmax"), ids)
    twice = draw(student, AncestralSampler(nfe=1, decision="argmax", stop=entropic), ids)
    assert (twice.details["attempt"] == 1).all()
    assert (twice.tokens != once.tokens).any(dim=1).float().mean() > 0.9


# Truncated as a student's training noise was, whoever asks the student.


def edit_config(model: Path, codec: Any = None) -> Path:
    """Name a codec in the config, or take the field out as in older models."""
    config = json.loads((model / "config.json").read_text())
    del config["codec"]
    extra = {} if codec is None else {"codec": codec}
    (model / "config.json").write_text(json.dumps({**config, **extra}))
    return model


def generated(student: Student, **options: Any) -> list[list[int]]:
    return generate(student.eval(), num_samples=6, nfe=3, seed=5, **options).tolist()


def test_generate_and_the_command_truncate_alike(tmp_path: Path) -> None:
    model = edit_config(save(tmp_path / "model"), TOP_2)
    assert command(model, "--num", 6, "--nfe", 3, "--seed", 5, "--out", tmp_path / "out") == 0
    sampled = [record["tokens"] for record in read(tmp_path / "out" / "samples.jsonl")]
    student = AutoModel.from_pretrained(model)
    assert generated(student) == sampled
    whole = generated(tiny_student())
    assert whole != sampled
    noise = sampling_noise(5, torch.arange(6), LENGTH, VOCAB)
    assert generated(student, noise=noise) == whole, "noise that is given is taken as it is"


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
    assert exported.codec == (store.codec if conditioning == "gumbel" else None)


@pytest.mark.parametrize("codec", ["topk", {"name": "topk"}, {"name": "top", "parameters": {}}])
def test_a_bad_codec_is_named(codec: Any) -> None:
    student = tiny_student()
    student.config.codec = codec
    with pytest.raises(UsageError, match="codec"):
        generate(student, num_samples=1, nfe=1)
