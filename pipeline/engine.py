"""Extraction by a teacher that runs elsewhere: vLLM or SGLang is asked, or files hold the scores.

``scores:GLOB`` as the corpus reads files of scored rows; ``engine.url`` has a running server score
the rows of any corpus. Either way stage 1 writes token rows, the store is ``posterior``, and
ledger, claims and resume are those of every extraction.

With ``teacher.location`` beside ``engine.url`` a vLLM gives the state behind its last layer in
place of scores (:mod:`trainer.serving.states`). Norm and output layer are the folder's, so the
whole distribution is known, and every codec can store it (:class:`StatesTeacher`).

429, 5xx and cut connections are tried again with growing pauses (``Retry-After`` is honoured); any
other refusal ends the run with the server's own words. A server is known by its model's name, and
by log p of the first row, which every later run scores again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import requests
import torch
import urllib3
from jaxtyping import Float, Int
from requests.adapters import HTTPAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import scheme_of
from pipeline.corpus.documents import expand
from pipeline.extract import ShardWork, resources_on, with_position_0
from pipeline.run import begin_store, build_manifest, corpus_unigram, report, run_extraction, token_lines, tokenize
from pipeline.scored import ScoredRow, ScoreFiles, row_of_response, same_length
from pipeline.settings import EngineSettings, ExtractRequest, Worker
from pipeline.teacher import RawLogits, Teacher
from pipeline.tokens.dataset import PartWriter, Split, TokenDataset, check_identity, publish_rows
from pipeline.tokens.tokenizer import load_tokenizer, tokenizer_sha256
from shards.atomic import file_claim, require_writable, write_json_atomic
from shards.codec.posterior import PosteriorCodec
from shards.console import Bar, without_library_bars
from shards.errors import GdistillError, UsageError
from shards.language_model.loading import CausalModel, PretrainedFiles
from shards.store.manifest import ShardRange

MAX_MEAN_CHANGE_NATS = 0.05
"""Between two scorings of a row by one model: bf16 kernels differ with the batch, models more."""
MAX_STATE_ERROR_NATS = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Between log p of a token by its state and by the engine's scores, by the engine's precision."""
STATES_PAGE = "start vLLM as docs/engines.md says"
TRIED_IDS = 12
ENGINE_FILE = "engine.json"
SAME_MODEL = "serve the model that the run began with, then run the same command again"
ROWS_AT_ONCE = 64
"""Rows fetched from files or an engine between two looks at whether the process was asked to stop."""
PATHS = {"prompt_logprobs": "/v1/completions", "sglang": "/generate"}
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
        retry = urllib3.Retry(
            settings.max_tries - 1,
            connect=min(2, settings.max_tries - 1),  # who is not there is known at once
            backoff_factor=0.5,
            backoff_jitter=0.25,
            backoff_max=60,
            status_forcelist=(429, 500, 502, 503, 504),
            allowed_methods=None,
            raise_on_status=False,
        )
        adapter = HTTPAdapter(pool_maxsize=settings.in_flight, pool_block=True, max_retries=retry)
        self._session.mount(self._base, adapter)

    @cached_property
    def _card(self) -> Mapping[str, Any]:
        """What ``/v1/models`` says of the model that is asked."""
        listed = self._asked("GET", "/v1/models").get("data") or []
        cards = {str(card.get("id")): card for card in listed if isinstance(card, Mapping)}
        wanted = self.settings.model or (next(iter(cards)) if len(cards) == 1 else None)
        if wanted in cards:
            return cards[wanted]
        what = "no model is named" if wanted is None else "the engine does not serve this model"
        where, expected, remedy = self.settings.url, f"one of {[*cards]}", "--set engine.model=NAME"
        raise UsageError(what, where=where, got=wanted, expected=expected, remedy=remedy)

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
        asked = {"num_top": self.settings.num_top, "temperature": 1.0}
        return {"id": self.model, "engine_version": self.version, **asked}

    def try_out(self) -> None:
        """Score a dozen ids: what the server refuses for every row is known before stage 1.

        Raises:
            UsageError: If it gives no log-probabilities of a prompt, or fewer than asked for.
        """
        length = min(TRIED_IDS, self.row_limit or TRIED_IDS)
        ids = [self.vocab_size * i // length for i in range(length)]
        try:
            self._score(ids, "a dozen ids, to try it out")
        except GdistillError as error:
            what, most = f"the engine cannot be used: {error.what}", self.settings.num_top
            remedy = f"it must give {most} log-probabilities at every position of a prompt"
            remedy += f" (engine.num_top; vLLM: --max-logprobs {most}; SGLang: engine.dialect=sglang)"
            facts = {"where": error.where, "got": error.got, "expected": error.expected}
            raise UsageError(what, **facts, remedy=remedy) from error

    def score(self, rows: Sequence[Sequence[int]], names: Sequence[str]) -> Iterator[ScoredRow]:
        """Scores of rows in their order, ``in_flight`` requests at a time.

        Args:
            rows: Token ids.
            names: How errors call each row.

        Raises:
            GdistillError: If the server fails for good, or answers about something else.
        """
        return (row for row, _ in self._each(rows, names))

    def states(
        self, rows: Int[Tensor, "b l"], names: Sequence[str], dtype: str
    ) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b l d"]]:
        """log p of the rows' tokens, nats, and the state behind the last layer at each.

        Raises:
            GdistillError: Also if states cannot be read here, or are of other tokens.
            UsageError: If the engine gives none, or computes in another precision than ``dtype``.
        """
        ids, named = rows.tolist(), [f"{self.settings.url}, {name}" for name in names]
        scored, answers = zip(*self._each(ids, names), strict=True)
        found = map(_states_of, answers, ids, named, [dtype] * len(ids))
        own = [torch.from_numpy(row.token_log_probs) for row in scored]
        return torch.stack(own), torch.stack([*found])

    def _each(self, rows: Sequence[Sequence[int]], names: Sequence[str]) -> Iterator[tuple[ScoredRow, dict[str, Any]]]:
        with ThreadPoolExecutor(self.settings.in_flight) as threads:
            try:
                yield from threads.map(self._score, rows, names)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _score(self, token_ids: Sequence[int], name: str) -> tuple[ScoredRow, dict[str, Any]]:
        where = f"{self.settings.url}, {name}"
        body = self._request([int(token) for token in token_ids])
        response = self._asked("POST", PATHS[self.settings.dialect], body, where)
        if (found := response.get("model", self.model)) != self.model:
            what, wanted = "the engine's model changed", self.model
            raise GdistillError(what, where=where, got=found, expected=wanted, remedy=SAME_MODEL)
        sizes = {"vocab_size": self.vocab_size, "num_top": self.settings.num_top}
        return row_of_response(response, token_ids, **sizes, where=where), response

    def _request(self, ids: list[int]) -> dict[str, Any]:
        num_top = self.settings.num_top
        if self.settings.dialect == "sglang":
            sampling = {"max_new_tokens": 1, "temperature": 1.0}
            asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": num_top}
            return {"input_ids": ids, "sampling_params": sampling, **asked}
        asked = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": num_top}
        return {"model": self.model, "prompt": ids, **asked}

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
    remedy = "see the server's log, then run the same command again: shards are kept"
    what, got = "the engine does not answer", " ".join(got.split())
    return GdistillError(what, where=where, got=got, remedy=remedy)


# Hidden states.


def _states_of(response: Mapping[str, Any], sent: list[int], where: str, dtype: str) -> Float[Tensor, "l d"]:
    """What vLLM wrote of one request; the file is deleted once it is known to be that."""
    path = (response.get("kv_transfer_params") or {}).get("hidden_states_path")
    if not isinstance(path, str):
        raise UsageError("the engine gives no hidden states", where=where, got=sorted(response), remedy=STATES_PAGE)
    try:
        with open(f"{path}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)  # the engine's while it writes
            found = load_file(path)
        ids, states = found["token_ids"].tolist(), found["hidden_states"][:, -1]
    except (OSError, SafetensorError, LookupError) as error:
        what, got = "the engine's hidden states cannot be read", f"{type(error).__name__}: {error}"
        remedy = "run where the engine's shared_storage_path can be read, under the same name"
        raise GdistillError(what, where=where, got=got, remedy=remedy) from error
    if ids != sent or len(states) != len(sent):
        got, expected = f"{len(states)} states, ids {ids[:5]} ...", f"{len(sent)}, {sent[:5]} ..."
        what = "the engine's hidden states are of other tokens"
        raise GdistillError(what, where=f"{where}, {path}", got=got, expected=expected)
    if (got := str(states.dtype).removeprefix("torch.")) != dtype:
        what = "the engine computes in another precision"
        remedy = f"--dtype {got}, or start the engine with --dtype {dtype}"
        raise UsageError(what, where=where, got=got, expected=dtype, remedy=remedy)
    for name in (path, f"{path}.lock"):
        Path(name).unlink(missing_ok=True)
    return states


class StatesTeacher(Teacher):
    """A teacher whose layers run in an engine; norm and output layer run here.

    Every row's states must give the log p of its tokens that the engine itself told of it: states
    of another request, or of another layer, do not pass.
    """

    engine: Engine

    def __init__(self, loaded: CausalModel, vocab_size: int) -> None:
        super().__init__(loaded, vocab_size)
        inner = loaded.network.get_decoder().children()
        norms = [each for each in inner if "norm" in type(each).__name__.lower()]
        if not norms:
            what = "this teacher has no norm behind its last layer"
            raise UsageError(what, where=self.files.name, remedy="extract with --teacher alone")
        self._norm = norms[-1]

    @torch.inference_mode()
    def forward(self, rows: Int[Tensor, "b l"], row_ids: Int[Tensor, "b"], need_hidden: bool = False) -> RawLogits:
        """See :class:`Teacher`.

        Raises:
            UsageError: Also if the engine computes in another precision.
            GdistillError: Also for states that are not those of the row.
        """
        url, name = self.engine.settings.url, self.files.name
        named = [f"row {number}" for number in row_ids.tolist()]
        said, states = self.engine.states(rows, named, self.dtype)
        tokens, head = rows[:, 1:].to(self.device), self._require_head()
        hidden = self._norm(states[:, :-1].to(self.device))
        logits = head(hidden)
        self._forget()
        own = logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)
        error = (own.cpu() - said[:, 1:]).abs()
        most, place = error.flatten().max(0)
        if not most <= MAX_STATE_ERROR_NATS[states.dtype]:
            row, position = divmod(int(place), error.shape[1])
            what = "the engine's hidden state does not give its own log p"
            where = f"{url}, row {int(row_ids[row])}, position {position + 1}"
            got, expected = (f"{v[row, position]:.4f} nats" for v in (own, said[:, 1:]))
            remedy = f"is it the state behind the last layer of {name}? {STATES_PAGE}"
            raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
        return RawLogits(logits, tokens, row_ids.to(self.device), hidden if need_hidden else None)


def _run_states(request: ExtractRequest, worker: Worker) -> list[str]:
    engine, request = _checked_engine(request, _require_tokenizer(request))

    def load(files: PretrainedFiles, *given: Any, **how: Any) -> Teacher:
        with without_library_bars(reports=False):  # of the layers' weights, which are left out
            teacher: Any = StatesTeacher.load(without_layers(files), *given, **how)
        teacher.engine = engine
        return teacher

    return run_extraction(request, worker, load)


def without_layers(files: PretrainedFiles) -> PretrainedFiles:
    """The same model, of which only what stands before the layers and behind them is to be loaded."""
    config = deepcopy(files.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return replace(files, config=config)


# The run.


Fetch = Callable[[ShardRange, np.ndarray], Sequence[ScoredRow]]
"""Scores of some rows of a split, given their range and their token ids [n, L]."""
Prepared = tuple[Fetch, dict[str, Any], TokenDataset]
"""Where scores come from, their identity for the manifest, and the rows."""


def run_scored(request: ExtractRequest, worker: Worker, tokens_only: bool = False) -> list[str]:
    """Do whatever is not done yet of a run whose teacher runs elsewhere; what there is to say at the end.

    Raises:
        UsageError: If the request cannot be met, or differs from what is there.
        GdistillError: If the corpus or scores cannot be used, or the engine fails; finished shards
            are kept.
    """
    if request.settings.mode != "parallel":
        raise UsageError("an engine scores rows, it writes none", where="--mode", got="sequential")
    if not tokens_only:
        return _run_states(request, worker) if request.settings.has_states else _run_scores(request, worker)
    require_writable(request.out)
    if request.settings.engine.url is None:
        raise UsageError("scored rows are tokens already", where="--corpus")
    tokenizer = _require_tokenizer(request)
    _, request = _checked_engine(request, tokenizer)
    return token_lines(tokenize(request, tokenizer, worker), worker)


def _run_scores(request: ExtractRequest, worker: Worker) -> list[str]:
    tokenizer, codec = _require_tokenizer(request), request.codec
    what = "this codec needs the teacher's whole distribution, and scores are not that"
    if not isinstance(codec, PosteriorCodec):
        expected, remedy = "posterior", "with --teacher DIR a vLLM gives hidden states"
        raise UsageError(what, where="--codec", got=codec.name, expected=expected, remedy=remedy)
    if codec.num_entries >= len(tokenizer):
        where, expected = "codec.num_entries", f"below the vocabulary's {len(tokenizer)}"
        raise UsageError(what, where=where, got=codec.num_entries, expected=expected)
    require_writable(request.out)
    if request.settings.engine.url is None:
        fetch, identity, dataset = _open_files(request, codec, tokenizer)
    else:
        fetch, identity, dataset = _ask_engine(request, tokenizer, worker)
    manifest = build_manifest(request, dataset, identity)
    resources = {"unigram_log_probs": corpus_unigram(dataset)}
    writer = begin_store(request, dataset, manifest, resources)
    tensors = resources_on(torch.device("cpu"), resources)
    work = ScoreWriter(writer=writer, codec=codec, resources=tensors, dataset=dataset, fetch=fetch)
    work.write_all(worker, "scores")
    lines = report(request, dataset, writer, work.num_extracted_tokens, work.seconds)
    return lines if worker.is_main else []


def _require_tokenizer(request: ExtractRequest) -> PreTrainedTokenizerBase:
    """The tokenizer of the engine's model; a UsageError if none is named."""
    place = request.settings.teacher.tokenizer or request.settings.teacher.location
    if place is None:
        expected = "folder or hub id of the tokenizer that the engine's model uses"
        raise UsageError("no tokenizer", where="--tokenizer", expected=expected)
    return load_tokenizer(place)


def _open_files(request: ExtractRequest, codec: PosteriorCodec, tokenizer: PreTrainedTokenizerBase) -> Prepared:
    """Rows that lie scored in files, the last ones for validation; all are checked on the way."""
    pattern = scheme_of(request.corpus.source)[1]
    files = ScoreFiles.open(expand(pattern), len(tokenizer), codec.num_entries)
    if not files.num_rows:
        raise UsageError("the files have no rows", where="--from-logprobs", got=pattern)
    fraction = request.corpus.validation_fraction
    held_out = max(round(files.num_rows * fraction), int(fraction > 0))
    border = files.num_rows - min(held_out, files.num_rows - int(fraction < 1))  # a row at least to train
    splits = {"train": range(border), "validation": range(border, files.num_rows)}
    row_length = request.corpus.row_length or len(files.read(0, 1)[0].token_ids)

    def fetch(part: ShardRange, tokens: np.ndarray) -> Sequence[ScoredRow]:
        first = splits[part.split].start
        return files.read(first + part.start, first + part.stop)

    corpus = {"source": request.corpus.source, "sha256": files.sha256, "row_length": row_length}
    own = {"sha256": tokenizer_sha256(tokenizer), "vocab_size": len(tokenizer)}
    identity = {"corpus": corpus, "special_ids": {}, "tokenizer": own, "sources": {}}
    done, work = request.out / "tokens", request.out / ".tokens.partial"
    scores = {"id": "scores", "scores_sha256": files.sha256, "num_top": files.num_top}
    with file_claim(request.out / ".tokens.lock", wait=True):
        if done.exists():
            dataset = TokenDataset.open(done)
            found = dataset.record["identity"]
            moved = {**corpus, "source": found["corpus"].get("source")}  # where the files lie says nothing
            check_identity(found, {**identity, "corpus": moved}, done)
            for split, places in splits.items():
                if (rows := dataset.num_rows(split)) != len(places):
                    what, where = "the token rows here were split otherwise", f"{done}: {split}"
                    remedy = f"choose another output folder, or remove {done}"
                    raise UsageError(what, where=where, got=rows, expected=len(places), remedy=remedy)
            return fetch, scores, dataset
        shutil.rmtree(work, ignore_errors=True)
        parts = {}
        for split, places in splits.items():
            writer, closed = PartWriter(work / split, row_length), []
            for start in places[::ROWS_AT_ONCE]:
                rows = files.read(start, min(start + ROWS_AT_ONCE, places.stop))
                writer.write(same_length(rows, row_length, f"rows from {start + 1}"))
                if writer.is_full:
                    closed.append(writer.close())
            parts[split] = Split([part for part in [*closed, writer.close()] if part is not None])
        border_ids = {"bos_id": tokenizer.bos_token_id, "eos_id": tokenizer.eos_token_id}
        return fetch, scores, publish_rows(request.out, parts, identity, corpus, tokenizer, border_ids)


def _ask_engine(request: ExtractRequest, tokenizer: PreTrainedTokenizerBase, worker: Worker) -> Prepared:
    """A server, once it is known to score such rows and to be the one that the run began with."""
    engine, request = _checked_engine(request, tokenizer)
    dataset = tokenize(request, tokenizer, worker)
    split = next(split for split in dataset.splits if dataset.num_rows(split))
    record, identity = request.out / ENGINE_FILE, engine.identity()
    (row,) = engine.score(dataset.read_rows(split, 0, 1).tolist(), ["the first row"])
    own, rows, known = row.token_log_probs, dataset.fingerprint, {}
    try:
        known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        known = known if known.get("fingerprint", rows) == rows else {}  # of rows that are gone
        change = float(np.abs(own - np.asarray(known.get("log_probs", own), np.float32))[1:].mean())
    except (ValueError, AttributeError, TypeError) as error:
        what, remedy = "cannot read what the engine gave before", "remove the file, if the model is the same"
        raise GdistillError(what, where=record, got=error, remedy=remedy) from error
    if not change <= MAX_MEAN_CHANGE_NATS:
        what, where = "the engine's model changed under the same name", request.settings.engine.url
        got = f"log p of the first row moved by {change:.3f} nats a token, more than {MAX_MEAN_CHANGE_NATS}"
        raise GdistillError(what, where=where, got=got, remedy=SAME_MODEL)
    if not known:
        write_json_atomic(record, {**identity, "fingerprint": rows, "log_probs": own.tolist()})

    def fetch(part: ShardRange, tokens: np.ndarray) -> Sequence[ScoredRow]:
        names = [f"{part.split} row {part.start + i}" for i in range(len(tokens))]
        return list(engine.score(tokens.tolist(), names))

    return fetch, identity, dataset


def _checked_engine(request: ExtractRequest, tokenizer: PreTrainedTokenizerBase) -> tuple[Engine, ExtractRequest]:
    """The server, and the request with its row length settled: what would fail does so here.

    Raises:
        UsageError: If the server cannot score such rows.
        GdistillError: If it cannot be reached.
    """
    asked = request.settings.engine
    if request.settings.has_states:
        asked = replace(asked, num_top=1)  # the token's own is enough
    engine = Engine(asked, len(tokenizer))
    limit = engine.row_limit
    request = request.with_row_length(limit)
    length = request.corpus.row_length
    if limit is not None and (length or 0) > limit:
        what, where = "rows are longer than the engine can score", f"row_length, {asked.url}"
        expected = f"at most {limit}: the server's context is {limit + 1}, and it writes a token"
        raise UsageError(what, where=where, got=length, expected=expected, remedy=f"--row-length {limit}")
    if not request.settings.has_states:  # they are tried with the teacher
        engine.try_out()
    return engine, request


@dataclass(kw_only=True)
class ScoreWriter(ShardWork):
    """Writes every shard that no other process writes, from scores that ``fetch`` gives."""

    codec: PosteriorCodec
    dataset: TokenDataset
    fetch: Fetch

    def extract(self, shard: ShardRange, claim: ExitStack, bar: Bar) -> None:
        with claim:
            parts = []
            for start in range(shard.start, shard.stop, ROWS_AT_ONCE):
                self.stop.check()
                part = replace(shard, start=start, stop=min(start + ROWS_AT_ONCE, shard.stop))
                tokens = self.dataset.read_rows(part.split, part.start, part.stop)
                parts.append(self._encode(part, tokens, self.fetch(part, tokens)))
                bar.advance(tokens.size)
            arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            self.write(shard, arrays)

    def _encode(self, part: ShardRange, tokens: np.ndarray, rows: Sequence[ScoredRow]) -> dict[str, np.ndarray]:
        if not np.array_equal(same_length(rows, tokens.shape[1], str(part)), tokens):
            raise GdistillError("the scores are of other rows", where=part)
        names = ("top_ids", "top_log_probs", "token_ids", "token_log_probs")
        stacked = [np.stack([getattr(row, name)[1:] for row in rows]) for name in names]
        ids, logs, own, own_logs = (torch.from_numpy(value).flatten(0, 1) for value in stacked)
        encoded = self.codec.encode_likeliest(ids, logs, own, own_logs, self.resources)
        arrays, shape = {"token_log_probs": own_logs, **encoded}, (len(rows), tokens.shape[1] - 1)
        unflat = {name: value.unflatten(0, shape) for name, value in arrays.items()}
        return {"tokens": tokens, **{name: with_position_0(v) for name, v in unflat.items()}}
