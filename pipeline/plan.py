"""What an extraction would cost, said before anyone pays; nothing is written.

Tokens are counted in finished token rows, else estimated from a sample of the corpus. Bytes per
token are what each codec really writes: of some rows under the teacher, where it is small and at
hand, else of synthetic distributions over its vocabulary.
Hours follow from a rate: given, measured by an earlier run here, or a share of a machine's peak.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import stdev

import numpy as np
import torch
from jaxtyping import Float
from rich import filesize
from torch import Tensor
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from pipeline.corpus.config import CorpusConfig
from pipeline.corpus.documents import Span, Tally, plan_spans, read_span
from pipeline.extract import with_position_0
from pipeline.run import check_teacher, known_teacher, own_teacher, require_store_place
from pipeline.settings import TOKENS_RECORD, ExtractRequest, PlanOptions, Worker
from pipeline.teacher import Teacher, rows_tensor
from pipeline.tokens.dataset import TokenDataset
from pipeline.tokens.tokenizer import encode, load_tokenizer
from shards.codec.ids import unigram_log_probs
from shards.codec.protocol import Codec, TeacherOutput
from shards.codec.registry import CODECS, codec_parameters, make_codec
from shards.console import aligned
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import resolve_device
from shards.language_model.loading import PretrainedFiles, check_device_map, find_pretrained, not_causal_lm
from shards.provenance import generator
from shards.store.layout import encode_shard
from shards.store.location import open_location
from shards.store.manifest import MANIFEST_FILE, Manifest
from shards.store.store import ShardStore
from shards.stream.stream import WINDOW_BYTES

REFERENCE_TOKENS = {"OpenWebText": 9_000_000_000, "FineWeb scale": 10_000_000_000_000}
H100_FLOPS, UTILISATION = {"bfloat16": 989e12, "float32": 67e12}, 0.4
"""Peak of an H100 SXM by dtype (dense; extraction lets no TF32 in); the share of it that a forward
pass reaches."""
LARGEST_TRIED_TEACHER = 400_000_000
"""Weights of a teacher that the plan may ask about a few rows: a minute on a CPU."""
SAMPLE_ROWS = 256
OF_CORPUS = "what each codec writes for some rows of the corpus under this teacher"
SYNTHETIC = (
    "what each codec writes for synthetic distributions, like GPT-2's on web text; of simpler text"
    " (stories, V = 512) posterior and seeded write half to two thirds"
)
PRODUCT_SIZE, PRODUCT_SECONDS = 768, 0.2


@dataclass(frozen=True)
class Rate:
    """Tokens per second of one process, on what, and where the figure comes from."""

    tokens_per_second: float
    machine: str
    origin: str


@dataclass(frozen=True)
class TeacherShape:
    """What the plan needs to know of a teacher; a forward pass takes 2 FLOPs per weight a token."""

    name: str
    vocab_size: int
    hidden_size: int
    num_parameters: int


@dataclass(frozen=True)
class Plan:
    """The figures of one plan.

    Attributes:
        num_tokens: By corpus.
        token_origin: Where the figure of the corpus at hand comes from.
        bytes_per_token: By codec.
        byte_origin: Where those come from.
        rates: Of stage 2.
        stage_1: Tokens per second of the tokenizer on this machine's cores; None if not measured.
    """

    teacher: TeacherShape
    row_length: int
    num_tokens: dict[str, int]
    token_origin: str
    bytes_per_token: dict[str, float]
    byte_origin: str
    chosen_codec: str
    rates: list[Rate]
    stage_1: float | None = None
    price_per_hour: float | None = None

    def table(self) -> list[str]:
        """For people: one column per corpus."""
        amounts = self.num_tokens.values()
        rows = [["", *self.num_tokens], ["tokens", *(f"{n:,}" for n in amounts)]]
        rows.append(["rows", *(f"{-(-n // self.row_length):,}" for n in amounts)])
        for codec, size in self.bytes_per_token.items():
            label = f"{'*' if codec == self.chosen_codec else ' '}{codec} ({size:.1f} B/token)"
            rows.append([label, *(filesize.decimal(round(n * size)) for n in amounts)])
        if self.stage_1:
            hours = (_amount(n / self.stage_1 / 3600) for n in amounts)
            rows.append(["stage 1: hours of this CPU", *hours])
        for rate in self.rates:
            found = [n / rate.tokens_per_second / 3600 for n in amounts]
            rows.append([f"stage 2: hours of {rate.machine}", *map(_amount, found)])
            if (price := self.price_per_hour) is not None:
                prices = (_amount(hour * price) for hour in found)
                rows.append([f"  price at {price:g} per hour", *prices])
        return aligned(rows)

    def lines(self) -> list[str]:
        """The table with what it rests on."""
        teacher, speeds = self.teacher, []
        if self.stage_1:
            speeds.append(
                f"stage 1: {self.stage_1:,.0f} tokens/s here, measured just now; it needs no GPU:"
                " `gdistill-extract tokens` does it on a node of CPUs before the GPUs start"
            )
        speeds += [
            f"stage 2: {rate.tokens_per_second:,.0f} tokens/s of {rate.machine}, {rate.origin}" for rate in self.rates
        ]
        window = filesize.decimal(WINDOW_BYTES)
        return [
            f"teacher {teacher.name}: {teacher.num_parameters:,} parameters, "
            f"V = {teacher.vocab_size:,}, rows of {self.row_length}",
            f"tokens: {self.token_origin}",
            f"bytes: {self.byte_origin}; * is the codec asked for",
            *speeds,
            f"training: shuffling keeps at most {window} of decoded chunks in memory, over all ranks",
            "",
            *self.table(),
        ]


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def planned_teacher(request: ExtractRequest) -> PretrainedFiles | None:
    """What the teacher's small files say; None for a maze's own, which this run will train."""
    if request.settings.teacher.location is None and not own_teacher(request)[1].exists():
        return None
    return known_teacher(request)


def make_plan(request: ExtractRequest, known: PlanOptions | None = None) -> Plan:
    """Gather the figures.

    Args:
        request: What would be run.
        known: What the user knows better.

    Raises:
        UsageError: If the teacher cannot be found or does not fit.
    """
    known = known or PlanOptions()
    files, settings = planned_teacher(request), request.settings
    if files is None:
        from pipeline.maze import TOKENS, MazeTeacherConfig, demo_teacher_config

        preset = settings.teacher.preset
        config = demo_teacher_config() if preset == "demo" else MazeTeacherConfig()
        weights, width = 16 * config.num_layers * config.hidden_size**2, config.hidden_size
        shape = TeacherShape(f"maze teacher ({preset})", len(TOKENS), width, weights)
        request = request.with_row_length(None)
    else:
        num_parameters = count_parameters(files)  # first: it knows what is no language model
        request, tokenizer = check_teacher(request, files)
        shape = TeacherShape(files.name, len(tokenizer), files.hidden_size, num_parameters)
    row_length, codec = request.corpus.row_length or 0, request.codec
    sample = sample_corpus(request, files)
    num_tokens, origin = sample.num_tokens, sample.origin
    if known.tokens is not None:
        num_tokens, origin = round(known.tokens), "as given"
    own = {} if num_tokens is None else {"this corpus": num_tokens}
    codecs = [codec if name == codec.name else make_codec(name) for name in CODECS]
    scored: dict[str, float] = {}
    if files and sample.rows is not None and shape.num_parameters <= LARGEST_TRIED_TEACHER:
        with contextlib.suppress(GdistillError):  # no weights here: none are fetched for a plan
            place = settings.teacher.location or files.folder
            found = find_pretrained(place, local_files_only=True)
            dtype, size = settings.teacher.dtype, shape.vocab_size
            teacher = Teacher.load(found, dtype, "cpu", vocab_size=size)
            scored = scored_bytes_per_token(codecs, teacher, sample.rows)
    sizes = shape.vocab_size, shape.hidden_size, row_length
    synthetic = [each for each in codecs if each.name not in scored]
    measured = {each.name: measured_bytes_per_token(each, *sizes) for each in synthetic}
    return Plan(
        teacher=shape,
        row_length=row_length,
        num_tokens={**own, **REFERENCE_TOKENS},
        token_origin=origin,
        bytes_per_token={**measured, **scored},
        byte_origin=OF_CORPUS if scored else SYNTHETIC,
        chosen_codec=codec.name,
        rates=planned_rates(request, shape.num_parameters, known.rate),
        stage_1=sample.tokens_per_second,
        price_per_hour=known.price,
    )


def count_parameters(files: PretrainedFiles) -> int:
    """A model's weights, counted on one without storage.

    Raises:
        UsageError: If it is no causal language model.
        GdistillError: If it cannot be made, for another reason of its own.
    """
    try:
        with torch.device("meta"):
            trusted = {"trust_remote_code": files.trust_remote_code}
            model = AutoModelForCausalLM.from_config(files.config, **trusted)
    except Exception as error:  # transformers lets errors of many libraries through
        raise not_causal_lm(files, error) from error
    return sum(parameter.numel() for parameter in model.parameters())


# Tokens per second of one process.


def planned_rates(request: ExtractRequest, num_parameters: int, given: float | None = None) -> list[Rate]:
    """The given rate, or that of an earlier run in this folder, or what machines could reach.

    A machine without a GPU is one on which runs are planned and one on which they run: where the
    device is not named, both are given.

    Raises:
        GdistillError: If an earlier run's figures are there and cannot be read.
    """
    if given is not None:
        return [Rate(given, "one process", "as given")]
    file = request.out / "summary.json"
    if file.exists():
        try:
            rate = float(json.loads(file.read_text(encoding="utf-8"))["tokens_per_second"])
            PlanOptions(rate=rate)  # refuses what is no rate
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            what, remedy = "cannot read an earlier run's rate", "remove the file, or give --rate"
            raise GdistillError(what, where=file, got=error, remedy=remedy) from error
        return [Rate(rate, "one process", f"measured by the run in {request.out}")]
    flops, dtype = 2 * num_parameters, request.settings.teacher.dtype
    device, rates = request.settings.device, []
    if device != "cpu":
        share = f"assumed: {UTILISATION:.0%} of its peak in {dtype}; small teachers reach less"
        rates.append(Rate(UTILISATION * H100_FLOPS[dtype] / flops, "one H100", share))
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        share = f"{UTILISATION:.0%} of a product of matrices in {dtype}, measured just now"
        known = {"matrix": torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=getattr(torch, dtype))}
        timer = Timer("matrix.mm(matrix)", globals=known, num_threads=torch.get_num_threads())
        seconds = timer.blocked_autorange(min_run_time=PRODUCT_SECONDS).mean
        speed = UTILISATION * 2 * PRODUCT_SIZE**3 / seconds / flops
        rates.append(Rate(speed, "this CPU", share))
    return rates


# Tokens of the corpus at hand: given, counted in finished rows, or estimated from a sample.


SAMPLE_BLOCKS, BLOCK_DOCUMENTS = 16, 32
STANDARD_ERRORS = 2.13
"""Half of a 95% interval, by Student's t for 15 degrees of freedom."""
DOCUMENT_CHARACTERS = 1 << 18
"""Of a longer document only so much is tokenized, from its beginning."""


