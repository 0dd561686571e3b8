"""What an extraction would cost, said before anyone pays; nothing is written.

Tokens are given, counted in finished token rows, or estimated from a sample of the corpus. Bytes are
what the codecs really write, of synthetic distributions over the teacher's vocabulary. Hours follow
from a rate: given, measured by an earlier run in this folder, or a share of a GPU's peak.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from statistics import fmean, stdev

import torch
from jaxtyping import Float
from rich import filesize
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from pipeline.corpus.config import MARKED, CorpusConfig
from pipeline.corpus.documents import Span, Tally, plan_spans, read_span
from pipeline.extract import with_position_0
from pipeline.run import check_teacher, known_teacher, own_teacher, require_store_place
from pipeline.settings import TOKENS_RECORD, ExtractRequest, PlanOptions, Worker
from pipeline.tokens.dataset import TokenDataset
from pipeline.tokens.tokenizer import encode, load_tokenizer
from shards.codec.protocol import CODECS, Codec, TeacherOutput, codec_parameters, make_codec
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import resolve_device
from shards.language_model.loading import PretrainedFiles, not_causal_lm
from shards.settings import generator
from shards.store.layout import encode_shard
from shards.store.manifest import Manifest
from shards.store.store import ShardStore

H100_FLOPS, UTILISATION = {"bfloat16": 989e12, "float32": 67e12}, 0.4
"""Peak of an H100 SXM by dtype (dense; extraction lets no TF32 in); the share of it that a forward
pass reaches."""


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plan_lines(request: ExtractRequest, known: PlanOptions, worker: Worker) -> list[str]:
    """The figures, for people, and what is done already.

    Args:
        request: What would be run.
        known: What the user knows better.
        worker: This process.

    Raises:
        UsageError: If the corpus cannot be read, or the run would be refused before its first stage:
            by the same checks.
        GdistillError: If an earlier run's figures are there and cannot be read.
    """
    resolve_device(worker.device(request.settings.device))
    is_begun, asked, files = require_store_place(request.store), request.settings.teacher, None
    if asked.location is not None or own_teacher(request)[1].exists():
        files = known_teacher(request)
    if files is None:
        from pipeline.maze import TEACHERS, TOKENS

        shape = TEACHERS[asked.preset]
        num_parameters, width = 16 * shape.num_layers * shape.hidden_size**2, shape.hidden_size
        name, vocab_size = f"maze teacher ({asked.preset})", len(TOKENS)
    else:
        num_parameters = count_parameters(files)  # first: it knows what is no language model
        request, tokenizer = check_teacher(request, files)
        name, vocab_size, width = files.name, len(tokenizer), files.hidden_size
    num_tokens, origin, stage_1 = known.tokens or 0.0, "as given", 0.0
    if not known.tokens:
        num_tokens, origin, stage_1 = count_tokens(request, files)
    rate, machine = planned_rate(request, num_parameters, known.rate)
    hours, length = num_tokens / rate / 3600, request.corpus.row_length or 0
    rows = [
        ("teacher", f"{num_parameters:,}", f"parameters: {name}, V = {vocab_size:,}"),
        ("tokens", f"{num_tokens:,.0f}", f"{origin}; {math.ceil(num_tokens / length):,} rows of {length:,}"),
        ("stage 2", _amount(hours), f"hours at {rate:,.0f} tokens/s of {machine}"),
    ]
    if stage_1:  # `gdistill-extract tokens` does it on a node of CPUs before the GPUs start
        said = f"hours of this CPU at {stage_1:,.0f} tokens/s, measured just now; no GPU is needed"
        rows.insert(2, ("stage 1", _amount(num_tokens / stage_1 / 3600), said))
    if known.price is not None:
        rows.append(("price", _amount(hours * known.price), f"at {known.price:g} an hour"))
    for each in CODECS:
        is_asked = each == request.codec.name
        codec = request.codec if is_asked else make_codec(each)
        size = measured_bytes_per_token(codec, vocab_size, width)
        said = f"{size:.1f} B/token" + ", the codec asked for" * is_asked
        rows.append((each, filesize.decimal(round(num_tokens * size)), said))
    left = "all of it is to do"
    if is_begun:
        shards = len(ShardStore.open(request.store, allow_incomplete=True).unfinished())
        left = f"{shards} shards are not done" if shards else "it is done"
    return [
        *(f"{label:<10} {figure:>20}  {said}" for label, figure, said in rows),
        "Bytes are of synthetic distributions, like GPT-2's on web text; of simpler text (stories, V = 512)"
        " posterior and seeded write half to two thirds.",
        f"{request.store}: {left}. Nothing was written.",
    ]


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


def planned_rate(request: ExtractRequest, num_parameters: int, given: float | None) -> tuple[float, str]:
    """Tokens per second of one process, and on what."""
    if given is not None:
        return given, "one process, as given"
    file = request.out / "summary.json"
    if file.exists():
        try:
            rate = float(json.loads(file.read_text(encoding="utf-8"))["tokens_per_second"])
            PlanOptions(rate=rate)  # refuses what is no rate
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            what, remedy = "cannot read an earlier run's rate", "remove the file, or give --rate"
            raise GdistillError(what, where=file, got=error, remedy=remedy) from error
        return rate, f"one process, measured by the run in {request.out}"
    dtype = request.settings.teacher.dtype
    origin = f"one H100, assumed: {UTILISATION:.0%} of its peak in {dtype}; for another machine run --rows 100 first"
    return UTILISATION * H100_FLOPS[dtype] / (2 * num_parameters), origin


# Tokens of the corpus at hand.


SAMPLE_BLOCKS, BLOCK_DOCUMENTS = 16, 32
STANDARD_ERRORS = 2.13
"""Half of a 95% interval, by Student's t for 15 degrees of freedom."""
DOCUMENT_CHARACTERS = 1 << 18
"""Of a longer document only so much is tokenized, from its beginning."""


