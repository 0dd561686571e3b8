"""What an extraction would cost, told before anyone pays: no teacher runs, nothing is written.

Tokens are counted in finished token rows, else estimated from a sample of the corpus. Bytes per
token are what each codec really writes for synthetic distributions of the teacher's vocabulary.
Hours follow from a rate: given, measured by an earlier run here, or a share of a machine's peak.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich import filesize
from transformers import AutoModelForCausalLM

from pipeline.inputs import check_teacher, known_teacher
from pipeline.maze import MazeTeacherConfig, demo_teacher_config
from pipeline.plan.codec_sizes import measured_bytes_per_token
from pipeline.plan.rates import Rate, planned_rates
from pipeline.plan.token_counts import corpus_tokens
from pipeline.settings import ExtractRequest, PlanOptions
from shards.base import aligned
from shards.codec import CODECS, Codec, make_codec
from shards.language_model import PretrainedFiles, not_causal_lm
from shards.stream import WINDOW_BYTES

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