@dataclass(frozen=True)
class Estimate:
    """Tokens of one span, from a sample of its documents.

    Attributes:
        num_documents: All of the span.
        blocks: Tokens that each sampled document puts into rows, by block of neighbours.
        ids: Token ids of the sampled documents.
    """

    num_documents: int
    blocks: list[list[float]]
    ids: list[np.ndarray]

    @property
    def num_sampled(self) -> int:
        return sum(map(len, self.blocks))

    @property
    def num_tokens(self) -> float:
        return self.num_documents * sum(map(sum, self.blocks)) / max(1, self.num_sampled)

    @property
    def standard_error(self) -> float:
        """Of ``num_tokens``, from the means of blocks: neighbours are alike. 0 if all were read."""
        if len(self.blocks) < 2 or self.num_sampled >= self.num_documents:
            return 0.0
        means = [sum(block) / len(block) for block in self.blocks]
        unseen = 1 - self.num_sampled / self.num_documents
        return self.num_documents * stdev(means) * math.sqrt(unseen / len(means))


@dataclass(frozen=True)
class CorpusSample:
    """What was seen of the corpus at hand.

    Attributes:
        num_tokens: That a run would store; None if it is not known.
        origin: Where the figure comes from.
        tokens_per_second: Of the tokenizer on this machine; None if nothing was tokenized.
        rows: Some rows, [n, L] int32; None without a tokenizer.
    """

    num_tokens: int | None
    origin: str
    tokens_per_second: float | None = None
    rows: np.ndarray | None = None


