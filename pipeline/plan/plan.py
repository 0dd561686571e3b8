"""What an extraction would cost, told before anyone pays: no teacher runs, nothing is written.

Tokens are counted in finished token rows, else estimated from a sample of the corpus. Bytes per
token are what each codec really writes for synthetic distributions of the teacher's vocabulary.
Hours follow from a rate: given, measured by an earlier run here, or a share of a GPU's peak.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from pipeline.corpus import Tally, plan_spans, read_span, scheme_of
from pipeline.maze import MazeTeacherConfig, demo_teacher_config
from pipeline.plan.codec_sizes import measured_bytes_per_token
from pipeline.settings import ExtractRequest
from pipeline.teacher import check_row_length, tokenizer_size
from pipeline.tokens import RECORD, TokenDataset, encode, load_tokenizer
from shards.base import GdistillError, UsageError
from shards.codec import CODECS, Codec, make_codec
from shards.language_model import PretrainedFiles, find_pretrained, not_causal_lm

REFERENCE_TOKENS = {"OpenWebText": 9_000_000_000, "FineWeb scale": 10_000_000_000_000}
REFERENCE_GPU, REFERENCE_FLOPS, REFERENCE_UTILISATION = "H100 SXM, bf16 dense", 989e12, 0.4
SAMPLE_DOCUMENTS = 200
SAMPLE_CHARACTERS = 1 << 21


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
class Rate:
    """Tokens per second of one process, and where the figure comes from."""

    tokens_per_second: float
    origin: str


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
    rate: Rate
    price_per_hour: float | None = None

    def table(self) -> list[str]:
        """For people: one column per corpus."""
        names = list(self.num_tokens)
        rows = [("", names)]
        rows.append(("tokens", [f"{n:,}" for n in self.num_tokens.values()]))
        rows.append(("rows", [f"{-(-n // self.row_length):,}" for n in self.num_tokens.values()]))
        for codec, size in self.bytes_per_token.items():
            mark = "*" if codec == self.chosen_codec else " "
            label = f"{mark}{codec} ({size:.1f} B/token)"
            rows.append((label, [human_bytes(n * size) for n in self.num_tokens.values()]))
        hours = [n / self.rate.tokens_per_second / 3600 for n in self.num_tokens.values()]
        rows.append(("process hours", [_amount(hour) for hour in hours]))
        if self.price_per_hour is not None:
            prices = [_amount(hour * self.price_per_hour) for hour in hours]
            rows.append((f"price at {self.price_per_hour:g} per hour", prices))
        label_width = max(len(label) for label, _ in rows)
        widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(names))]
        return [
            "  ".join([label.ljust(label_width), *map(str.rjust, cells, widths)])
            for label, cells in rows
        ]

    def lines(self) -> list[str]:
        """The table with what it rests on."""
        teacher = self.teacher
        return [
            f"teacher {teacher.name}: {teacher.num_parameters:,} parameters, "
            f"V = {teacher.vocab_size:,}, rows of {self.row_length}",
            f"tokens: {self.token_origin}",
            "bytes: what each codec writes for synthetic distributions; * is the codec asked for",
            f"rate: {self.rate.tokens_per_second:,.0f} tokens/s per process, {self.rate.origin}",
            "",
            *self.table(),
        ]


def make_plan(
    request: ExtractRequest,
    rate: float | None = None,
    num_tokens: int | float | None = None,
    price_per_hour: float | None = None,
) -> Plan:
    """Gather the figures.

    Args:
        rate: Tokens per second of one process, if known.
        num_tokens: Tokens of the corpus, if known.

    Raises:
        UsageError: If the teacher cannot be found or does not fit, or a figure is out of range.
    """
    for option, value in (("--rate", rate), ("--tokens", num_tokens), ("--price", price_per_hour)):
        _require_positive(option, value)
    shape, files = teacher_shape(request)
    request = request.with_row_length(files.context_length if files else None)
    row_length = request.corpus.row_length or 0
    if files:
        check_row_length(files, row_length)
    given = None if num_tokens is None else round(num_tokens)
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
        rate=planned_rate(request, shape, rate),
        price_per_hour=price_per_hour,
    )


def _require_positive(option: str, value: int | float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise UsageError("out of range", where=option, got=value, expected="a number above 0")


def all_codecs(chosen: Codec) -> list[Codec]:
    """Every codec with its defaults, the chosen one with its own parameters."""
    return [chosen if name == chosen.name else make_codec(name) for name in CODECS]


def teacher_shape(request: ExtractRequest) -> tuple[TeacherShape, PretrainedFiles | None]:
    """The teacher's sizes from its configuration alone."""
    settings = request.settings.teacher
    own = request.out / "teacher"
    if settings.location is None and scheme_of(request.corpus.source)[0] == "maze":
        if not own.exists():
            return _maze_shape(settings.preset), None
        settings_location: str | Path = own
    else:
        settings_location = settings.location or ""
    files = find_pretrained(
        settings_location,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        weights=False,
    )
    tokenizer = settings.tokenizer
    size = len(load_tokenizer(tokenizer)) if tokenizer else tokenizer_size(files)
    return (
        TeacherShape(files.name, size or files.num_logits, files.hidden_size, _parameters(files)),
        files,
    )


