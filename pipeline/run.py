"""One run of ``gdistill-extract``: teacher, stage 1, stage 2, summary; whatever is done stays.

Stage 1 may take hours; what a run would be refused for after it is asked here, before it.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import MARKED, scheme_of, split_field
from pipeline.extract import Extractor, resources_on, settle_environment
from pipeline.settings import TOKENS_RECORD, ExtractRequest, StoreSettings, Worker
from pipeline.teacher import Teacher, check_row_length, check_vocabulary, tokenizer_size
from pipeline.tokens.dataset import TokenDataset, prepare_tokens, rows_per_group, unmarked
from pipeline.tokens.tokenizer import load_tokenizer
from shards.atomic import file_claim, require_writable, write_json_atomic
from shards.codec.ids import unigram_log_probs
from shards.codec.protocol import ArraySpec, codec_parameters
from shards.console import stderr
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import BatchSize, resolve_device
from shards.language_model.loading import PretrainedFiles, find_pretrained, looks_local
from shards.noise.philox import use_noise_kernel
from shards.store.location import open_location
from shards.store.manifest import COUNTED, MANIFEST_FILE, STORE_ARRAYS, Manifest
from shards.store.store import ShardStore, ShardWriter
from shards.stream.stream import MIXED_CHUNK_BYTES

MOST_OTHER_TOKENS = 0.01
CHUNK_TOKENS = 1 << 12
SHARD_TOKENS, SHARD_BYTES = 1 << 18, 256 << 20


def run_extraction(request: ExtractRequest, worker: Worker, load: Callable[..., Teacher] = Teacher.load) -> list[str]:
    """Do whatever is not done yet of a run whose teacher ``load`` makes; what to say at the end.

    One process of several speaks for all: the others return nothing to say.

    Raises:
        UsageError: If the request cannot be met, or differs from what is there.
        GdistillError: If something fails on the way; finished shards are kept.
    """
    settings = request.settings
    device = resolve_device(worker.device(settings.device))
    require_writable(request.out)
    begun = require_store_place(request.store)
    files = known_teacher(request, weights=True)
    request, tokenizer = check_teacher(request, files)

    @cache
    def loaded() -> Teacher:
        """The teacher, tried out on what the run will ask for; never, where nothing is left to do."""
        asked = settings.teacher
        how = {"attention": asked.attention, "compiled": asked.compiled}
        how |= {"vocab_size": len(tokenizer), "device_map": asked.device_map}
        teacher = load(files, asked.dtype, device, **how)
        need_hidden = request.codec.needs_hidden or settings.has_states
        teacher.try_out(need_hidden, settings.mode == "sequential")
        return teacher

    if not (begun and (request.out / TOKENS_RECORD).is_file()):
        loaded()  # what its weights are refused for comes before hours of tokenization
    dataset = tokenize(request, tokenizer, worker)
    hashes = {"weights_sha256": files.weights_sha256, "config_sha256": files.config_sha256}
    identity = {"id": files.name, **hashes, "dtype": settings.teacher.dtype}
    if settings.has_states:
        identity["states"] = "engine"
    manifest = build_manifest(request, dataset, identity, files.hidden_size)
    resources = _resources(request, dataset, loaded)
    writer = begin_store(request, dataset, manifest, resources, files.folder)
    num_tokens, seconds = 0, 0.0
    if writer.all_pending():
        teacher = loaded()
        if obstacle := use_noise_kernel("auto", teacher.device):
            stderr.print(f"noise kernel: eager on {teacher.device}; {obstacle}", markup=False)
        work = Extractor(
            writer=writer,
            codec=request.codec,
            resources=resources_on(teacher.device, resources),
            teacher=teacher,
            read_rows=lambda split, start, stop, note: dataset.read_marked(split, start, stop),
            batch_size=BatchSize(settle_environment(writer, settings, teacher).rows_per_pass),
        )
        if settings.mode == "sequential":
            from pipeline.generate import GeneratedRows

            rows = GeneratedRows(teacher, dataset, settings.sequential, settings.seed, work.stop.check)
            work.read_rows, work.process = rows.read, rows.process
        work.write_all(worker, "extract")
        num_tokens, seconds = work.num_extracted_tokens, work.seconds
    lines = report(request, dataset, writer, num_tokens, seconds)
    if padding := files.num_logits - len(tokenizer):
        width = f"{files.num_logits:,}"
        lines.append(f"  logits         {width}, the last {padding:,} of no token: left out")
    return lines if worker.is_main else []


def run_tokens(request: ExtractRequest, worker: Worker) -> list[str]:
    """Stage 1 alone, of whose teacher no weights are read; errors and result as of :func:`run_extraction`."""
    require_writable(request.out)
    request, tokenizer = check_teacher(request, known_teacher(request))
    return token_lines(tokenize(request, tokenizer, worker), worker)


# Before stage 1.


def require_store_place(store: str) -> bool:
    """Whether a store is begun there; a place where none can be is refused before anything costly."""
    if Path(store).is_file():
        raise UsageError("the store is a folder", where="--store", got=f"the file {store}")
    return open_location(store).size(MANIFEST_FILE) is not None


def known_teacher(request: ExtractRequest, weights: bool = False) -> PretrainedFiles:
    """The teacher's files, trained first where the corpus (a maze) brings its own."""
    asked = request.settings.teacher
    location: str | Path | None = asked.location
    if location is None:
        layout, location = own_teacher(request)
        from pipeline import maze

        config = replace(maze.TEACHERS[asked.preset], seed=request.corpus.seed)
        with file_claim(request.out / ".teacher.lock", wait=True):
            maze.train_maze_teacher(maze.load_maze(layout), location, config)
    trusted = asked.trust_remote_code
    return find_pretrained(location, revision=asked.revision, trust_remote_code=trusted, weights=weights)