def sample_corpus(request: ExtractRequest, files: PretrainedFiles | None) -> CorpusSample:
    """Count the corpus at hand, or estimate it.

    Args:
        request: With its row length settled.
        files: The teacher's, for its tokenizer; None for a maze.
    """
    try:
        if not (request.out / TOKENS_RECORD).is_file():
            return _estimated(request, files)
        dataset = TokenDataset.open(request.out / "tokens")
        rows = (request.stored_rows(name, dataset.num_rows(name)) for name in dataset.splits)
        split = next(name for name in dataset.splits if dataset.num_rows(name))
        first = dataset.read_rows(split, 0, min(SAMPLE_ROWS, dataset.num_rows(split)))
        found = sum(rows) * dataset.row_length
        return CorpusSample(found, f"counted in {dataset.path}", rows=first)
    except GdistillError as error:
        reason = f"the corpus cannot be read here ({error}); give --tokens for its own column"
        return CorpusSample(None, reason)


def _estimated(request: ExtractRequest, files: PretrainedFiles | None) -> CorpusSample:
    spans = [span for span in plan_spans(request.corpus) if span.stop > span.start]
    source = request.settings.teacher.tokenizer or (files.folder if files else None)
    length = request.corpus.row_length or 0
    if source is None:
        rows = (request.stored_rows(span.split, span.stop - span.start) for span in spans)
        return CorpusSample(sum(rows) * length, "one row a document")
    tokenizer, started = load_tokenizer(source), time.perf_counter()
    found = [estimate(span, request.corpus, tokenizer) for span in spans]
    seconds, tokens = time.perf_counter() - started, 0.0
    for span, each in zip(spans, found, strict=True):
        rows = request.stored_rows(span.split, math.ceil(each.num_tokens / length))
        tokens += rows * length if span.split in request.row_limits else each.num_tokens
    ids = np.concatenate([ids for each in found for ids in each.ids])
    error = math.hypot(*(each.standard_error for each in found))
    sampled, documents = sum(e.num_sampled for e in found), sum(e.num_documents for e in found)
    share = f" +- {STANDARD_ERRORS * error / tokens:.1%}" if error and tokens else ""
    return CorpusSample(
        round(tokens),
        f"estimated{share} from {sampled:,} of {documents:,} documents",
        len(ids) / seconds if len(ids) else None,
        ids[: len(ids) // length * length].reshape(-1, length) if len(ids) >= length else None,
    )


def estimate(span: Span, config: CorpusConfig, tokenizer: PreTrainedTokenizerBase) -> Estimate:
    """Tokens of a span's rows, from blocks of documents spread evenly over it."""
    row_length = config.row_length or 0
    separate = config.separate_train if span.split == "train" else config.separate_validation
    frame = row_length / (row_length - 2) if config.packing == "wrap" else 1.0
    blocks, kept = [], []
    for texts in _sample(span, config):
        heads = [text[:DOCUMENT_CHARACTERS] for text in texts]
        ids = encode(tokenizer, heads, config.special_tokens)
        cut = [max(1.0, len(text) / DOCUMENT_CHARACTERS) for text in texts]
        sizes = [frame * (separate + len(i) * c) for i, c in zip(ids, cut, strict=True)]
        blocks.append([float(row_length)] * len(ids) if config.packing == "pad" else sizes)
        kept += ids
    return Estimate(span.stop - span.start, blocks, kept)


def _sample(span: Span, config: CorpusConfig) -> Iterator[list[str]]:
    """Texts of the sample's blocks; a document that is left out counts as empty."""
    count = span.stop - span.start
    starts, length = [span.start], count
    if count > SAMPLE_BLOCKS * BLOCK_DOCUMENTS:
        step = (count - BLOCK_DOCUMENTS) / (SAMPLE_BLOCKS - 1)
        starts = [span.start + round(block * step) for block in range(SAMPLE_BLOCKS)]
        length = BLOCK_DOCUMENTS
    for start in starts:
        stop = start + length
        block = span if stop == span.stop else replace(span, stop=stop, end=1.0)
        found = dict(read_span(block, config, Tally(), start))
        yield [found.get(number, "") for number in range(start, stop)]


# Bytes per token that a codec really writes, measured on synthetic distributions.


NUM_POSITIONS, LARGEST_FLOATS = 512, 1 << 25
HEAD_VOCABULARY = 512
# log(s - 1) ~ N(-0.3, 0.7) and log a ~ N(-0.8, 1) give, at V = 50,257, a mean entropy of 3.0 nats
# (GPT-2's on web text) and a mean mass of the 64 most probable tokens of 0.90.
LOG_EXPONENT, LOG_OFFSET, ZIPF_OFFSET = (-0.3, 0.7), (-0.8, 1.0), 2.7


def power_laws(num: int, unigram: Float[Tensor, "v"], draws: torch.Generator) -> Float[Tensor, "n v"]:
    """Log-probabilities of ``num`` positions, float32, nats: p_r ~ (r + a)^-s, s and a drawn.

    Ranks go to ids in the order of log u_j + Gumbel noise, with u the unigram.
    """
    exponent = 1 + (LOG_EXPONENT[0] + LOG_EXPONENT[1] * torch.randn(num, 1, generator=draws)).exp()
    offset = (LOG_OFFSET[0] + LOG_OFFSET[1] * torch.randn(num, 1, generator=draws)).exp()
    ranks = torch.arange(1, len(unigram) + 1)
    law = (-exponent * (ranks + offset).log()).log_softmax(-1)
    keys = unigram - torch.empty(num, len(unigram)).exponential_(generator=draws).log()
    return torch.empty_like(law).scatter_(1, keys.argsort(dim=1, descending=True), law)


def measured_bytes_per_token(codec: Codec, vocab_size: int, hidden_size: int, row_length: int) -> float:
    """Compressed bytes per token, id and log-probability included; resources are left out."""
    if codec.needs_hidden:
        # The bytes of a hidden state do not depend on V; a small head keeps the plan quick.
        vocab_size = min(vocab_size, HEAD_VOCABULARY)
    positions = max(16, min(NUM_POSITIONS, LARGEST_FLOATS // vocab_size))
    tokens = min(row_length, positions + 1) - 1
    rows = max(1, positions // tokens)
    draws, hidden = generator(0, "plan"), None
    # A Zipf-Mandelbrot unigram, in random order; nats.
    zipf = -(torch.arange(vocab_size, dtype=torch.float64) + ZIPF_OFFSET).log()
    unigram = zipf.log_softmax(0).float()[torch.randperm(vocab_size, generator=draws)]
    resources = {"unigram_log_probs": unigram}
    if codec.needs_hidden:
        hidden = torch.randn(rows, tokens, hidden_size, generator=draws)
        head = torch.randn(vocab_size, hidden_size, generator=draws) * 3 / math.sqrt(hidden_size)
        resources["lm_head"] = head
        log_probs = (hidden @ head.T).log_softmax(-1)
    else:
        log_probs = power_laws(rows * tokens, unigram, draws).view(rows, tokens, vocab_size)
    chosen = torch.multinomial(log_probs.flatten(0, 1).exp(), 1, generator=draws)
    output = TeacherOutput(log_probs, chosen.view(rows, tokens), torch.arange(rows), hidden)
    return _stored_bytes(codec, output, resources)


def scored_bytes_per_token(codecs: list[Codec], teacher: Teacher, rows: np.ndarray) -> dict[str, float]:
    """The same for what the teacher says of the corpus's own rows [n, L], by codec."""
    num_rows, length, vocab_size = *rows.shape, teacher.vocab_size
    unigram = unigram_log_probs(lambda i, j: rows[i:j], num_rows, length, vocab_size, num_rows)
    resources = {"unigram_log_probs": torch.from_numpy(unigram)}
    few = max(1, min(8 * NUM_POSITIONS, LARGEST_FLOATS // vocab_size) // length)
    part = rows_tensor(rows[:: max(1, num_rows // few)][:few])
    needs_hidden = any(codec.needs_hidden for codec in codecs) and teacher.head is not None
    if needs_hidden:
        weight, bias = teacher.lm_head
        zeros = torch.zeros(len(weight))
        resources |= {"lm_head": weight, "lm_head_bias": zeros if bias is None else bias}
    output = teacher.output(part, torch.arange(len(part)), needs_hidden)
    usable = [codec for codec in codecs if needs_hidden or not codec.needs_hidden]
    return {codec.name: _stored_bytes(codec, output, resources) for codec in usable}


def _stored_bytes(codec: Codec, output: TeacherOutput, resources: dict[str, Tensor]) -> float:
    """Of a store of one shard of one chunk."""
    rows, tokens, vocab_size = output.log_probs.shape
    hidden_size = None if output.hidden is None else output.hidden.shape[-1]
    encoded = dict(codec.encode(output, 0, resources))
    encoded |= {"token_log_probs": output.token_log_probs, "tokens": output.tokens.int()}
    manifest = Manifest(
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(vocab_size, hidden_size),
        vocab_size=vocab_size,
        row_length=tokens + 1,
        splits={"train": rows},
        rows_per_shard=rows,
        rows_per_chunk=rows,
        seed=0,
        teacher={},
        tokenizer={},
        tokens={},
        versions={},
    )
    arrays = {name: with_position_0(tensor) for name, tensor in encoded.items()}
    files = encode_shard(manifest, manifest.shard("train", 0), arrays)
    return sum(map(len, files.values())) / (rows * tokens)


# What a run would do, found out without writing a byte.


def what_would_be_done(request: ExtractRequest, worker: Worker) -> list[str]:
    """The resolved settings and the state of every step.

    Raises:
        UsageError: If the run would be refused before its first stage: by the same checks.
    """
    device = resolve_device(worker.device(request.settings.device))
    require_store_place(request.store)
    check_device_map(request.settings.teacher.device_map)
    teacher = planned_teacher(request)
    if teacher is not None:
        request, _ = check_teacher(request, teacher)
    stage_1 = f"would tokenize {request.corpus.source} into {request.out / 'tokens'}"
    if (request.out / TOKENS_RECORD).is_file():
        dataset = TokenDataset.open(request.out / "tokens")
        rows = ", ".join(f"{dataset.num_rows(split):,} {split}" for split in dataset.splits)
        stage_1 = f"done: {rows} rows of {dataset.row_length}"
    stage_2 = f"would write {request.store}"
    if open_location(request.store).size(MANIFEST_FILE) is not None:
        left = len(ShardStore.open(request.store, allow_incomplete=True).unfinished())
        stage_2 = f"would write {left} shards that are not done" if left else "done"
    return [
        json.dumps(request.to_mapping(), indent=2, sort_keys=True),
        f"device    {device}, worker {worker.index} of {worker.count}",
        f"teacher   {request.settings.teacher.location or 'trained on the spot'}",
        f"stage 1   {stage_1}",
        f"stage 2   {stage_2}",
        "nothing was written",
    ]
