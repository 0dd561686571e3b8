"""Tokens per second of one process: given, measured, or a share of what a machine can do."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import stdev

import torch
from rich import filesize
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from pipeline.corpus.config import CorpusConfig, Tally
from pipeline.corpus.splits import Span, plan_spans, read_span
from pipeline.extract.scores import with_position_0
from pipeline.inputs import check_teacher, known_teacher, require_store_place
from pipeline.maze.teacher import MazeTeacherConfig, demo_teacher_config
from pipeline.settings import ExtractRequest, PlanOptions
from pipeline.tokens.dataset import RECORD, TokenDataset
from pipeline.tokens.tokenizer import encode, load_tokenizer
from pipeline.workers import Worker
from shards.codec.protocol import Codec, TeacherOutput
from shards.codec.registry import CODECS, codec_parameters, make_codec
from shards.console import aligned
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import resolve_device
from shards.language_model.loading import PretrainedFiles, not_causal_lm
from shards.language_model.spread import Spread
from shards.provenance import generator
from shards.store.layout import encode_shard, shard_ranges
from shards.store.location import open_location
from shards.store.manifest import MANIFEST_FILE, Manifest
from shards.store.store import ShardStore
from shards.stream.order import WINDOW_BYTES

H100_FLOPS, UTILISATION = 989e12, 0.4
"""Peak of an H100 SXM in dense bf16; the share that a forward pass reaches of a peak."""
PRODUCT_SIZE, PRODUCT_SECONDS = 768, 0.2


@dataclass(frozen=True)
class Rate:
    """Tokens per second of one process, on what, and where the figure comes from."""

    tokens_per_second: float
    machine: str
    origin: str

    def line(self) -> str:
        """For people."""
        return f"{self.tokens_per_second:,.0f} tokens/s of {self.machine}, {self.origin}"


def planned_rates(
    request: ExtractRequest, num_parameters: int, given: float | None = None
) -> list[Rate]:
    """The given rate, or that of an earlier run in this folder, or what machines could reach.

    A machine without a GPU is one on which runs are planned and one on which they run: where the
    device is not named, both are told.

    Raises:
        GdistillError: If an earlier run's figures are there and cannot be read.
    """
    if given is not None:
        return [Rate(given, "one process", "as given")]
    if (request.out / "summary.json").exists():
        return [_measured(request)]
    flops = 2 * num_parameters
    device = request.settings.device
    here = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    rates = []
    if device != "cpu":
        share = f"assumed: {UTILISATION:.0%} of its peak in bf16; small teachers reach less"
        rates.append(Rate(UTILISATION * H100_FLOPS / flops, "one H100", share))
    if here:
        share = f"{UTILISATION:.0%} of a product of matrices, measured just now"
        rates.append(Rate(UTILISATION * _cpu_flops() / flops, "this CPU", share))
    return rates


def _measured(request: ExtractRequest) -> Rate:
    file = request.out / "summary.json"
    try:
        rate = float(json.loads(file.read_text(encoding="utf-8"))["tokens_per_second"])
        PlanOptions(rate=rate)  # refuses what is no rate
    except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
        remedy = "remove the file, or give --rate"
        raise GdistillError(
            "cannot read an earlier run's rate", where=file, got=error, remedy=remedy
        ) from error
    return Rate(rate, "one process", f"measured by the run in {request.out}")


def _cpu_flops() -> float:
    """Operations per second of a float32 product on all of this process's threads."""
    matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
    torch.mm(matrix, matrix)  # the first one starts the threads
    started, products = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < PRODUCT_SECONDS or not products:
        torch.mm(matrix, matrix)
        products += 1
    return products * 2 * PRODUCT_SIZE**3 / seconds


# Tokens of the corpus at hand: given, counted in finished rows, or estimated from a sample.


SAMPLE_BLOCKS, BLOCK_DOCUMENTS = 8, 32
DOCUMENT_CHARACTERS = 1 << 18
"""Of a longer document only so much is tokenized, from its beginning."""


@dataclass(frozen=True)
class Estimate:
    """Tokens of one span, from a sample of its documents.

    Attributes:
        num_documents: All of the span.
        lengths: Tokens that each sampled one puts into rows.
    """

    num_documents: int
    lengths: list[float]

    @property
    def num_tokens(self) -> float:
        return self.num_documents * sum(self.lengths) / max(1, len(self.lengths))

    @property
    def standard_error(self) -> float:
        """Of ``num_tokens``; 0 if every document was looked at."""
        sampled = len(self.lengths)
        if sampled < 2 or sampled >= self.num_documents:
            return 0.0
        unseen = 1 - sampled / self.num_documents
        return self.num_documents * stdev(self.lengths) * math.sqrt(unseen / sampled)