def count_tokens(request: ExtractRequest, files: PretrainedFiles | None) -> tuple[float, str, float]:
    """Tokens that a run would store, where the figure comes from, tokens/s of the tokenizer here (0: not asked).

    Args:
        request: With its row length settled.
        files: The teacher's, for its tokenizer; None for a maze.

    Raises:
        UsageError: If the corpus cannot be read here.
    """
    length = request.corpus.row_length or 0
    try:
        if (request.out / TOKENS_RECORD).is_file():
            dataset = TokenDataset.open(request.out / "tokens")
            rows = sum(request.stored_rows(name, dataset.num_rows(name)) for name in dataset.splits)
            return float(rows * dataset.row_length), f"counted in {dataset.path}", 0.0
        spans = [span for span in plan_spans(request.corpus) if span.stop > span.start]
        source = request.settings.teacher.tokenizer or (files.folder if files else None)
        if source is None:
            rows = sum(request.stored_rows(span.split, span.stop - span.start) for span in spans)
            return float(rows * length), "one row a document", 0.0
        tokenizer, started = load_tokenizer(source), time.perf_counter()
        tokens, variance, num_ids, num_read = 0.0, 0.0, 0, 0
        for span in spans:
            sizes, ids = _sampled_sizes(span, request.corpus, tokenizer)
            found = (span.stop - span.start) * fmean(size for block in sizes for size in block)
            rows = request.stored_rows(span.split, math.ceil(found / length))
            tokens += rows * length if span.split in request.row_limits else found
            if len(sizes) > 1:  # neighbours are alike: blocks are what was drawn
                variance += ((span.stop - span.start) * stdev(map(fmean, sizes))) ** 2 / len(sizes)
            num_ids, num_read = num_ids + ids, num_read + sum(map(len, sizes))
        share = f" +- {STANDARD_ERRORS * math.sqrt(variance) / tokens:.1%}" if variance else ""
        documents = sum(span.stop - span.start for span in spans)
        origin = f"estimated{share} from {num_read:,} of {documents:,} documents"
        return tokens, origin, num_ids / (time.perf_counter() - started)
    except GdistillError as error:
        what, remedy = "the corpus cannot be counted here", "say its size: --tokens 9e9"
        raise UsageError(what, where="--plan", got=error, remedy=remedy) from error


