"""What a GPU run does, done on a pretended one: each scenario gives how often the host waited.

Counts per repetition leave out the first, so that what is done once (tables, first compilations,
uploads of resources) is not charged to every step. :mod:`tests.rehearsal.run` starts this in a
process with the guard preloaded.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path

import torch

from benchmarks.synthetic import synthetic_output, unigram, write_store
from pipeline.extract import to_host
from shards.codec.protocol import TeacherOutput
from shards.codec.registry import make_codec
from shards.settings import resolve
from shards.store.store import ShardStore
from tests.rehearsal.pretend_cuda import WATCH
from tests.trainer.sampling_cases import open_rows
from trainer.objective.batch import Batch, BatchMaker
from trainer.sampling.noise import sampling_noise
from trainer.sampling.registry import make_sampler
from trainer.students.configuration import StudentSettings
from trainer.students.registry import STUDENTS, Student
from trainer.training.construction import clip_gradients, make_optimizer
from trainer.training.settings import OptimizationConfig

VOCAB, LENGTH, ROWS, HIDDEN = 3000, 16, 8, 8
"""Several noise tiles wide at the block size used here, so that waits per tile would show."""
Counts = Counter[tuple[str, str]]
SCENARIOS: dict[str, Callable[[], Counts]] = {}


def scenario(name: str) -> Callable[[Callable[[], Counts]], Callable[[], Counts]]:
    def keep(work: Callable[[], Counts]) -> Callable[[], Counts]:
        SCENARIOS[name] = work
        return work

    return keep


@cache
def store(codec: str) -> ShardStore:
    """A store of synthetic rows, written on the host."""
    return write_store(Path(tempfile.mkdtemp()) / codec, codec, ROWS, LENGTH, VOCAB)


def student(kind: str = "mdlm", conditioning: str = "gumbel", **settings: object) -> Student:
    """A small student on the device."""
    block_size = 4 if kind == "bd3lm" else None
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "condition_size": 8}
    own = {"dropout": 0.1, "attention": "sdpa"}  # FlexAttention is not pretended
    kinds = {"conditioning": conditioning, "block_size": block_size}
    chosen = resolve(StudentSettings, {**shape, **own, **kinds, **settings})
    made = STUDENTS[kind]
    config = made.config_class.build(
        chosen, vocab_size=VOCAB, row_length=LENGTH, bos_token_id=0, eos_token_id=1
    )
    torch.manual_seed(0)
    model = made(config)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to("cuda")


def batches(codec: str, with_noise: bool) -> Callable[[int], Batch]:
    """Batches as the loop makes them: rows on the host, then the device."""
    opened = store(codec)
    split = opened.split("train")
    from shards.stream.stream import RowBatch

    make = BatchMaker(opened, "train", 7, torch.device("cuda"), with_noise=with_noise)
    read = split.read_rows(0, ROWS)
    arrays = {name: torch.from_numpy(value) for name, value in read.items() if name in make.arrays}
    index = torch.arange(ROWS)
    device = torch.device("cuda:0")
    rows = partial(RowBatch, arrays, index, index, ROWS)
    return lambda step: make(rows(epoch=step, step=step), step).to(device)


def waits_per(work: Callable[[int], object], repeats: int = 3) -> Counts:
    """Waits of one repetition, by place; the first one is not counted."""
    work(0)
    WATCH.clear()
    for index in range(repeats):
        work(1 + index)
    return Counter({place: -(-count // repeats) for place, count in WATCH.syncs.items()})


def _training(kind: str, conditioning: str, codec: str, **settings: object) -> Counts:
    model = student(kind, conditioning, **settings).train()
    make = batches(codec, conditioning != "none")

    def step(index: int) -> None:
        model.loss(make(index)).loss.backward()

    return waits_per(step)


@cache
def teacher_output() -> TeacherOutput:
    """What a teacher says of two rows, with hidden states; on the host."""
    output = synthetic_output(torch.arange(2), LENGTH, VOCAB)
    return replace(output, hidden=torch.zeros(2, LENGTH - 1, HIDDEN))


def _extraction(name: str) -> Counts:
    """Encoding and fetching one batch; its forward pass waits for nothing."""
    codec, output = make_codec(name), teacher_output()
    tensors = {field.name: getattr(output, field.name).to("cuda") for field in fields(output)}
    resources = {"unigram_log_probs": unigram(VOCAB).to("cuda")}
    return waits_per(lambda _: to_host(dict(codec.encode(TeacherOutput(**tensors), 5, resources))))


CODECS = ("posterior", "seeded", "topk", "quantized", "full")
for _codec in CODECS:
    scenario(f"extraction batch, {_codec}")(partial(_extraction, _codec))
for _codec in CODECS:
    scenario(f"micro-batch, mdlm, {_codec}")(partial(_training, "mdlm", "gumbel", _codec))
OTHERS = (("mdlm", "none"), ("bd3lm", "gumbel"), ("bd3lm", "none"), ("ar", "none"))
for _kind, _conditioning in OTHERS:
    _name = f"micro-batch, {_kind}, {_conditioning}"
    scenario(_name)(partial(_training, _kind, _conditioning, "posterior"))
for _count in (0, 40):
    scenario(f"micro-batch, mdlm, read again, {_count or 'all'}")(
        partial(
            _training,
            *("mdlm", "gumbel", "posterior"),
            noise={"layers": (1, 2), "top_k": _count},
        )
    )


@scenario("optimiser step")
def optimiser_step() -> Counts:
    model = student().train()
    optimizer = make_optimizer(list(model.parameters()), OptimizationConfig())
    make = batches("posterior", True)

    def step(index: int) -> None:
        model.loss(make(index)).loss.backward()
        WATCH.clear()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(0)
    step(1)
    return Counter(WATCH.syncs)


def _sampling(kind: str, sampler: str, passes: tuple[int, int], **settings: object) -> Counts:
    """Waits of one forward pass: a longer run less a shorter one, over the passes between them."""
    model = student(kind, str(settings.pop("conditioning", "gumbel"))).eval()
    counts, made = [], []
    for nfe in passes:
        chosen = dict(settings) if "nfe" not in settings else {**settings, "nfe": nfe}
        length = LENGTH if "nfe" in settings else nfe
        rows = open_rows(model, 2, length).to("cuda")
        ids = torch.arange(2, device="cuda")
        noise = None
        if model.is_conditioned:
            noise = sampling_noise(5, ids, length, VOCAB, codec=model.codec)
        WATCH.clear()
        result = make_sampler(sampler, **chosen).sample(model, rows, ids, noise, 5)
        counts.append(Counter(WATCH.syncs))
        made.append(float(torch.as_tensor(result.nfe).float().max()))
    between = max(1.0, made[1] - made[0])
    more = {place: (counts[1][place] - counts[0][place]) / between for place in counts[1]}
    return Counter({place: round(value, 2) for place, value in more.items() if value > 0})  # type: ignore[misc]


@scenario("sampling pass, ancestral, gumbel")
def ancestral_gumbel() -> Counts:
    return _sampling("mdlm", "ancestral", (4, 12), nfe=0)


@scenario("sampling pass, ancestral, none")
def ancestral_none() -> Counts:
    return _sampling("mdlm", "ancestral", (4, 12), nfe=0, conditioning="none")


@scenario("sampling pass, fixed_count")
def fixed_count() -> Counts:
    return _sampling("mdlm", "fixed_count", (4, 12), nfe=0)


@scenario("sampling pass, confidence")
def confidence() -> Counts:
    return _sampling("mdlm", "confidence", (4, 12), nfe=0)


@scenario("sampling pass, first_hitting")
def first_hitting() -> Counts:
    return _sampling("mdlm", "first_hitting", (8, 16))


@scenario("sampling pass, block")
def block() -> Counts:
    return _sampling("bd3lm", "block", (8, 16))


@scenario("sampling token, sequential")
def sequential() -> Counts:
    return _sampling("ar", "sequential", (8, 16), conditioning="none")