def corpus_tokens(
    request: ExtractRequest, files: PretrainedFiles | None, given: int | None
) -> tuple[int | None, str]:
    """Tokens that a run would store and where the figure comes from; None if it cannot be told.

    Args:
        request: With its row length settled.
        files: The teacher's, for its tokenizer; None for a maze.
        given: The user's own figure for the corpus.
    """
    if given is not None:
        return given, "as given"
    tokens = request.out / "tokens"
    if (tokens / RECORD).is_file():
        dataset = TokenDataset.open(tokens)
        rows = (request.stored_rows(name, dataset.num_rows(name)) for name in dataset.splits)
        return sum(rows) * dataset.row_length, f"counted in {tokens}"
    try:
        return _estimated(request, files)
    except GdistillError as error:
        return None, f"the corpus cannot be read here ({error}); give --tokens for its own column"


def _estimated(request: ExtractRequest, files: PretrainedFiles | None) -> tuple[int, str]:
    spans = [span for span in plan_spans(request.corpus) if span.stop > span.start]
    source = request.settings.teacher.tokenizer or (files.folder if files else None)
    length = request.corpus.row_length or 0
    if source is None:
        rows = (request.stored_rows(span.split, span.stop - span.start) for span in spans)
        return sum(rows) * length, "one row a document"
    tokenizer = load_tokenizer(source)
    estimates = {span.split: estimate(span, request.corpus, tokenizer) for span in spans}
    tokens = 0.0
    for split, found in estimates.items():
        limited = split in request.row_limits
        rows = request.stored_rows(split, math.ceil(found.num_tokens / length))
        tokens += rows * length if limited else found.num_tokens
    error = math.hypot(*(found.standard_error for found in estimates.values()))
    sampled = sum(len(found.lengths) for found in estimates.values())
    documents = sum(found.num_documents for found in estimates.values())
    share = f" +- {2 * error / tokens:.1%}" if error and tokens else ""
    return round(tokens), f"estimated{share} from {sampled:,} of {documents:,} documents"


def estimate(span: Span, config: CorpusConfig, tokenizer: PreTrainedTokenizerBase) -> Estimate:
    """Tokens of a span's rows, from blocks of documents spread evenly over it."""
    texts, row_length = list(_sample(span, config)), config.row_length or 0
    if config.packing == "pad":
        return Estimate(span.stop - span.start, [float(row_length)] * len(texts))
    separate = config.separate_train if span.split == "train" else config.separate_validation
    frame = row_length / (row_length - 2) if config.packing == "wrap" else 1.0
    heads = encode(tokenizer, [text[:DOCUMENT_CHARACTERS] for text in texts], config.special_tokens)
    lengths = [
        frame * (separate + len(ids) * max(1.0, len(text) / DOCUMENT_CHARACTERS))
        for ids, text in zip(heads, texts, strict=True)
    ]
    return Estimate(span.stop - span.start, lengths)


def _sample(span: Span, config: CorpusConfig) -> Iterator[str]:
    """Texts of the sample; a document that is left out counts as empty."""
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
        yield from (found.get(number, "") for number in range(start, stop))


# Bytes per token that a codec really writes, measured on synthetic distributions.


NUM_POSITIONS = 512
LARGEST_FLOATS = 1 << 25
HEAD_VOCABULARY = 512
SHARPNESS = (2.0, 8.0)


