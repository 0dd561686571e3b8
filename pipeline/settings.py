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
    [engine]                   # EngineSettings
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pipeline.corpus.config import MARKED, CorpusConfig, corpus_config
from shards.errors import UsageError, did_you_mean
from shards.settings import check_bounds, merge, nested, parse_override, read_toml, resolve, setting, to_mapping

if TYPE_CHECKING:
    from shards.codec.protocol import Codec
else:
    Codec = Any  # shards.codec waits for torch, and a wrong option must not

DEFAULT_CODEC = "posterior"
TABLES_APART = ("corpus", "codec")
"""Tables of a config file that are no fields of :class:`ExtractSettings`."""
LONGEST_DEFAULT_ROW = 1024
TOKENS_RECORD = "tokens/tokens.json"
"""In a run's folder: stage 1 is finished."""
OF_OWN_TEACHER = ("device", "batch_size", "threads", "strict")
OF_LAYERS, OF_SCORES = ("attention", "compiled", "device_map"), ("num_top", "dialect")
RANKS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""A process's number, how many there are, its number on its machine: as torchrun (and
``accelerate launch``), Open MPI, MPICH and srun call them."""
Item = TypeVar("Item")


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
        device_map: How Accelerate spreads the model's layers over the devices of this machine,
            where one is too small; one process uses them all.
    """

    location: str | None = None
    tokenizer: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: str | None = None
    compiled: bool = False
    preset: Literal["demo", "full"] = "full"
    revision: str | None = None
    trust_remote_code: bool = False
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None


@dataclass(frozen=True)
class StoreSettings:
    """How much is stored, and in what portions.

    Attributes:
        location: Folder or URL of the store; OUT/store by default.
        rows: Only this many first rows of each split.
        validation_rows: The same for validation alone.
        rows_per_shard: Rows of a shard, the unit of work and of resume; by size by default.
        rows_per_chunk: Rows of an inner chunk, the unit of reading; by size by default.
    """

    location: str | None = None
    rows: int | None = setting(None, within="[1, inf)")
    validation_rows: int | None = setting(None, within="[0, inf)")
    rows_per_shard: int | None = setting(None, within="[1, inf)")
    rows_per_chunk: int | None = setting(None, within="[1, inf)")

    def __post_init__(self) -> None:
        check_bounds(self, "store")


@dataclass(frozen=True)
class SequentialSettings:
    """How the teacher writes rows of its own; the defaults leave its distribution as it is.

    Attributes:
        temperature: Divides the logits.
        nucleus_p: Keeps the most probable tokens that together reach this probability.
        batch_size: Rows written side by side; by memory by default.
    """

    temperature: float = setting(1.0, within="(0, inf)")
    nucleus_p: float = setting(1.0, within="(0, 1]")
    batch_size: int | None = setting(None, within="[1, inf)")

    def __post_init__(self) -> None:
        check_bounds(self, "sequential")