def own_teacher(request: ExtractRequest) -> tuple[str, Path]:
    """Layout and folder of a maze's own teacher; a UsageError for any other corpus."""
    scheme, layout = scheme_of(request.corpus.source)
    if scheme != "maze":
        expected = "a local folder or the hub id of a causal language model"
        raise UsageError("no teacher", where="--teacher", expected=expected)
    return layout, request.out / "teacher"


def check_teacher(request: ExtractRequest, files: PretrainedFiles) -> tuple[ExtractRequest, PreTrainedTokenizerBase]:
    """The request with its row length settled, and the tokenizer; what needs no weights to be refused is."""
    asked, request = request.settings.teacher.tokenizer, request.with_row_length(files.context_length)
    assert request.corpus.row_length is not None
    check_row_length(files, request.corpus.row_length)
    place = asked or files.folder
    tokenizer, where = load_tokenizer(place), f"{place} and {files.name}"
    check_vocabulary(files.num_logits, len(tokenizer), where)
    if asked is not None and tokenizer_size(files) is not None:
        _check_same_tokens(tokenizer, load_tokenizer(files.folder), where)
    if scheme_of(request.corpus.source)[0] == "maze":
        from pipeline.maze import check_vocabulary as check_moves

        check_moves(tokenizer, files.name)
    arrays = request.codec.array_specs(len(tokenizer), files.hidden_size)
    rows_per_unit(request.corpus.row_length, arrays, request.settings.store)
    return request, tokenizer


def _check_same_tokens(tokenizer: PreTrainedTokenizerBase, beside: PreTrainedTokenizerBase, where: str) -> None:
    """Refuse a tokenizer more than 1% of whose ids (some special tokens) mean other tokens than the teacher's own."""
    own = {index: token for token, index in beside.get_vocab().items()}
    given = {index: token for token, index in tokenizer.get_vocab().items()}
    others = sorted(index for index in given if index in own and own[index] != given[index])
    if len(others) > MOST_OTHER_TOKENS * len(given):
        first, what = others[0], "the tokenizer is of another family than the teacher"
        got = f"{len(others):,} ids that mean other tokens: {first} is {given[first]!r}"
        expected, remedy = f"{own[first]!r}, as beside the teacher", "leave --tokenizer out"
        raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)


def tokenize(request: ExtractRequest, tokenizer: PreTrainedTokenizerBase, worker: Worker) -> TokenDataset:
    """Stage 1, or its rows if they are there."""
    where, limits = request.out, request.row_limits
    dataset = prepare_tokens(request.corpus, tokenizer, where, limits=limits, main_process=worker.is_main)
    if (got := dataset.max_token_id) >= dataset.vocab_size:
        what, expected = "token id outside the vocabulary", f"below {dataset.vocab_size}"
        raise UsageError(what, where=dataset.path, got=got, expected=expected)
    return dataset


# What decides the content of a store: its manifest.


def corpus_unigram(dataset: TokenDataset) -> np.ndarray:
    """Log-probability of each token in the training rows; [V] float32, nats.

    Of conversations the assistant's tokens count, of prompts those given.
    """
    split = "train" if dataset.num_rows("train") else dataset.splits[-1]

    def read(start: int, stop: int) -> np.ndarray:
        rows = dataset.read_marked(split, start, stop)
        if dataset.packing not in MARKED:
            return rows
        tokens, counted = unmarked(rows)
        found = tokens[counted if dataset.packing == "chat" else ~counted]
        return np.concatenate([found[:1], found])[None]  # the first of a row is left out

    sizes = dataset.num_rows(split), dataset.row_length, dataset.vocab_size
    group = rows_per_group(dataset.row_length)
    return unigram_log_probs(read, *sizes, group)