def measured_bytes_per_token(
    codec: Codec, vocab_size: int, hidden_size: int, row_length: int
) -> float:
    """Compressed bytes per token, id and log-probability included; resources are left out.

    Distributions are p proportional to unigram * exp(s z): a Zipf unigram, z normal, s uniform in
    2 to 8. Their mean entropy is 3.1 nats at V = 50257, about GPT-2's on web text.
    """
    if codec.needs_hidden:
        # The bytes of a hidden state do not depend on V; a small head keeps the plan quick.
        vocab_size = min(vocab_size, HEAD_VOCABULARY)
    positions = max(16, min(NUM_POSITIONS, LARGEST_FLOATS // vocab_size))
    length = min(row_length, positions + 1)
    rows = max(1, positions // (length - 1))
    output, resources = _synthetic(rows, length - 1, vocab_size, hidden_size, codec.needs_hidden)
    encoded = codec.encode(output, 0, resources)
    encoded["token_log_probs"] = output.token_log_probs
    encoded["tokens"] = output.tokens.int()
    manifest = one_shard_manifest(codec, rows, length, vocab_size, hidden_size)
    arrays = {name: with_position_0(tensor) for name, tensor in encoded.items()}
    files = encode_shard(manifest, shard_ranges(manifest, "train")[0], arrays)
    return sum(map(len, files.values())) / (rows * (length - 1))


def _synthetic(
    rows: int, tokens: int, vocab_size: int, hidden_size: int, with_head: bool
) -> tuple[TeacherOutput, dict[str, Tensor]]:
    draw = generator(0, "plan")
    unigram = -torch.arange(1, vocab_size + 1).double().log().float()
    resources = {"unigram_log_probs": unigram.log_softmax(0)}
    hidden = None
    if with_head:
        hidden = torch.randn(rows, tokens, hidden_size, generator=draw)
        head = torch.randn(vocab_size, hidden_size, generator=draw) * 3 / math.sqrt(hidden_size)
        resources["lm_head"] = head
        logits = hidden @ head.T
    else:
        low, high = SHARPNESS
        sharpness = low + (high - low) * torch.rand(rows, tokens, 1, generator=draw)
        logits = torch.randn(rows, tokens, vocab_size, generator=draw) * sharpness + unigram
    log_probs = logits.log_softmax(-1)
    chosen = torch.multinomial(log_probs.flatten(0, 1).exp(), 1, generator=draw)
    output = TeacherOutput(log_probs, chosen.view(rows, tokens), torch.arange(rows), hidden)
    return output, resources


def one_shard_manifest(
    codec: Codec, rows: int, row_length: int, vocab_size: int, hidden_size: int | None
) -> Manifest:
    """A store of one shard of one chunk, to see what a codec's arrays take."""
    return Manifest(
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(vocab_size, hidden_size),
        vocab_size=vocab_size,
        row_length=row_length,
        splits={"train": rows},
        rows_per_shard=rows,
        rows_per_chunk=rows,
        teacher={},
        tokenizer={},
        tokens={},
        seed=0,
        versions={},
    )


# What an extraction would cost, told before anyone pays: no teacher runs, nothing is written.
#
# Tokens are counted in finished token rows, else estimated from a sample of the corpus. Bytes per
# token are what each codec really writes for synthetic distributions of the teacher's vocabulary.
# Hours follow from a rate: given, measured by an earlier run here, or a share of a machine's peak.


REFERENCE_TOKENS = {"OpenWebText": 9_000_000_000, "FineWeb scale": 10_000_000_000_000}


@dataclass(frozen=True)
class TeacherShape:
    """What the plan needs to know of a teacher.

    Attributes:
        num_parameters: All weights; a forward pass costs about twice as many FLOPs per token.
    """

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
    """

    teacher: TeacherShape
    row_length: int
    num_tokens: dict[str, int]
    token_origin: str
    bytes_per_token: dict[str, float]
    chosen_codec: str
    rates: list[Rate]
    price_per_hour: float | None = None

    def table(self) -> list[str]:
        """For people: one column per corpus."""
        amounts = self.num_tokens.values()
        rows = [["", *self.num_tokens]]
        rows.append(["tokens", *(f"{n:,}" for n in amounts)])
        rows.append(["rows", *(f"{-(-n // self.row_length):,}" for n in amounts)])
        for codec, size in self.bytes_per_token.items():
            mark = "*" if codec == self.chosen_codec else " "
            label = f"{mark}{codec} ({size:.1f} B/token)"
            rows.append([label, *(filesize.decimal(round(n * size)) for n in amounts)])
        for rate in self.rates:
            hours = [n / rate.tokens_per_second / 3600 for n in amounts]
            rows.append([f"hours of {rate.machine}", *map(_amount, hours)])
            if self.price_per_hour is not None:
                prices = (_amount(hour * self.price_per_hour) for hour in hours)
                rows.append([f"  price at {self.price_per_hour:g} per hour", *prices])
        return aligned(rows)

    def lines(self) -> list[str]:
        """The table with what it rests on."""
        teacher = self.teacher
        return [
            f"teacher {teacher.name}: {teacher.num_parameters:,} parameters, "
            f"V = {teacher.vocab_size:,}, rows of {self.row_length}",
            f"tokens: {self.token_origin}",
            "bytes: what each codec writes for synthetic distributions; * is the codec asked for",
            *(f"rate: {rate.line()}" for rate in self.rates),
            f"training: shuffling keeps at most {filesize.decimal(WINDOW_BYTES)} of decoded "
            "chunks in memory, over all ranks",
            "",
            *self.table(),
        ]


def make_plan(request: ExtractRequest, known: PlanOptions | None = None) -> Plan:
    """Gather the figures.

    Args:
        known: What the user knows better.

    Raises:
        UsageError: If the teacher cannot be found or does not fit.
    """
    known = known or PlanOptions()
    files = known_teacher(request)
    if files is None:
        shape = _maze_shape(request.settings.teacher.preset)
        request = request.with_row_length(None)
    else:
        num_parameters = count_parameters(files)  # first: it knows what is no language model
        request, tokenizer = check_teacher(request, files)
        shape = TeacherShape(files.name, len(tokenizer), files.hidden_size, num_parameters)
    row_length = request.corpus.row_length or 0
    given = None if known.tokens is None else round(known.tokens)
    tokens, origin = corpus_tokens(request, files, given)
    corpora = {"this corpus": tokens} if tokens is not None else {}
    sizes = {
        codec.name: measured_bytes_per_token(codec, shape.vocab_size, shape.hidden_size, row_length)
        for codec in all_codecs(request.codec)
    }
    return Plan(
        teacher=shape,
        row_length=row_length,
        num_tokens={**corpora, **REFERENCE_TOKENS},
        token_origin=origin,
        bytes_per_token=sizes,
        chosen_codec=request.codec.name,
        rates=planned_rates(request, shape.num_parameters, known.rate),
        price_per_hour=known.price,
    )


def all_codecs(chosen: Codec) -> list[Codec]:
    """Every codec with its defaults, the chosen one with its own parameters."""
    return [chosen if name == chosen.name else make_codec(name) for name in CODECS]


def _maze_shape(preset: str) -> TeacherShape:
    """Of a teacher that the run will train."""
    config = demo_teacher_config() if preset == "demo" else MazeTeacherConfig()
    weights = 16 * config.num_layers * config.hidden_size**2
    return TeacherShape(f"maze teacher ({preset})", 6, config.hidden_size, weights)


def count_parameters(files: PretrainedFiles) -> int:
    """A model's weights, counted on one without storage.

    Raises:
        UsageError: If it is no causal language model.
        GdistillError: If it cannot be made, for another reason of its own.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                files.config, trust_remote_code=files.trust_remote_code
            )
    except Exception as error:  # transformers lets errors of many libraries through
        raise not_causal_lm(files, error) from error
    return sum(parameter.numel() for parameter in model.parameters())


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# What a run would do, found out without writing a byte.


def what_would_be_done(request: ExtractRequest, worker: Worker) -> list[str]:
    """The resolved settings and the state of every step.

    Raises:
        UsageError: If the run would be refused before its first stage: by the same checks.
    """
    device = resolve_device(worker.device(request.settings.device))
    require_store_place(request.store)
    if request.settings.teacher.device_map is not None:
        Spread(request.settings.teacher.device_map)
    teacher = known_teacher(request)
    if teacher is not None:
        request, _ = check_teacher(request, teacher)
    return [
        json.dumps(request.to_mapping(), indent=2, sort_keys=True),
        f"device    {device}, worker {worker.index} of {worker.count}",
        f"teacher   {request.settings.teacher.location or 'trained on the spot'}",
        f"stage 1   {_stage1(request)}",
        f"stage 2   {_stage2(request)}",
        "nothing was written",
    ]


def _stage1(request: ExtractRequest) -> str:
    tokens = request.out / "tokens"
    if not (tokens / RECORD).is_file():
        return f"would tokenize {request.corpus.source} into {tokens}"
    dataset = TokenDataset.open(tokens)
    rows = ", ".join(f"{dataset.num_rows(split):,} {split}" for split in dataset.splits)
    return f"done: {rows} rows of {dataset.row_length}"


def _stage2(request: ExtractRequest) -> str:
    if open_location(request.store).size(MANIFEST_FILE) is None:
        return f"would write {request.store}"
    store = ShardStore.open(request.store, allow_incomplete=True)
    left = len(store.unfinished())
    return "done" if not left else f"would write {left} shards that are not done"
