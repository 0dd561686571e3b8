"""Whole walks on the pretended device: a training with all it does, verified decoding, the judge.

Here a count is of the whole walk, not of a step: what matters is that it runs, on one device.
Verifiers and judges are small and random, made on the host before the pretence begins.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from evaluation.text.mauve_divergence import text_features
from evaluation.text.reading import JudgeModel, ReadingLimits, Room, read_texts
from pipeline.extract import to_host
from shards.codec.protocol import TeacherOutput
from shards.codec.registry import make_codec
from shards.language_model.forward import resolve_device
from tests.rehearsal.pretend_cuda import WATCH
from tests.rehearsal.scenarios import Counts, scenario, student, waits_per
from tests.trainer.backbone_cases import backbone_run, store_of, write_backbone
from tests.trainer.run_cases import tiny_run, write_store
from tests.trainer.sampling.test_adaptive import tiny_llama
from tests.trainer.sampling_cases import VOCAB, open_rows, tiny_student
from trainer.sampling.noise import sampling_noise
from trainer.sampling.registry import make_sampler
from trainer.training.checkpoint import CheckpointFolder
from trainer.training.loop import train
from trainer.training.metrics import CHECKPOINTS

ON_GPU = {
    "training__device": "cuda",
    "training__micro_batch_size": 3,
    "training__noise_kernel": "eager",
    "training__validate_every_steps": 2,
}
RUNS = {
    "mdlm, the compiled kernel tried": {"training__noise_kernel": "auto"},
    "mdlm, bf16": {"training__precision": "bf16"},
    "bd3lm": {"student": "bd3lm", "model__block_size": 4, "model__attention": "sdpa"},
    "bd3lm, search for clips": {
        "student": "bd3lm",
        "model__block_size": 4,
        "model__attention": "sdpa",
        "model__diffusion__search_schedule": "true",
        "training__num_steps": 2,
    },
    "ar": {"student": "ar", "model__conditioning": "none"},
    "mdlm, noise read again": {"model__noise__layers": [1]},
    "mdlm, noise read again among 3": {
        "model__noise__layers": [1],
        "model__noise__top_k": 3,
    },
    "mdlm, token-level distillation": {"model__kd__kind": "token"},
}


@cache
def stories() -> Path:
    """A store, and beside it a verifier of the same vocabulary; written on the host."""
    folder = Path(tempfile.mkdtemp())
    tiny_llama().save_pretrained(folder / "verifier")
    write_store(folder / "store", vocab_size=VOCAB)
    backbone = write_backbone(folder / "backbone")
    store_of(folder / "own", backbone)
    hidden_output()
    return folder


@cache
def hidden_output() -> tuple[TeacherOutput, torch.Tensor]:
    """A teacher of 8 hidden units that says W h of two rows, and W."""
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(300, 8, generator=generator)
    hidden = torch.randn(2, 15, 8, generator=generator)
    log_probs = (hidden @ head.T).log_softmax(-1)
    return TeacherOutput(log_probs, log_probs.argmax(-1), torch.arange(2), hidden), head


def _training_run(name: str) -> Counts:
    """Steps, validation, a checkpoint; the same command again, from it, to the export."""
    with tempfile.TemporaryDirectory() as folder:
        for num_steps in (2, 3):
            settings = {**ON_GPU, "training__num_steps": num_steps, **RUNS[name]}
            settings["optimization__schedule"] = "constant"
            assert train(tiny_run(**settings), stories() / "store", Path(folder) / "run")
        assert (Path(folder) / "run/model/model.safetensors").is_file()
    return Counter(WATCH.syncs)


for _name in RUNS:
    scenario(f"training run, {_name}")(lambda name=_name: _training_run(name))


@scenario("training run, resumed as if whole")
def resumed() -> Counts:
    """Three steps, and the third again from the second's checkpoint: the same weights, though the
    rows of the third had set out when that was written."""
    run = tiny_run(**ON_GPU, training__num_steps=3, training__checkpoint_every_steps=2)
    weights = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            assert train(run, stories() / "store", Path(folder))
            weights.append(load_file(Path(folder) / "model/model.safetensors"))
            shutil.rmtree(CheckpointFolder(Path(folder) / CHECKPOINTS, 2, None).path(3))
    first, second = weights
    assert all(torch.equal(first[name], second[name]) for name in first)
    return Counter(WATCH.syncs)


def _heads_run(student: str, conditioning: str) -> Counts:
    """What stands on a frozen backbone: steps, validation, a checkpoint, the export."""
    place = stories()
    settings = {**ON_GPU, "training__num_steps": 2, "model__conditioning": conditioning}
    with tempfile.TemporaryDirectory() as folder:
        run = backbone_run(place / "backbone", student, **settings)
        assert train(run, place / "own", Path(folder) / "run")
    return Counter(WATCH.syncs)


for _student, _conditioning in (("medusa", "gumbel"), ("medusa", "none"), ("drafter", "none")):
    scenario(f"training run, {_student}, {_conditioning}")(
        partial(_heads_run, _student, _conditioning)
    )


@scenario("extraction batch, hidden")
def extraction_hidden() -> Counts:
    output, head = hidden_output()
    tensors = {field.name: getattr(output, field.name).to("cuda") for field in fields(output)}
    resources = {"lm_head": head.to("cuda")}
    codec = make_codec("hidden")
    return waits_per(lambda _: to_host(dict(codec.encode(TeacherOutput(**tensors), 5, resources))))


def _verified(kind: str, sampler: str, **settings: object) -> Counts:
    model = tiny_student(kind, block_size=4 if kind == "bd3lm" else None, attention="sdpa")
    model = model.to("cuda")
    rows, ids = open_rows(model, 2).to("cuda"), torch.arange(2, device="cuda")
    noise = sampling_noise(5, ids, rows.shape[1], VOCAB, codec=model.codec)
    made = make_sampler(sampler, verifier=str(stories() / "verifier"), **settings)
    WATCH.clear()
    result = made.sample(model, rows, ids, noise, 5)
    passes = max(1.0, float(torch.as_tensor(result.details["verifier_nfe"]).float().max()))
    return Counter({place: round(n / passes, 2) for place, n in WATCH.syncs.items()})  # type: ignore[misc]


@scenario("verified pass, coupled, mdlm")
def coupled_rows() -> Counts:
    return _verified("mdlm", "coupled")


@scenario("verified pass, coupled, bd3lm")
def coupled_blocks() -> Counts:
    return _verified("bd3lm", "coupled")


@scenario("verified pass, apd")
def adaptive() -> Counts:
    return _verified("mdlm", "apd", mixture_weight=0.5)


def judge() -> JudgeModel:
    """A judge of windows of 32 tokens that reads digits, on the device."""
    place = resolve_device("auto")
    network = tiny_llama().to(place).eval()
    tokenizer = SimpleNamespace(encode=lambda text, **_: [2 + int(digit) for digit in text])
    room = Room.on(place, VOCAB, 32, 0)
    return JudgeModel("tiny", network, tokenizer, 32, 0, (0,), room=room)


def _texts(index: int) -> list[str]:
    """Seven texts of 31 to 49 digits, new ones for each index."""
    return [str(10 ** (30 + 3 * length) + index) for length in range(7)]


@scenario("judge, a batch of texts")
def judged() -> Counts:
    model = judge()
    limits = ReadingLimits(32, 16, 64)
    return waits_per(lambda index: read_texts(model, _texts(index), limits))


@scenario("judge, a batch of texts, mauve features")
def featured() -> Counts:
    model = judge()
    return waits_per(lambda index: _features(model, _texts(index)))


def _features(model: JudgeModel, texts: list[str]) -> object:
    def encode(text: str, **_: object) -> list[int]:
        return [2 + int(digit) for digit in text][:32]

    named = replace(model, tokenizer=SimpleNamespace(encode=encode))
    return text_features(named, texts, 32)


@scenario("student moved and asked for logits")
def moved() -> Counts:
    model = student().eval()
    return waits_per(lambda _: model(torch.zeros(1, 16, dtype=torch.long, device="cuda")))