Sizes = list[list[float]]
"""Tokens that sampled documents put into rows, by block of neighbours."""


def _sampled_sizes(span: Span, config: CorpusConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Sizes, int]:
    """Of blocks spread evenly over a span, all of it if it is small; and the ids that were looked at."""
    row_length, num_ids, blocks = config.row_length or 0, 0, []
    separate = config.separate_train if span.split == "train" else config.separate_validation
    frame = row_length / (row_length - 2) if config.packing == "wrap" else 1.0
    count = span.stop - span.start
    starts, length = [span.start], count
    if count > SAMPLE_BLOCKS * BLOCK_DOCUMENTS:
        step, length = (count - BLOCK_DOCUMENTS) / (SAMPLE_BLOCKS - 1), BLOCK_DOCUMENTS
        starts = [span.start + round(block * step) for block in range(SAMPLE_BLOCKS)]
    for start in starts:
        stop = start + length
        block = span if stop == span.stop else replace(span, stop=stop, end=1.0)
        texts = [text for _, text in read_span(block, config, Tally(), start)]
        ids = encode(tokenizer, [text[:DOCUMENT_CHARACTERS] for text in texts], config.special_tokens)
        num_ids += sum(map(len, ids))
        cut = [max(1.0, len(text) / DOCUMENT_CHARACTERS) for text in texts]
        sizes = [frame * (separate + len(i) * c) for i, c in zip(ids, cut, strict=True)]
        if config.packing in ("pad", *MARKED):
            sizes = [float(row_length)] * len(texts)
        blocks.append(sizes + [0.0] * (length - len(texts)))  # nothing of those left out
    return blocks, num_ids


# Bytes per token that a codec really writes.


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


def measured_bytes_per_token(codec: Codec, vocab_size: int, hidden_size: int) -> float:
    """Compressed bytes per token, id and log-probability included; resources are left out.

    Of a store of one shard of one row.
    """
    if codec.needs_hidden:
        # The bytes of a hidden state do not depend on V; a small head keeps the plan quick.
        vocab_size = min(vocab_size, HEAD_VOCABULARY)
    tokens = max(16, min(NUM_POSITIONS, LARGEST_FLOATS // vocab_size))
    draws, hidden = generator(0, "plan"), None
    # A Zipf-Mandelbrot unigram, in random order; nats.
    zipf = -(torch.arange(vocab_size, dtype=torch.float64) + ZIPF_OFFSET).log()
    unigram = zipf.log_softmax(0).float()[torch.randperm(vocab_size, generator=draws)]
    resources = {"unigram_log_probs": unigram}
    if codec.needs_hidden:
        hidden = torch.randn(1, tokens, hidden_size, generator=draws)
        resources["lm_head"] = torch.randn(vocab_size, hidden_size, generator=draws) * 3 / math.sqrt(hidden_size)
        log_probs = (hidden @ resources["lm_head"].T).log_softmax(-1)
    else:
        log_probs = power_laws(tokens, unigram, draws)[None]
    chosen = torch.multinomial(log_probs[0].exp(), 1, generator=draws).T
    output = TeacherOutput(log_probs, chosen, torch.arange(1), hidden)
    encoded = {**codec.encode(output, 0, resources), "token_log_probs": output.token_log_probs, "tokens": chosen.int()}
    manifest = Manifest(
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(vocab_size, hidden_size if codec.needs_hidden else None),
        vocab_size=vocab_size,
        row_length=tokens + 1,
        splits={"train": 1},
        rows_per_shard=1,
        rows_per_chunk=1,
        seed=0,
        teacher={},
        tokenizer={},
        tokens={},
        versions={},
    )
    arrays = {name: with_position_0(tensor) for name, tensor in encoded.items()}
    return sum(map(len, encode_shard(manifest, manifest.shard("train", 0), arrays).values())) / tokens