def bytes_per_token(arrays: dict[str, ArraySpec]) -> int:
    """Bytes of one token before compression, its id and log-probability included."""
    specs = [*STORE_ARRAYS.values(), *arrays.values()]
    return sum(np.dtype(s.dtype).itemsize * int(np.prod(s.trailing_shape)) for s in specs)


def rows_per_unit(row_length: int, arrays: dict[str, ArraySpec], settings: StoreSettings) -> tuple[int, int]:
    """Rows of a chunk and of a shard: a few thousand and 2^18 tokens, bounded in bytes, or as set."""
    row_bytes = row_length * bytes_per_token(arrays)
    fitting = max(1, min(CHUNK_TOKENS // row_length, MIXED_CHUNK_BYTES // row_bytes))
    chunk = settings.rows_per_chunk or fitting
    if settings.rows_per_chunk is None and settings.rows_per_shard is not None:
        chunk = next(c for c in range(chunk, 0, -1) if settings.rows_per_shard % c == 0)
    wanted = min(SHARD_TOKENS // row_length, SHARD_BYTES // row_bytes)
    shard = settings.rows_per_shard or max(1, wanted // chunk) * chunk
    if shard % chunk:
        what, where = "a shard is not a whole number of chunks", "store.rows_per_shard"
        expected = f"a multiple of {chunk}, store.rows_per_chunk"
        raise UsageError(what, where=where, got=shard, expected=expected)
    return chunk, shard


def build_manifest(
    request: ExtractRequest, dataset: TokenDataset, teacher: Mapping[str, object], hidden_size: int | None = None
) -> Manifest:
    """The identity of the store that this request makes, with D of a teacher that runs here."""
    settings, codec, record = request.settings, request.codec, dataset.record
    arrays = codec.array_specs(dataset.vocab_size, hidden_size)
    if dataset.packing in MARKED:
        arrays |= COUNTED
    chunk, shard = rows_per_unit(dataset.row_length, arrays, settings.store)
    rows = {split: request.stored_rows(split, dataset.num_rows(split)) for split in dataset.splits}
    identity: dict[str, object] = {
        "corpus": public_source(record["corpus"]["source"]),
        "fingerprint": dataset.fingerprint,
        "mode": settings.mode,
    }
    if settings.mode == "sequential":
        identity["temperature"] = settings.sequential.temperature
        identity["nucleus_p"] = settings.sequential.nucleus_p
    tokenizer = record["tokenizer"]
    name = Path(tokenizer["id"]).name if looks_local(tokenizer["id"]) else tokenizer["id"]
    # Versions of what writes posteriors, tokens, metadata and compression. Those that move the
    # last bits of log-probabilities (torch, transformers) are no part of the identity.
    packages = ("gdistill", "numcodecs", "tokenizers", "zarr")
    return Manifest(
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=arrays,
        vocab_size=dataset.vocab_size,
        row_length=dataset.row_length,
        splits={split: count for split, count in rows.items() if count},
        rows_per_shard=shard,
        rows_per_chunk=chunk,
        teacher=dict(teacher),
        tokenizer={"id": name, "sha256": tokenizer["sha256"]},
        tokens=identity,
        seed=settings.seed,
        versions={package: importlib.metadata.version(package) for package in packages},
        bos_id=dataset.bos_id,
        eos_id=dataset.eos_id,
    )


def public_source(source: str) -> str:
    """A corpus by name: a store may be published, and where its files lay is nobody's business."""
    scheme, rest = scheme_of(source)
    place, field = split_field(rest)
    if scheme != "hf" or looks_local(place):
        place = Path(place).name
    return f"{scheme}:{place}{f'#{field}' if field else ''}" if rest else source


# Stage 2.


def begin_store(
    request: ExtractRequest,
    dataset: TokenDataset,
    manifest: Manifest,
    resources: dict[str, np.ndarray],
    teacher: Path | None = None,
) -> ShardWriter:
    """Create the store or take it up, the resolved request beside it.

    Its side files make it self-contained: the tokenizer, and what scores need of a corpus; ``teacher``
    is the folder of one that runs here.
    """
    place = dataset.tokenizer_path
    sides = {
        f"tokenizer/{path.relative_to(place).as_posix()}": path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }
    scheme, layout = scheme_of(request.corpus.source)
    if scheme == "maze" and teacher is not None:
        from pipeline.maze import load_maze

        artifact = {**load_maze(layout).artifact(), "seed": request.corpus.seed}
        text = json.dumps(artifact, indent=2, sort_keys=True).encode() + b"\n"
        record = teacher / "maze.json"  # with the path probabilities of a teacher trained here
        sides["corpus/maze.json"] = record.read_bytes() if record.is_file() else text
    writer = ShardWriter.create_or_resume(request.store, manifest, resources, sides)
    path, values = request.out / "config.json", request.to_mapping()
    with suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")) == values:
            return writer  # a file that says the same is left alone
    write_json_atomic(path, values)
    return writer


def _resources(request: ExtractRequest, dataset: TokenDataset, teacher: Callable[[], Teacher]) -> dict[str, np.ndarray]:
    """The arrays that the codec wants once per store: an intact store's own, else made.

    A finished store needs no teacher; ``teacher()`` is asked for its head where there is none.
    """
    # Where there is no store yet, a damaged one or another one, the writer, which opens next, decides: it writes
    # altered resources anew and refuses a damaged manifest, or another one.
    with suppress(GdistillError):
        store = ShardStore.open(request.store, allow_incomplete=True)
        return {name: tensor.numpy() for name, tensor in store.resources.items()}
    resources: dict[str, np.ndarray] = {}
    for name in request.codec.resource_names:
        if name == "unigram_log_probs":
            resources[name] = corpus_unigram(dataset)
        elif name in ("lm_head", "lm_head_bias"):
            weight, bias = teacher().lm_head
            value = weight if name == "lm_head" else bias
            resources[name] = np.zeros(len(weight), np.float32) if value is None else value.numpy()
        else:
            raise GdistillError("the codec wants an unknown resource", got=name)
    return resources


# The end.


def token_lines(dataset: TokenDataset, worker: Worker) -> list[str]:
    """What to say where stage 1 was all."""
    return [f"tokens {dataset.path}", *corpus_lines(dataset)] if worker.is_main else []


def corpus_lines(dataset: TokenDataset) -> list[str]:
    """What stage 1 read, left out and repaired, split by split."""
    lines = []
    for split, record in dataset.record["splits"].items():
        parts = [f"{record['num_documents']:,} documents"] * bool(record["num_documents"])  # scored rows come without
        parts.append(f"{record['num_rows']:,} rows")
        notes = {
            "empty documents left out": record["num_empty"],
            "documents of bad UTF-8": record["num_bad_utf8"],
            "control characters kept": record["num_control_characters"],
            "special tokens spelled out in the text": record.get("num_special_tokens", 0),
            "tokens left over": record["num_dropped_tokens"],
        }
        parts += [f"{count:,} {what}" for what, count in notes.items() if count]
        parts += ["cut there, as asked"] * record.get("was_cut", False)
        lines.append(f"  {split:<14} {', '.join(parts)}")
    return lines


def report(
    request: ExtractRequest, dataset: TokenDataset, writer: ShardWriter, num_tokens: int, seconds: float
) -> list[str]:
    """The store in numbers, kept as ``summary.json`` too; ``seconds`` are those of ``num_tokens``, extracted here.

    ``num_tokens`` there counts position 0; ``shard_bytes`` grow with the corpus, and are what
    ``bytes_per_token`` is of; ``fp16_bytes_per_token`` is what the noise as fp16 vectors would take, 2 V.
    """
    if not writer.is_complete():
        what, remedy = "finished shards went missing while the run was on", "run the same command again"
        raise GdistillError(what, where=request.store, remedy=remedy)
    manifest, sizes = writer.manifest, writer.location.sizes()
    shard_bytes = sum(sizes[name] for shard in manifest.all_shards() for name in manifest.shard_files(shard).values())
    num_rows, fp16 = sum(manifest.splits.values()), 2 * manifest.vocab_size
    num_stored = num_rows * manifest.row_length
    num_bytes, per_token = sum(sizes.values()), shard_bytes / num_stored
    done = "nothing was left to do"
    if num_tokens:
        done = f"{num_tokens / seconds:,.0f} tokens/s"
        record = {
            "num_rows": num_rows,
            "num_tokens": num_stored,
            "num_bytes": num_bytes,
            "shard_bytes": shard_bytes,
            "fp16_bytes_per_token": fp16,
            "bytes_per_token": per_token,
            "fp16_ratio": fp16 / per_token,
            "seconds": seconds,
            "num_tokens_of_this_process": num_tokens,
            "tokens_per_second": num_tokens / seconds,
        }
        # All workers end at once; one that finds another at it leaves it to that one.
        with file_claim(request.out / ".summary.lock", wait=False) as mine:
            if mine:
                write_json_atomic(request.out / "summary.json", record)
    return [
        "corpus",
        *corpus_lines(dataset),
        f"store {request.store}",
        f"  rows           {num_rows:,}",
        f"  tokens         {num_stored:,}",
        f"  bytes          {num_bytes:,}",
        f"  bytes/token    {per_token:.1f}",
        f"  fp16 vectors   {fp16:,} bytes/token: {fp16 / per_token:.1f} x this store",
        f"  seconds        {seconds:.1f} ({done})",
    ]
