"""What one extraction is asked to do: a TOML file, options and ``--set a.b=c``, resolved once.

::

    mode = "parallel"          # or "sequential"
    seed = 0
    [corpus]                   # fields of CorpusConfig; spec = preset, TOML file or source
    spec = "owt"
    [teacher]                  # TeacherSettings
    location = "gpt2-large"
    dtype = "bfloat16"
    [codec]                    # name and the codec's own parameters
    name = "posterior"
    num_entries = 64
    [store]                    # StoreSettings
    [sequential]               # SequentialSettings
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.corpus.config import CorpusConfig, corpus_config
from pipeline.engine.client import EngineSettings
from shards.errors import UsageError, did_you_mean
from shards.settings import merge, nested, parse_override, read_toml, resolve, to_mapping

if TYPE_CHECKING:
    from shards.codec.protocol import Codec
else:
    Codec = Any  # shards.codec waits for torch, and a wrong option must not

DEFAULT_CODEC = "posterior"
TABLES_APART = ("corpus", "codec")
"""Tables of a config file that are no fields of :class:`ExtractSettings`."""
LONGEST_DEFAULT_ROW = 1024
OF_OWN_TEACHER = ("device", "batch_size", "threads", "strict")
OF_TOKENIZER = ("tokenizer", "location")
"""Settings of the teacher that an engine leaves to us: whose token ids these are."""


@dataclass(frozen=True)
class TeacherSettings:
    """Which model, and how it runs.

    Attributes:
        location: Local directory or hub id; None for a corpus that brings its own (``maze``).
        tokenizer: Directory or hub id of the tokenizer, if it does not lie beside the model.
        dtype: Precision of weights and activations.
        attention: Attention kernel by transformers' name (``sdpa``, ``flash_attention_2``, ...).
        compiled: Run the model through ``torch.compile``.
        preset: Size of a teacher that is trained on the spot.
        revision: Branch, tag or commit of a hub model; a local folder has none.
        trust_remote_code: Whether code that comes with the model may run.
        device_map: Spread the model's layers over the devices of this machine, where one is too
            small: ``auto``, ``balanced``, ``balanced_low_0``, ``sequential``, a device, or in a
            TOML file a table of module name -> device. One process uses them all.
        tensor_parallel: Cut every layer over the processes that torchrun starts, one GPU each; all
            of them are one worker.
    """

    location: str | None = None
    tokenizer: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: str | None = None
    compiled: bool = False
    preset: Literal["demo", "full"] = "full"
    revision: str | None = None
    trust_remote_code: bool = False
    device_map: str | dict[str, Any] | None = None
    tensor_parallel: bool = False


@dataclass(frozen=True)
class StoreSettings:
    """How much is stored, and in what portions.

    Attributes:
        location: Folder or URL of the store; OUT/store unless told.
        rows: Only this many first rows of each split.
        validation_rows: The same for validation alone.
        rows_per_shard: Rows of a shard, the unit of work and of resume; by size unless told.
        rows_per_chunk: Rows of an inner chunk, the unit of reading; by size unless told.
    """

    location: str | None = None
    rows: int | None = None
    validation_rows: int | None = None
    rows_per_shard: int | None = None
    rows_per_chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "rows_per_shard", "rows_per_chunk"):
            _require(getattr(self, name), 1, f"store.{name}")
        _require(self.validation_rows, 0, "store.validation_rows")


@dataclass(frozen=True)
class SequentialSettings:
    """How the teacher writes rows of its own; off by default, for they change its distribution.

    Attributes:
        temperature: Divides the logits.
        nucleus_p: Keeps the likeliest tokens that together reach this probability.
        batch_size: Rows written side by side; found by trial unless told.
    """

    temperature: float = 1.0
    nucleus_p: float = 1.0
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise UsageError("out of range", where="sequential.temperature", got=self.temperature)
        if not 0 < self.nucleus_p <= 1:
            raise UsageError("out of range", where="sequential.nucleus_p", got=self.nucleus_p)
        _require(self.batch_size, 1, "sequential.batch_size")


@dataclass(frozen=True)
class ExtractSettings:
    """Everything but the corpus and the codec, which have types of their own.

    Attributes:
        mode: Score the corpus's rows (``parallel``), or rows the teacher writes (``sequential``).
        seed: Seed of everything drawn.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        batch_size: Rows of one forward pass; the store's first worker's, else by memory.
        threads: CPU threads of a forward pass; the store's first worker's, else torch's own.
        strict: Refuse to go on with a store that was begun on other hardware or software.
    """

    mode: Literal["parallel", "sequential"] = "parallel"
    seed: int = 0
    device: str = "auto"
    batch_size: int | None = None
    threads: int | None = None
    strict: bool = False
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    sequential: SequentialSettings = field(default_factory=SequentialSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        _require(self.batch_size, 1, "batch_size")
        _require(self.threads, 1, "threads")
        if not 0 <= self.seed < 1 << 63:
            raise UsageError("out of range", where="seed", got=self.seed, expected="0 to 2^63 - 1")


@dataclass(frozen=True)
class PlanOptions:
    """What a user knows that ``--plan`` would otherwise estimate.

    Attributes:
        rate: Tokens per second of one process.
        tokens: Tokens of the corpus.
        price: Price of an hour of one process, in whatever currency.
    """

    rate: float | None = None
    tokens: float | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise UsageError(
                    "out of range", where=f"--{name}", got=value, expected="a number above 0"
                )

    def check(self, plan: bool, dry_run: bool) -> None:
        """Refuse figures without the plan that they are for, and two answers at once.

        Raises:
            UsageError: For ``--rate``, ``--tokens`` or ``--price`` without ``--plan``, and for
                ``--plan`` with ``--dry-run``.
        """
        given = [f"--{name}" for name, value in vars(self).items() if value is not None]
        if given and not plan:
            raise UsageError(
                "an option of --plan without it", where=given[0], remedy="add --plan, or leave it"
            )
        if plan and dry_run:
            raise UsageError("--plan and --dry-run exclude each other")


@dataclass(frozen=True)
class ExtractRequest:
    """One resolved run of ``gdistill-extract``."""

    out: Path
    settings: ExtractSettings
    corpus: CorpusConfig
    codec: Codec

    @property
    def store(self) -> str:
        """Where the store goes: a folder or a URL."""
        return self.settings.store.location or str(self.out / "store")

    @property
    def row_limits(self) -> dict[str, int]:
        """The most rows of each split that has a limit."""
        settings = self.settings.store
        own = settings.validation_rows
        limits = {"train": settings.rows, "validation": settings.rows if own is None else own}
        return {split: rows for split, rows in limits.items() if rows is not None}

    def stored_rows(self, split: str, available: int) -> int:
        """Rows of a split that the store gets of a corpus that has so many, the first ones.

        A teacher that writes its own rows may write more than there are, where a number is asked
        for; of validation, a number of its own.
        """
        limit = self.row_limits.get(split, available)
        own = split != "validation" or self.settings.store.validation_rows is not None
        writes = self.settings.mode == "sequential" and own and available > 0
        return limit if writes else min(available, limit)

    def with_row_length(self, context_length: int | None) -> ExtractRequest:
        """A row length for a corpus that sets none: the teacher's context, at most 1024."""
        if self.corpus.row_length is not None:
            return self
        length = min(context_length or LONGEST_DEFAULT_ROW, LONGEST_DEFAULT_ROW)
        return replace(self, corpus=replace(self.corpus, row_length=length))

    def to_mapping(self) -> dict[str, Any]:
        """The resolved request, JSON-ready; written beside the store."""
        from shards.codec.registry import codec_parameters

        codec = {"name": self.codec.name, **codec_parameters(self.codec)}
        return {
            **to_mapping(self.settings),
            "corpus": to_mapping(self.corpus),
            "codec": codec,
        }