def _maze_shape(preset: str) -> TeacherShape:
    config = demo_teacher_config() if preset == "demo" else MazeTeacherConfig()
    weights = 16 * config.num_layers * config.hidden_size**2
    return TeacherShape(f"maze teacher ({preset})", 6, config.hidden_size, weights)


def _parameters(files: PretrainedFiles) -> int:
    """Counted on a model without storage.

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


def corpus_tokens(
    request: ExtractRequest, files: PretrainedFiles | None, given: int | None
) -> tuple[int | None, str]:
    """Tokens of the corpus at hand and where the figure comes from; None if it cannot be read."""
    if given is not None:
        return given, "as given"
    tokens = request.out / "tokens"
    if (tokens / RECORD).is_file():
        dataset = TokenDataset.open(tokens)
        rows = sum(dataset.num_rows(split) for split in dataset.splits)
        return rows * dataset.row_length, f"counted in {tokens}"
    try:
        return _estimated_tokens(request, files)
    except GdistillError as error:
        return None, f"the corpus cannot be read here ({error}); give --tokens for its own column"


def _estimated_tokens(request: ExtractRequest, files: PretrainedFiles | None) -> tuple[int, str]:
    spans = plan_spans(request.corpus)
    num_documents = sum(span.stop - span.start for span in spans)
    texts, size = [], 0
    for _, text in islice(read_span(spans[0], request.corpus, Tally()), SAMPLE_DOCUMENTS):
        texts.append(text)
        size += len(text)
        if size > SAMPLE_CHARACTERS:
            break
    source = request.settings.teacher.tokenizer or (files.folder if files else None)
    if source is None:
        row_length = request.corpus.row_length or 0
        return num_documents * row_length, f"{num_documents:,} documents, one row each"
    lengths = [len(ids) + 1 for ids in encode(load_tokenizer(source), texts)]
    mean = sum(lengths) / max(1, len(lengths))
    origin = (
        f"estimated: {num_documents:,} documents, {mean:.0f} tokens each in {len(texts)} of them"
    )
    return round(mean * num_documents), origin


def planned_rate(request: ExtractRequest, shape: TeacherShape, given: float | None) -> Rate:
    """Given, measured by an earlier run in this folder, or a share of the peak of a GPU.

    Raises:
        GdistillError: If an earlier run's figures are there and cannot be read.
    """
    if given is not None:
        return Rate(given, "as given")
    file = request.out / "summary.json"
    if file.exists():
        try:
            rate = float(json.loads(file.read_text(encoding="utf-8"))["tokens_per_second"])
            _require_positive("tokens_per_second", rate)
        except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
            remedy = "remove the file, or give --rate"
            raise GdistillError(
                "cannot read an earlier run's rate", where=file, got=error, remedy=remedy
            ) from error
        return Rate(rate, f"measured by the run in {request.out}")
    rate = REFERENCE_UTILISATION * REFERENCE_FLOPS / (2 * shape.num_parameters)
    share = f"{REFERENCE_UTILISATION:.0%} of the peak of one {REFERENCE_GPU}"
    return Rate(rate, f"assumed: {share}, {2 * shape.num_parameters / 1e9:,.2g} GFLOP per token")


def human_bytes(size: float) -> str:
    """Bytes with a decimal prefix."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} EB"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
