"""What a GPU run does, done on a pretended one: each scenario gives how often the host waited.

Counts of a step, a pass or a batch leave out the first repetition, so that what is done once
(tables, first compilations, uploads of resources) is not charged to every one. Of a whole training
run, with validation, a checkpoint and the export, all is counted: what matters is that it runs, on
one device. :mod:`tests.rehearsal.run` starts this in a process with the guard preloaded.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.synthetic import batch_reader, synthetic_output, unigram
from benchmarks.synthetic import write_store as write_synthetic
from evaluation.likelihood.validation import NoiseSource, validation_perplexity
from evaluation.samples import read_data_rows
from evaluation.text.mauve_divergence import text_features
from evaluation.text.reading import JudgeModel, Judging
from pipeline.extract import to_host
from shards.codec.protocol import TeacherOutput, make_codec
from shards.language_model.forward import BatchSize, resolve_device
from shards.settings import resolve
from shards.store.store import ShardStore
from tests.rehearsal.pretend_cuda import WAITS, pretend_cuda
from tests.trainer.backbone_cases import backbone_run, store_of, write_backbone
from tests.trainer.run_cases import tiny_run, write_store
from tests.trainer.sampling_cases import VOCAB as SMALL
from tests.trainer.sampling_cases import open_rows, tiny_llama, tiny_student
from trainer.sampling.noise import sampling_noise
from trainer.sampling.registry import make_sampler
from trainer.students.configuration import StudentSettings
from trainer.students.registry import STUDENTS, Student
from trainer.training.checkpoint import CheckpointFolder, clip_gradients, make_optimizer
from trainer.training.loop import train
from trainer.training.settings import CHECKPOINTS, OptimizationConfig

VOCAB, LENGTH, ROWS, HIDDEN = 3000, 16, 8, 8
"""Several noise tiles wide at the block size used here, so that waits per tile would show."""
CODECS = ("posterior", "seeded", "topk", "quantized", "full")
Counts = Counter[tuple[str, str]]


# What the pretended device must count and refuse.


def kinds(work: Callable[[], object]) -> list[str]:
    WAITS.clear()
    work()
    return [kind for (kind, _), count in WAITS.items() for _ in range(count)]


def refused(work: Callable[[], object], why: str = "one device") -> bool:
    try:
        work()
    except RuntimeError as error:
        return why in str(error)
    return False


def self_check() -> Counts:
    with pretend_cuda():
        x = torch.arange(6.0, device="cuda").view(2, 3)
        host, mask = torch.ones(2, 3), x > 2
        assert x.is_cuda and x.device == torch.device("cuda:0") and (x + 1).is_cuda
        assert refused(lambda: x + host) and not refused(lambda: x + torch.tensor(2.0))
        assert kinds(lambda: x.sum().item()) == ["item"]
        assert kinds(lambda: x.tolist()) == ["tolist"]
        assert kinds(lambda: x.cpu()) == ["copy to the host"]
        assert kinds(lambda: x.to("cpu", non_blocking=True)) == []
        assert kinds(lambda: host.to("cuda")) == ["copy to the device"]
        assert kinds(lambda: host.to("cuda", non_blocking=True)) == []
        assert kinds(lambda: mask.nonzero()) == ["nonzero"]
        assert kinds(lambda: x[mask]) == ["indexing by a mask"]
        assert kinds(lambda: x.masked_fill(mask, 0.0)) == []
        assert kinds(lambda: x[torch.tensor([0])]) == ["index from the host"]
        assert kinds(lambda: x.softmax(-1).argmax(-1)) == []
        with torch.inference_mode():
            assert kinds(lambda: torch.where(mask, x, 0.0).cumsum(0)) == []
        weight = torch.ones(3, device="cuda", requires_grad=True)
        (x * weight).sum().backward()
        assert weight.grad is not None and weight.grad.is_cuda
        assert weight.grad.tolist() == [3.0, 5.0, 7.0]
    assert not torch.zeros(1).is_cuda
    with pretend_cuda():  # reading too early, and memory that would be given away too early
        side, use = torch.cuda.Stream(), torch.cuda.current_stream()
        with torch.cuda.stream(side):
            x = torch.ones(5, 3).to("cuda", non_blocking=True)
            copied = side.record_event()
            later = x + 1
        early = partial(refused, why="another stream")
        assert early(lambda: x.view(-1) * 2)
        use.wait_event(copied)
        assert not early(lambda: x.view(-1) * 2) and early(lambda: later * 2)
        use.wait_stream(side)
        assert not early(lambda: later * 2)
        x.record_stream(use)
        later.record_stream(use)
        x.add_(1)
        with torch.cuda.stream(side):
            assert early(lambda: x * 2)

    def lent() -> None:
        with pretend_cuda():
            y = torch.zeros(7, device="cuda")
            side.wait_stream(use)
            with torch.cuda.stream(side):
                y.sum()

    assert refused(lent, "not recorded"), "memory was lent without a record"
    return Counter()


# What is made on the host, before the pretence begins.


@cache
def store(codec: str) -> ShardStore:
    return write_synthetic(Path(tempfile.mkdtemp()) / codec, codec, ROWS, LENGTH, VOCAB)


@cache
def teacher_output(codec: str) -> tuple[TeacherOutput, dict[str, torch.Tensor]]:
    """What a teacher says of two rows, and a codec's resources; ``hidden`` wants W h and W."""
    if codec != "hidden":
        output = synthetic_output(torch.arange(2), LENGTH, VOCAB)
        hidden = torch.zeros(2, LENGTH - 1, HIDDEN)
        return replace(output, hidden=hidden), {"unigram_log_probs": unigram(VOCAB)}
    generator = torch.Generator().manual_seed(3)
    head = torch.randn(300, HIDDEN, generator=generator)
    hidden = torch.randn(2, LENGTH - 1, HIDDEN, generator=generator)
    log_probs = (hidden @ head.T).log_softmax(-1)
    tokens, rows = log_probs.argmax(-1), torch.arange(2)
    return TeacherOutput(log_probs, tokens, rows, hidden), {"lm_head": head}


