"""Extraction by a teacher that runs elsewhere: vLLM or SGLang is asked, or files hold the scores.

``scores:GLOB`` as the corpus reads files of scored rows; ``engine.url`` has a running server score
the rows of any corpus. Either way stage 1 writes token rows, the store is ``posterior``, and
ledger, claims and resume are those of every extraction.

429, 5xx and cut connections are tried again with growing pauses (``Retry-After`` is honoured); any
other refusal ends the run with the server's own words. A server is known by its model's name, and
by log p of the first row, which every later run scores again.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import requests
import torch
import urllib3
from requests.adapters import HTTPAdapter
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import scheme_of
from pipeline.extract import with_position_0, write_all
from pipeline.manifest import build_manifest, corpus_unigram, side_files
from pipeline.scored import ScoredRow, ScoreFiles, row_of_response, same_length
from pipeline.settings import EngineSettings, ExtractRequest
from pipeline.steps import report, tokenize, write_config
from pipeline.tokens.build import write_given_rows
from pipeline.tokens.dataset import TokenDataset
from pipeline.tokens.tokenizer import load_tokenizer
from pipeline.workers import StopRequest, Worker
from shards.atomic import require_writable, write_json_atomic
from shards.codec.posterior import PosteriorCodec
from shards.console import Bar
from shards.errors import GdistillError, UsageError
from shards.store.manifest import ShardRange
from shards.store.writer import ShardWriter

MAX_MEAN_CHANGE_NATS = 0.05
"""Between two scorings of a row by one model: bf16 kernels differ with the batch, models more."""
TRIED_IDS = 12
ENGINE_FILE = "engine.json"
POLL_SECONDS = 1.0
ROWS_AT_ONCE = 64
"""Rows fetched between two looks at whether the process was asked to stop."""
PATHS = {"prompt_logprobs": "/v1/completions", "echo": "/v1/completions", "sglang": "/generate"}
VERSION_PATHS = ("/version", "/server_info", "/get_server_info")
"""vLLM's, SGLang's, and that of older SGLang."""


class Engine:
    """A connection to the server that ``settings`` names; V is the tokenizer's size."""

    def __init__(self, settings: EngineSettings, vocab_size: int) -> None:
        assert settings.url is not None
        self.settings, self.vocab_size = settings, vocab_size
        self._base = settings.url.rstrip("/").removesuffix("/v1")
        self._session = requests.Session()
        key = os.environ.get(settings.api_key_variable)
        if key:
            self._session.headers["Authorization"] = f"Bearer {key}"
        # Who is there is asked by one who waits; scores, by a run that would lose its pace.
        for path, tries in (("/", 3), (PATHS[settings.dialect], settings.max_tries)):
            retry = urllib3.Retry(
                total=min(tries, settings.max_tries) - 1,
                backoff_factor=0.5 if path != "/" else 0.1,
                backoff_jitter=0.25 if path != "/" else 0.0,
                backoff_max=60,
                status_forcelist=(429, 500, 502, 503, 504),
                allowed_methods=None,
                raise_on_status=False,
            )
            adapter = HTTPAdapter(
                pool_maxsize=settings.in_flight, pool_block=True, max_retries=retry
            )
            self._session.mount(self._base + path, adapter)

    @cached_property
    def _card(self) -> Mapping[str, Any]:
        """What ``/v1/models`` says of the model that is asked."""
        listed = self._asked("GET", "/v1/models").get("data") or []
        cards = {str(card.get("id")): card for card in listed if isinstance(card, Mapping)}
        wanted = self.settings.model or (next(iter(cards)) if len(cards) == 1 else None)
        if wanted in cards:
            return cards[wanted]
        raise UsageError(
            "no model is named" if wanted is None else "the engine does not serve this model",
            where=self.settings.url,
            got=wanted,
            expected=f"one of {[*cards]}",
            remedy="--set engine.model=NAME",
        )

    @property
    def model(self) -> str:
        """Name of the model that is asked; the server's only one unless the settings name it."""
        return str(self._card["id"])

    @property
    def row_limit(self) -> int | None:
        """The longest row: with it, the server writes one token. None if it does not say."""
        limit = self._card.get("max_model_len")
        return limit - 1 if isinstance(limit, int) and limit > 2 else None

    @cached_property
    def version(self) -> str:
        """What the server says of its own version; ``unknown`` where it says nothing."""
        for path in VERSION_PATHS:
            try:
                return str(self._asked("GET", path)["version"])
            except (GdistillError, KeyError):  # not every server has this address
                continue
        return "unknown"

    def identity(self) -> dict[str, Any]:
        """What decides the scores, for a store's manifest."""
        num_top = self.settings.num_top
        return {
            "id": self.model,
            "engine_version": self.version,
            "num_top": num_top,
            "temperature": 1.0,
        }

    def try_out(self) -> None:
        """Score a dozen ids: what the server refuses for every row is told before stage 1.

        Raises:
            UsageError: If it gives no log-probabilities of a prompt, or fewer than asked for.
        """
        length = min(TRIED_IDS, self.row_limit or TRIED_IDS)
        ids = [self.vocab_size * i // length for i in range(length)]
        try:
            self._score(ids, "a dozen ids, to try it out")
        except GdistillError as error:
            raise UsageError(
                f"the engine cannot be used: {error.what}",
                where=error.where,
                got=error.got,
                expected=error.expected,
                remedy=f"it must give {self.settings.num_top} log-probabilities at every position"
                f" of a prompt (engine.num_top; vLLM: --max-logprobs {self.settings.num_top};"
                " SGLang: --set engine.dialect=sglang)",
            ) from error

    def score(self, rows: Sequence[Sequence[int]], names: Sequence[str]) -> Iterator[ScoredRow]:
        """Scores of rows in their order, ``in_flight`` requests at a time.

        Args:
            rows: Token ids.
            names: How errors call each row.

        Raises:
            GdistillError: If the server fails for good, or answers about something else.
        """
        with ThreadPoolExecutor(self.settings.in_flight) as threads:
            try:
                yield from threads.map(self._score, rows, names)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _score(self, token_ids: Sequence[int], name: str) -> ScoredRow:
        where = f"{self.settings.url}, {name}"
        body = self._request([int(token) for token in token_ids])
        response = self._asked("POST", PATHS[self.settings.dialect], body, where)
        if (found := response.get("model", self.model)) != self.model:
            raise GdistillError(
                "the engine's model changed",
                where=where,
                got=found,
                expected=self.model,
                remedy="serve the model that the run began with, then run the same command again",
            )
        sizes = {"vocab_size": self.vocab_size, "num_top": self.settings.num_top}
        return row_of_response(response, token_ids, **sizes, where=where)

    def _request(self, ids: list[int]) -> dict[str, Any]:
        num_top = self.settings.num_top
        if self.settings.dialect == "sglang":
            return {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": num_top,
            }
        asked = {"prompt_logprobs": num_top}
        if self.settings.dialect == "echo":
            asked = {"echo": True, "logprobs": num_top}
        return {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "return_tokens_as_token_ids": True,
            **asked,
        }

    def require_unchanged(self, token_ids: Sequence[int], log_probs: np.ndarray) -> None:
        """Score a row again that was scored when the store was begun.

        Args:
            token_ids: The row.
            log_probs: [L] nats, what the engine said then.

        Raises:
            GdistillError: If another model answers under the same name.
        """
        again = self._score(token_ids, "the first row, scored again").token_log_probs
        change = float(np.abs(again[1:] - np.asarray(log_probs)[1:]).mean())
        if change > MAX_MEAN_CHANGE_NATS:
            raise GdistillError(
                "the engine's model changed under the same name",
                where=self.settings.url,
                got=f"log p of the first row moved by {change:.3f} nats a token",
                expected=f"at most {MAX_MEAN_CHANGE_NATS}",
                remedy="serve the model that the run began with, then run the same command again",
            )

    def _asked(self, method: str, path: str, body: Any = None, where: str = "") -> dict[str, Any]:
        where, seconds = where or self._base + path, self.settings.timeout_seconds
        try:
            answer = self._session.request(method, self._base + path, json=body, timeout=seconds)
        except requests.RequestException as error:
            inner = error.args[0] if error.args else error
            raise _failed(where, str(getattr(inner, "reason", inner))) from error
        if answer.status_code != 200:
            raise _failed(where, f"{answer.status_code} {answer.text[:200]}")
        try:
            value = answer.json()
        except ValueError as error:
            raise _failed(where, f"no JSON: {answer.content[:80]!r}") from error
        if not isinstance(value, dict):
            raise _failed(where, f"no JSON object: {answer.content[:80]!r}")
        return value


def _failed(where: str, got: str) -> GdistillError:
    return GdistillError(
        "the engine does not answer",
        where=where,
        got=" ".join(got.split()),
        remedy="see the server's log, then run the same command again: shards are kept",
    )


# The run.


Fetch = Callable[[ShardRange, np.ndarray], Sequence[ScoredRow]]
"""Scores of some rows of a split, given their range and their token ids [n, L]."""


def run_scored(request: ExtractRequest, worker: Worker) -> list[str]:
    """Do whatever of the run is not done yet; what there is to say at the end.

    Raises:
        UsageError: If the request does not fit an engine's scores.
        GdistillError: If scores cannot be used or the engine fails; finished shards are kept.
    """
    started = time.monotonic()
    tokenizer = require_tokenizer(request)
    codec = require_posterior(request, len(tokenizer))
    require_writable(request.out)
    prepare = open_files if request.settings.engine.url is None else ask_engine
    fetch, identity, dataset = prepare(request, codec, tokenizer, worker)
    manifest = build_manifest(request, dataset, identity)
    resources = {"unigram_log_probs": corpus_unigram(dataset)}
    sides = side_files(request.corpus, dataset)
    writer = ShardWriter.create_or_resume(request.store, manifest, resources, sides)
    write_config(request.out / "config.json", request)
    tensors = {name: torch.from_numpy(array) for name, array in resources.items()}
    work = ScoreWriter(fetch, dataset, codec, writer, tensors, StopRequest())
    write_all(work, writer.all_pending(), worker, "scores")
    seconds = time.monotonic() - started - work.seconds_waiting
    lines = report(request, dataset, writer, work.num_extracted_tokens, seconds)
    return lines if worker.is_main else []


def require_posterior(request: ExtractRequest, vocab_size: int) -> PosteriorCodec:
    """The codec, if the most probable tokens are enough for it; else a UsageError."""
    codec = request.codec
    if request.settings.mode != "parallel":
        raise UsageError("an engine scores rows, it writes none", where="--mode", got="sequential")
    if not isinstance(codec, PosteriorCodec) or codec.num_entries >= vocab_size:
        whole = isinstance(codec, PosteriorCodec)
        raise UsageError(
            "this codec needs the teacher's whole distribution, which engines do not give",
            where="codec.num_entries" if whole else "--codec",
            got=codec.num_entries if whole else codec.name,
            expected=f"below the vocabulary's {vocab_size}" if whole else "posterior",
        )
    return codec


def require_tokenizer(request: ExtractRequest) -> PreTrainedTokenizerBase:
    """The tokenizer of the engine's model; a UsageError if none is named."""
    if request.settings.teacher.tokenizer is None:
        raise UsageError(
            "no tokenizer",
            where="--tokenizer",
            expected="folder or hub id of the tokenizer that the engine's model uses",
        )
    return load_tokenizer(request.settings.teacher.tokenizer)


Prepared = tuple[Fetch, dict[str, Any], TokenDataset]
"""Where scores come from, their identity for the manifest, and the rows."""


def open_files(
    request: ExtractRequest, codec: PosteriorCodec, tokenizer: PreTrainedTokenizerBase, _: Worker
) -> Prepared:
    """Rows that lie scored in files, the last ones for validation; all are checked on the way."""
    pattern = scheme_of(request.corpus.source)[1]
    paths = [Path(name) for name in sorted(glob.glob(pattern))]
    if not paths:
        raise UsageError("no such file", where="--from-logprobs", got=pattern)
    files = ScoreFiles.open(paths, len(tokenizer), codec.num_entries)
    if not files.num_rows:
        raise UsageError("the files have no rows", where="--from-logprobs", got=pattern)
    fraction = request.corpus.validation_fraction
    border = files.num_rows - max(round(files.num_rows * fraction), int(fraction > 0))
    splits = {"train": range(border), "validation": range(border, files.num_rows)}
    row_length = request.corpus.row_length or len(files.read(0, 1)[0].token_ids)

    def blocks(places: range) -> Iterator[np.ndarray]:
        for part in (places[start : start + 256] for start in range(0, len(places), 256)):
            rows = files.read(part.start, part.stop)
            yield same_length(rows, row_length, f"rows from {part.start + 1}")

    def fetch(part: ShardRange, tokens: np.ndarray) -> Sequence[ScoredRow]:
        first = splits[part.split].start
        return files.read(first + part.start, first + part.stop)

    corpus = {"source": request.corpus.source, "sha256": files.sha256, "row_length": row_length}
    given = {split: blocks(places) for split, places in splits.items()}
    dataset = write_given_rows(given, row_length, tokenizer, request.out, corpus)
    identity = {"id": "scores", "scores_sha256": files.sha256, "num_top": files.num_top}
    return fetch, identity, dataset


def ask_engine(
    request: ExtractRequest, _: PosteriorCodec, tokenizer: PreTrainedTokenizerBase, worker: Worker
) -> Prepared:
    """A server, once it is known to score such rows and to be the one that the run began with."""
    engine, request = checked_engine(request, tokenizer)
    dataset = tokenize(request, tokenizer, worker)
    split = next(split for split in dataset.splits if dataset.num_rows(split))
    first = dataset.read_rows(split, 0, 1)[0].tolist()
    record, identity = request.out / ENGINE_FILE, engine.identity()
    if record.exists():
        known = json.loads(record.read_text(encoding="utf-8"))
        engine.require_unchanged(first, np.asarray(known["log_probs"], np.float32))
    else:
        (row,) = engine.score([first], ["the first row"])
        write_json_atomic(record, {**identity, "log_probs": row.token_log_probs.tolist()})

    def fetch(part: ShardRange, tokens: np.ndarray) -> Sequence[ScoredRow]:
        names = [f"{part.split} row {part.start + i}" for i in range(len(tokens))]
        return list(engine.score(tokens.tolist(), names))

    return fetch, identity, dataset


def checked_engine(
    request: ExtractRequest, tokenizer: PreTrainedTokenizerBase
) -> tuple[Engine, ExtractRequest]:
    """The server, and the request with its row length settled: what would fail does so here.

    Raises:
        UsageError: If the server cannot score such rows.
        GdistillError: If it cannot be reached.
    """
    engine = Engine(request.settings.engine, len(tokenizer))
    limit = engine.row_limit
    request = request.with_row_length(limit)
    if limit is not None and (request.corpus.row_length or 0) > limit:
        raise UsageError(
            "rows are longer than the engine can score",
            where=f"row_length, {engine.settings.url}",
            got=request.corpus.row_length,
            expected=f"at most {limit}: the server's context is {limit + 1}, and it writes a token",
            remedy=f"--row-length {limit}",
        )
    engine.try_out()
    return engine, request


@dataclass
class ScoreWriter:
    """Writes every shard that no other process writes, from scores that ``fetch`` gives."""

    fetch: Fetch
    dataset: TokenDataset
    codec: PosteriorCodec
    writer: ShardWriter
    resources: dict[str, torch.Tensor]
    stop: StopRequest
    num_extracted_tokens: int = 0
    seconds_waiting: float = field(default=0.0, init=False)

    def run(self, shards: list[ShardRange], worker: Worker, bar: Bar) -> None:
        """Returns when all shards are done, whoever did them.

        Raises:
            Stopped: If the process was asked to end; finished shards are kept.
            GdistillError: For scores that cannot be used, or an engine that fails.
        """
        held = [shard for shard in worker.order(shards) if not self._write_free(shard, bar)]
        while held:
            bar.note(f"waiting for {held[0]}")
            self.stop.pause(POLL_SECONDS)
            self.seconds_waiting += POLL_SECONDS
            held = [shard for shard in held if not self._write_free(shard, bar)]

    def _write_free(self, shard: ShardRange, bar: Bar) -> bool:
        """Whether the shard is done now; a free one is done here."""
        self.stop.check()
        with self.writer.claim(shard) as mine:
            if not mine:
                return self.writer.is_done(shard)
            bar.note(str(shard))
            parts = []
            for start in range(shard.start, shard.stop, ROWS_AT_ONCE):
                self.stop.check()
                stop = min(start + ROWS_AT_ONCE, shard.stop)
                part = ShardRange(shard.split, shard.index, start, stop)
                tokens = self.dataset.read_rows(part.split, part.start, part.stop)
                parts.append(self._encode(part, tokens, self.fetch(part, tokens)))
                bar.advance(tokens.size)
            arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            self.writer.write(shard, arrays)
        self.num_extracted_tokens += shard.num_rows * self.dataset.row_length
        return True

    def _encode(
        self, part: ShardRange, tokens: np.ndarray, rows: Sequence[ScoredRow]
    ) -> dict[str, np.ndarray]:
        if not np.array_equal(same_length(rows, tokens.shape[1], str(part)), tokens):
            raise GdistillError("the scores are of other rows", where=part)
        names = ("top_ids", "top_log_probs", "token_ids", "token_log_probs")
        stacked = [np.stack([getattr(row, name)[1:] for row in rows]) for name in names]
        ids, logs, own, own_logs = (torch.from_numpy(value).flatten(0, 1) for value in stacked)
        encoded = self.codec.encode_likeliest(ids, logs, own, own_logs, self.resources)
        arrays, shape = {"token_log_probs": own_logs, **encoded}, (len(rows), tokens.shape[1] - 1)
        unflat = {name: value.unflatten(0, shape) for name, value in arrays.items()}
        return {"tokens": tokens, **{name: with_position_0(v) for name, v in unflat.items()}}