@dataclass(frozen=True)
class EngineSettings:
    """A server that scores rows (vLLM, SGLang) or gives their hidden states (vLLM).

    Attributes:
        url: Its address, with or without ``/v1``; None where no engine is used.
        model: Name of the model to ask; by default the only one served.
        num_top: m, most probable tokens asked for at every position; codec.num_entries is as many
            by default. Servers have a limit of their own (vLLM: --max-logprobs, 20).
        in_flight: Requests under way at a time.
        max_tries: Of one request, before the run ends (finished shards are kept).
        timeout_seconds: Longest wait for one answer.
        dialect: ``prompt_logprobs`` (vLLM) or ``sglang`` (its ``/generate``).
        api_key_variable: Environment variable that holds the key, if the server wants one.
    """

    url: str | None = None
    model: str | None = None
    num_top: int = setting(20, within="[1, inf)")
    in_flight: int = setting(8, within="[1, inf)")
    max_tries: int = setting(8, within="[1, inf)")
    timeout_seconds: float = setting(300.0, within="(0, inf)")
    dialect: Literal["prompt_logprobs", "sglang"] = "prompt_logprobs"
    api_key_variable: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        check_bounds(self, "engine")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise UsageError("not an address", where="engine.url", got=self.url, expected="http://")


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
    seed: int = setting(0, within="[0, 9223372036854775808)")
    device: str = "auto"
    batch_size: int | None = setting(None, within="[1, inf)")
    threads: int | None = setting(None, within="[1, inf)")
    strict: bool = False
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    sequential: SequentialSettings = field(default_factory=SequentialSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def has_states(self) -> bool:
        """Whether an engine gives hidden states; what stands behind them comes from the teacher."""
        return self.engine.url is not None and self.teacher.location is not None


@dataclass(frozen=True)
class PlanOptions:
    """What a user knows that ``--plan`` would otherwise estimate: tokens/s and price of an hour of one
    process, tokens of the corpus."""

    rate: float | None = setting(None, within="(0, inf)")
    tokens: float | None = setting(None, within="(0, inf)")
    price: float | None = setting(None, within="(0, inf)")

    def __post_init__(self) -> None:
        check_bounds(self, "--plan")


@dataclass(frozen=True)
class Worker:
    """One of ``count`` processes at work on the same store; ``local_index``, its number on its machine,
    chooses the GPU."""

    index: int = 0
    count: int = 1
    local_index: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError("no workers", where="--workers", got=self.count, expected="at least 1")
        if not 0 <= self.index < self.count:
            got, expected = f"{self.index} of {self.count}", f"0 to {self.count - 1}"
            raise UsageError("no such worker", where="--worker", got=got, expected=expected)

    @classmethod
    def from_environment(
        cls, index: int | None, count: int | None, environment: Mapping[str, str] = os.environ
    ) -> Worker:
        """The options if given, else what the launcher (torchrun, mpirun, srun) says."""

        def number(name: str) -> int:
            try:
                return int(environment[name])
            except ValueError as error:
                what, where = "a launcher's variable is no number", f"environment variable {name}"
                got, remedy = repr(environment[name]), "unset it, or give --worker and --workers"
                raise UsageError(what, where=where, got=got, remedy=remedy) from error

        if (index is None) != (count is None):
            raise UsageError("--worker and --workers belong together")
        if index is not None and count is not None:
            local = next((name for *_, name in RANKS if name in environment), None)
            return cls(index, count, None if local is None else number(local))
        for rank, size, local_rank in RANKS:
            if rank in environment and size in environment:
                local = local_rank if local_rank in environment else rank
                return cls(number(rank), number(size), number(local))
        return cls()

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all."""
        return self.index == 0

    def device(self, name: str) -> str:
        """The device of this process: its own GPU where there are several."""
        if self.local_index is None or name not in ("auto", "cuda"):
            return name
        import torch

        if name == "auto" and not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{self.local_index % max(1, torch.cuda.device_count())}"

    def order(self, items: Sequence[Item]) -> list[Item]:
        """Own items first (every ``count``-th), then the others', starting with the next worker."""
        firsts = [(self.index + shift) % self.count for shift in range(self.count)]
        return [item for first in firsts for item in items[first :: self.count]]


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
        rows, own = self.settings.store.rows, self.settings.store.validation_rows
        limits = {"train": rows, "validation": rows if own is None else own}
        return {split: rows for split, rows in limits.items() if rows is not None}

    def stored_rows(self, split: str, available: int) -> int:
        """Rows of a split that the store gets of a corpus that has so many, the first ones.

        A teacher that writes its own may write more, where a number is asked for and no prompts are given.
        """
        limit = self.row_limits.get(split, available)
        own = split != "validation" or self.settings.store.validation_rows is not None
        writes = self.settings.mode == "sequential" and own and available > 0 and self.corpus.packing != "prompts"
        return limit if writes else min(available, limit)

    def with_row_length(self, context_length: int | None) -> ExtractRequest:
        """A row length for a corpus that sets none: the teacher's context, at most 1024."""
        if self.corpus.row_length is not None:
            return self
        length = min(context_length or LONGEST_DEFAULT_ROW, LONGEST_DEFAULT_ROW)
        return replace(self, corpus=replace(self.corpus, row_length=length))

    def to_mapping(self) -> dict[str, Any]:
        """The resolved request, JSON-ready; written beside the store."""
        from shards.codec.protocol import codec_parameters

        codec = {"name": self.codec.name, **codec_parameters(self.codec)}
        return {**to_mapping(self.settings), "corpus": to_mapping(self.corpus), "codec": codec}


def resolve_request(
    out: Path, options: Mapping[str, Any], overrides: Iterable[str] = (), config_file: Path | None = None
) -> ExtractRequest:
    """Merge file, options (without None) and overrides, later wins; a UsageError for what is unknown or unused."""
    if re.match(r"[a-z][a-z0-9+]+:/", str(out)):
        remedy = "token rows are kept locally; --store takes a URL for the shards"
        raise UsageError("the folder of a run is local", where="--out", got=out, remedy=remedy)
    out = Path(os.path.expanduser(out))  # --out=~/run
    asked = _without_none(options)
    values = merge(read_toml(config_file) if config_file else {}, asked)
    if isinstance(table := asked.get("corpus"), Mapping) and "spec" in table:
        values["corpus"]["source"] = table.get("source")  # not a file's: that is the same by its other name
    for text in overrides:
        values = merge(values, nested(*parse_override(text)))
    known = sorted([*TABLES_APART, *(each.name for each in fields(ExtractSettings))])
    if unknown := [key for key in values if key not in known]:
        hint = did_you_mean(unknown[0], known, f"known keys: {known}")
        raise UsageError("unknown config key", where=unknown[0], remedy=hint)
    for name in TABLES_APART:
        if not isinstance(table := values.get(name, {}), Mapping):
            raise UsageError("wrong type in config", where=name, got=repr(table), expected="a table")
    corpus, codec = (dict(values.pop(name, {})) for name in TABLES_APART)
    spec = corpus.pop("spec", None) or corpus.pop("source", None)
    if not isinstance(spec, str):
        expected = "files (stories.txt), a preset (owt, lm1b, maze, ...), or a TOML file"
        raise UsageError("no corpus", where="--corpus", expected=expected)
    settings = resolve(ExtractSettings, values)
    _check_meaning(settings, values, from_files=spec.startswith("scores:"))
    chosen = corpus_config(spec, corpus, is_read=(out / TOKENS_RECORD).is_file())
    fits = {"chat": "parallel", "prompts": "sequential"}.get(chosen.packing, settings.mode)
    scores = settings.engine.url and not settings.has_states
    if chosen.packing in MARKED and (scores or settings.mode != fits):
        raise UsageError(
            "conversations are scored, and prompts completed, by a teacher that runs here",
            where="--engine" if scores else "--mode",
            got=settings.engine.url or settings.mode,
            expected=f"--teacher, and --mode {fits} for packing={chosen.packing}",
        )
    from shards.codec.protocol import make_codec  # late: it waits for torch

    name = codec.pop("name", DEFAULT_CODEC)
    if scores and name == DEFAULT_CODEC:
        codec.setdefault("num_entries", settings.engine.num_top)  # more room would stay empty
    made, own = make_codec(str(name), **codec), settings.sequential
    if made.needs_hidden and (own.temperature, own.nucleus_p) != (1.0, 1.0):
        what, got = "this codec keeps the teacher's own distribution alone", f"{name}, temperature or nucleus beside it"
        raise UsageError(what, where="--codec", got=got, remedy="use --codec posterior")
    return ExtractRequest(out, settings, chosen, made)


def _check_meaning(settings: ExtractSettings, given: Mapping[str, Any], from_files: bool) -> None:
    """Refuse settings that this run would not look at."""
    teacher, engine = given.get("teacher", {}), given.get("engine", {})
    elsewhere = from_files or settings.engine.url is not None
    own = [name for name in OF_OWN_TEACHER if name in given]
    own += [f"teacher.{name}" for name in teacher if name != "tokenizer"]
    if settings.has_states:
        own = [f"teacher.{name}" for name in OF_LAYERS if name in teacher]
        own += [f"engine.{name}" for name in OF_SCORES if name in engine]
    own = ["--teacher" if name == "teacher.location" else name for name in own]
    leave = "leave one of the two out"
    if given.get("sequential") and settings.mode == "parallel":
        what, where = "this setting means nothing in parallel mode", "sequential"
        where, got = f"sequential.{next(iter(given['sequential']))}", ""
        remedy = "leave it out, or --mode sequential"
    elif from_files and engine:
        what, name = "files of scores need no engine", next(iter(engine))
        where = "--engine" if name == "url" else f"engine.{name}"
        got = f"{engine[name]} beside --from-logprobs"
        remedy = f"{leave}; codec.num_entries says how many tokens are kept"
    elif engine and not elsewhere:
        what, got = "a setting of an engine without one", ""
        where, remedy = f"engine.{next(iter(engine))}", "add --engine URL, or leave it out"
    elif elsewhere and own:
        what, where = "this setting means nothing where the teacher runs elsewhere", own[0]
        got = "--from-logprobs" if from_files else "--engine"
        remedy = "leave it out; --tokenizer names the tokenizer of the engine's model"
    elif "device_map" in teacher and settings.device != "auto":
        what, where = "two settings that exclude each other", "teacher.device_map"
        got, remedy = f"--device {settings.device} too", leave
    elif "preset" in teacher and settings.teacher.location is not None:
        what, where = "a preset is for a teacher that is trained here", "--teacher-preset"
        got, remedy = f"--teacher {settings.teacher.location}", leave
    else:
        return
    raise UsageError(what, where=where, got=got, remedy=remedy)


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = {k: _without_none(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    return {key: value for key, value in plain.items() if value is not None and value != {}}