@cache
def stories() -> Path:
    """A store, and beside it a verifier of the same vocabulary and a backbone with its store."""
    folder = Path(tempfile.mkdtemp())
    tiny_llama().save_pretrained(folder / "verifier")
    write_store(folder / "store", vocab_size=SMALL)
    store_of(folder / "own", write_backbone(folder / "backbone"))
    return folder


# Steps, batches and passes.


def student(kind: str = "mdlm", conditioning: str = "gumbel", **settings: object) -> Student:
    """A small student on the device."""
    own = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "condition_size": 8}
    own |= {"dropout": 0.1, "attention": "sdpa"}  # FlexAttention is not pretended
    own |= {"conditioning": conditioning, "block_size": 4 if kind == "bd3lm" else None}
    chosen = resolve(StudentSettings, {**own, **settings})
    sizes = {"vocab_size": VOCAB, "row_length": LENGTH, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    model = STUDENTS[kind](STUDENTS[kind].config_class.build(chosen, **sizes))
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to("cuda")


def waits_per(work: Callable[[int], object], repeats: int = 3) -> Counts:
    """Waits of one repetition, by place; the first one is not counted."""
    work(0)
    WAITS.clear()
    for index in range(repeats):
        work(1 + index)
    return Counter({place: -(-count // repeats) for place, count in WAITS.items()})


def micro_batch(kind: str, conditioning: str, codec: str, **settings: object) -> Counts:
    """Rows of the host to the device, forward and backward."""
    model = student(kind, conditioning, **settings).train()
    read = batch_reader(store(codec), ROWS, torch.device("cuda"), conditioning != "none")
    return waits_per(lambda index: model.loss(read(index)).loss.backward())


def optimiser_step() -> Counts:
    model = student().train()
    optimizer = make_optimizer(list(model.parameters()), OptimizationConfig())
    read = batch_reader(store("posterior"), ROWS, torch.device("cuda"))
    for index in range(2):
        model.loss(read(index)).loss.backward()
        WAITS.clear()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return Counter(WAITS)


def extraction(name: str) -> Counts:
    """Encoding and fetching one batch; its forward pass waits for nothing."""
    codec, (output, resources) = make_codec(name), teacher_output(name)
    tensors = {field.name: getattr(output, field.name).to("cuda") for field in fields(output)}
    given = {key: value.to("cuda") for key, value in resources.items()}
    return waits_per(lambda _: to_host(dict(codec.encode(TeacherOutput(**tensors), 5, given))))


def sampling(sampler: str, kind: str, conditioning: str, passes: tuple[int, int]) -> Counts:
    """Waits of one forward pass: a longer run less a shorter one, over the passes between them."""
    model = student(kind, conditioning).eval()
    counts, made = [], []
    for number in passes:
        takes_nfe = sampler in ("ancestral", "fixed_count", "confidence")
        length, nfe = (LENGTH, {"nfe": number}) if takes_nfe else (number, {})
        rows, ids = open_rows(model, 2, length).to("cuda"), torch.arange(2, device="cuda")
        noise = None
        if model.is_conditioned:
            noise = sampling_noise(5, ids, length, VOCAB, codec=model.codec)
        WAITS.clear()
        result = make_sampler(sampler, **nfe).sample(model, rows, ids, noise, 5)
        counts.append(Counter(WAITS))
        made.append(float(torch.as_tensor(result.nfe).float().max()))
    between = max(1.0, made[1] - made[0])
    more = {place: (counts[1][place] - counts[0][place]) / between for place in counts[1]}
    return Counter({place: round(value, 2) for place, value in more.items() if value > 0})  # type: ignore[misc]


# Whole trainings.


ON_GPU = {
    "training__device": "cuda",
    "training__micro_batch_size": 3,
    "training__noise_kernel": "eager",
    "training__validate_every_steps": 2,
}
BLOCKS = {"student": "bd3lm", "model__block_size": 4, "model__attention": "sdpa"}
RUNS: dict[str, dict[str, Any]] = {
    "mdlm, the compiled kernel tried": {"training__noise_kernel": "auto"},
    "mdlm, bf16": {"training__precision": "bf16"},
    "bd3lm": BLOCKS,
    "bd3lm, search for clips": {**BLOCKS, "model__diffusion__search_schedule": "true"},
    "ar": {"student": "ar", "model__conditioning": "none"},
    "mdlm, cross-attention": {"model__noise__layers": [1]},
    "mdlm, cross-attention, top 3": {"model__noise__layers": [1], "model__noise__top_k": 3},
    "mdlm, token-level distillation": {"model__kd__kind": "token"},
}


def training_run(settings: dict[str, Any]) -> Counts:
    """Steps, validation, a checkpoint; the same command again, from it, to the export."""
    prolonged = "model__diffusion__search_schedule" not in settings
    with tempfile.TemporaryDirectory() as folder:
        for num_steps in (2, 2 + prolonged):
            run = tiny_run(**{**ON_GPU, "training__num_steps": num_steps, **settings})
            assert train(run, stories() / "store", Path(folder) / "run")
        assert (Path(folder) / "run/model/model.safetensors").is_file()
    return Counter(WAITS)


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
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    return Counter(WAITS)


def heads_run(student: str, conditioning: str) -> Counts:
    """What stands on a frozen backbone: steps, validation, a checkpoint, the export."""
    settings = {**ON_GPU, "training__num_steps": 2, "model__conditioning": conditioning}
    with tempfile.TemporaryDirectory() as folder:
        run = backbone_run(stories() / "backbone", student, **settings)
        assert train(run, stories() / "own", Path(folder) / "run")
    return Counter(WAITS)


# Verified decoding, and the judge.


def verified(kind: str, sampler: str, **settings: object) -> Counts:
    model = tiny_student(kind, block_size=4 if kind == "bd3lm" else None, attention="sdpa")
    model = model.to("cuda")
    rows, ids = open_rows(model, 2).to("cuda"), torch.arange(2, device="cuda")
    noise = sampling_noise(5, ids, rows.shape[1], SMALL, codec=model.codec)
    made = make_sampler(sampler, verifier=str(stories() / "verifier"), **settings)
    WAITS.clear()
    result = made.sample(model, rows, ids, noise, 5)
    passes = max(1.0, float(torch.as_tensor(result.details["verifier_nfe"]).float().max()))
    return Counter({place: round(n / passes, 2) for place, n in WAITS.items()})  # type: ignore[misc]


def judge(features: bool) -> Counts:
    """Batches of seven texts of 31 to 49 digits, read in windows of 32 tokens."""
    place = resolve_device("auto")
    most = 32 if features else None
    words = SimpleNamespace(encode=lambda text, **_: [2 + int(digit) for digit in text][:most])
    model = JudgeModel("tiny", tiny_llama().to(place).eval(), words, 32, 0, (0,), size=BatchSize(7))

    def read(index: int) -> object:
        texts = [str(10 ** (30 + 3 * length) + index) for length in range(7)]
        if features:
            return text_features(model, texts, 32)
        return Judging.of(model, max_tokens=64).read(texts)

    return waits_per(read)


def perplexity(noise: NoiseSource) -> Counts:
    place, model = Path(store("posterior").location.url), student().eval()
    how: dict[str, Any] = {"noise": noise, "store": place, "split": "train", "batch_size": 2}
    return waits_per(lambda _: validation_perplexity(model, read_data_rows(place, "train", 4), **how))


def moved() -> Counts:
    model = student().eval()
    return waits_per(lambda _: model(torch.zeros(1, 16, dtype=torch.long, device="cuda")))


PAIRS = (("mdlm", "none"), ("bd3lm", "gumbel"), ("bd3lm", "none"), ("ar", "none"))
HEADS = (("medusa", "gumbel"), ("medusa", "none"), ("drafter", "none"))
WHOLE_ROW = (("ancestral", "gumbel"), ("ancestral", "none"), ("fixed_count", "gumbel"))
BY_PASSES = {
    **{f"{name}, {noise}": (name, "mdlm", noise, (4, 12)) for name, noise in WHOLE_ROW},
    "confidence, gumbel": ("confidence", "mdlm", "gumbel", (4, 12)),
    "first_hitting": ("first_hitting", "mdlm", "gumbel", (8, 16)),
    "block": ("block", "bd3lm", "gumbel", (8, 16)),
}
MDLM = partial(micro_batch, "mdlm", "gumbel")
CROSS = partial(MDLM, "posterior")
SCENARIOS: dict[str, Callable[[], Counts]] = {
    "the pretence itself": self_check,
    **{f"extraction batch, {name}": partial(extraction, name) for name in (*CODECS, "hidden")},
    **{f"micro-batch, mdlm, {name}": partial(MDLM, name) for name in CODECS},
    **{f"micro-batch, {', '.join(p)}": partial(micro_batch, *p, "posterior") for p in PAIRS},
    "micro-batch, cross-attention, all": partial(CROSS, noise={"layers": (1, 2), "top_k": 0}),
    "micro-batch, cross-attention, 40": partial(CROSS, noise={"layers": (1, 2), "top_k": 40}),
    "optimiser step": optimiser_step,
    **{f"sampling pass, {name}": partial(sampling, *given) for name, given in BY_PASSES.items()},
    "sampling token, sequential": partial(sampling, "sequential", "ar", "none", (8, 16)),
    **{f"training run, {name}": partial(training_run, given) for name, given in RUNS.items()},
    "training run, resumed as if whole": resumed,
    **{f"training run, {', '.join(pair)}": partial(heads_run, *pair) for pair in HEADS},
    "verified pass, coupled, mdlm": partial(verified, "mdlm", "coupled"),
    "verified pass, coupled, bd3lm": partial(verified, "bd3lm", "coupled"),
    "verified pass, apd": partial(verified, "mdlm", "apd", mixture_weight=0.5),
    "judge, a batch of texts": partial(judge, False),
    "judge, a batch of texts, mauve features": partial(judge, True),
    **{f"perplexity, {noise} noise": partial(perplexity, noise) for noise in ("posterior", "prior")},
    "student moved and asked for logits": moved,
}


def main(names: list[str]) -> None:
    """A JSON line a scenario: its waits by place, or the error that ended it."""
    for codec in CODECS:
        store(codec)
        teacher_output(codec)
    teacher_output("hidden")
    stories()
    for name in names or list(SCENARIOS):
        record: dict[str, object] = {"scenario": name}
        try:
            with nullcontext() if SCENARIOS[name] is self_check else pretend_cuda():
                counts = SCENARIOS[name]()
            record["waits"] = sum(counts.values())
            record["places"] = {f"{kind} at {place}": n for (kind, place), n in counts.items()}
        except Exception:
            record["error"] = traceback.format_exc(limit=-6)
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