def resolve_request(
    out: Path,
    options: Mapping[str, Any],
    overrides: Iterable[str] = (),
    config_file: Path | None = None,
) -> ExtractRequest:
    """Merge the file, the options (without their None values) and the overrides; later wins.

    Raises:
        UsageError: For an unknown key, a value of another type or out of range, a setting that
            would mean nothing, no corpus, or a URL for the run's own folder.
    """
    if re.match(r"[a-z][a-z0-9+]+:/", str(out)):
        remedy = "token rows are kept locally; --store takes a URL for the shards"
        raise UsageError("the folder of a run is local", where="--out", got=out, remedy=remedy)
    values = read_toml(config_file) if config_file else {}
    values = merge(values, _without_none(options))
    for text in overrides:
        values = merge(values, nested(*parse_override(text)))
    _check_keys(values)
    corpus, codec = (_table(values, name) for name in TABLES_APART)
    spec = corpus.pop("spec", None) or corpus.pop("source", None)
    if not isinstance(spec, str):
        raise UsageError(
            "no corpus",
            where="--corpus",
            expected="files (stories.txt), a preset (owt, lm1b, maze, ...), or a TOML file",
        )
    settings = resolve(ExtractSettings, values)
    _check_meaning(settings, {**values, "spec": spec})
    chosen = corpus_config(spec, settings=corpus)
    from shards.codec.registry import make_codec  # late: it waits for torch

    name = codec.pop("name", DEFAULT_CODEC)
    if settings.engine.url is not None and name == DEFAULT_CODEC:
        codec.setdefault("num_entries", settings.engine.num_top)  # more room would stay empty
    return ExtractRequest(out, settings, chosen, make_codec(str(name), **codec))


def _check_keys(values: Mapping[str, Any]) -> None:
    known = sorted([*TABLES_APART, *(field.name for field in fields(ExtractSettings))])
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known, f"known keys: {known}")
            raise UsageError("unknown config key", where=key, remedy=hint)


def _check_meaning(settings: ExtractSettings, given: Mapping[str, Any]) -> None:
    """Refuse settings that this run would not look at."""
    if given.get("sequential") and settings.mode == "parallel":
        raise UsageError(
            "this setting means nothing in parallel mode",
            where=f"sequential.{next(iter(given['sequential']))}",
            remedy="leave it out, or --mode sequential",
        )
    _check_spread(settings)
    _check_engine(settings, given)
    teacher = given.get("teacher", {})
    if "preset" in teacher and settings.teacher.location is not None:
        raise UsageError(
            "a preset is for a teacher that is trained here",
            where="--teacher-preset",
            got=f"--teacher {settings.teacher.location}",
            remedy="leave one of the two out",
        )


def _check_engine(settings: ExtractSettings, given: Mapping[str, Any]) -> None:
    """Refuse settings of an engine without one, and of our own teacher beside one."""
    from_files = str(given.get("spec")).startswith("scores:")
    engine = given.get("engine", {})
    if from_files and engine:
        name = next(iter(engine))
        raise UsageError(
            "files of scores need no engine",
            where="--engine" if name == "url" else f"engine.{name}",
            got=f"{engine[name]} beside --from-logprobs",
            remedy="leave one of the two out; codec.num_entries says how many tokens are kept",
        )
    if engine and settings.engine.url is None:
        raise UsageError(
            "a setting of an engine without one",
            where=f"engine.{next(iter(engine))}",
            remedy="add --engine URL, or leave it out",
        )
    if not from_files and settings.engine.url is None:
        return
    own = [name for name in OF_OWN_TEACHER if name in given]
    own += [f"teacher.{name}" for name in given.get("teacher", {}) if name not in OF_TOKENIZER]
    if own:
        raise UsageError(
            "this setting means nothing where the teacher runs elsewhere",
            where=own[0],
            got="an engine's scores",
            remedy="leave it out; how the model computes is said where the engine is started",
        )


def _check_spread(settings: ExtractSettings) -> None:
    """Refuse what a teacher on several devices cannot also be."""
    teacher = settings.teacher
    where = "teacher.device_map" if teacher.device_map is not None else "teacher.tensor_parallel"
    if teacher.device_map is None and not teacher.tensor_parallel:
        return
    others = {
        f"--device {settings.device}": settings.device != "auto",
        "teacher.tensor_parallel": teacher.device_map is not None and teacher.tensor_parallel,
        "--compile": teacher.compiled and teacher.tensor_parallel,
        "--mode sequential": settings.mode == "sequential" and teacher.tensor_parallel,
    }
    for other, is_given in others.items():
        if is_given:
            raise UsageError(
                "two settings that exclude each other",
                where=where,
                got=f"{other} too",
                remedy="leave one of the two out",
            )


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    table = values.pop(name, {})
    if not isinstance(table, Mapping):
        raise UsageError("wrong type in config", where=name, got=repr(table), expected="a table")
    return dict(table)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            value = _without_none(value)
        if value is not None and value != {}:
            result[key] = value
    return result


def _require(value: int | None, least: int, where: str) -> None:
    if value is not None and value < least:
        raise UsageError("out of range", where=where, got=value, expected=f"{least} or more")
