"""Asks an OpenAI-compatible server for log-probabilities of rows: many at a time, in order.

429, 5xx and cut connections are tried again with growing pauses (``Retry-After`` is honoured); any
other refusal ends the run with the server's own words. Which model answers is asked before and
looked at in every answer: one that changes half-way is refused, by its name or by what it says of
a row that it has scored before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import urllib3

from pipeline.engine.scored import ScoredRow, row_of_response
from shards.errors import GdistillError, UsageError

Dialect = Literal["prompt_logprobs", "echo"]
MAX_MEAN_CHANGE_NATS = 0.05
"""Between two scorings of a row by one model: bf16 kernels differ with the batch, models more."""


@dataclass(frozen=True)
class EngineSettings:
    """A server and how it is asked.

    Attributes:
        url: Its address, with or without ``/v1``; None where no engine is used.
        model: Name of the model to ask; the only one served unless told.
        num_top: m, likeliest tokens asked for at every position; codec.num_entries keeps as many
            unless told. Servers have a limit of their own (vLLM: --max-logprobs, 20).
        in_flight: Requests under way at a time.
        max_tries: Of one request, before the run ends (finished shards are kept).
        timeout_seconds: Longest wait for one answer.
        dialect: ``prompt_logprobs`` (vLLM, SGLang), or ``echo`` for servers that echo the prompt.
        api_key_variable: Environment variable that holds the key, if the server wants one.
    """

    url: str | None = None
    model: str | None = None
    num_top: int = 20
    in_flight: int = 8
    max_tries: int = 8
    timeout_seconds: float = 300.0
    dialect: Dialect = "prompt_logprobs"
    api_key_variable: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        for name in ("num_top", "in_flight", "max_tries"):
            if getattr(self, name) < 1:
                got = getattr(self, name)
                raise UsageError("out of range", where=f"engine.{name}", got=got, expected=">= 1")
        if not self.timeout_seconds > 0:
            raise UsageError("out of range", where="engine.timeout_seconds", expected="above 0")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise UsageError("not an address", where="engine.url", got=self.url, expected="http://")


@dataclass(frozen=True)
class Engine:
    """A connection to the server that ``settings`` names.

    Attributes:
        settings: With its url.
        vocab_size: V of the tokenizer.
    """

    settings: EngineSettings
    vocab_size: int
    _pool: urllib3.PoolManager = field(init=False, repr=False)

    def __post_init__(self) -> None:
        tries = urllib3.Retry(
            total=self.settings.max_tries - 1,
            backoff_factor=0.5,
            backoff_jitter=0.25,
            backoff_max=60,
            status_forcelist=(429, 500, 502, 503, 504),
            allowed_methods=None,
            respect_retry_after_header=True,
            raise_on_status=False,
        )
        pool = urllib3.PoolManager(
            maxsize=self.settings.in_flight,
            block=True,
            retries=tries,
            timeout=urllib3.Timeout(total=self.settings.timeout_seconds),
        )
        object.__setattr__(self, "_pool", pool)

    @cached_property
    def model(self) -> str:
        """The model that is asked; the server's only one unless told.

        Raises:
            UsageError: If the server does not have it, or has several and none was named.
        """
        listed = self._get("/v1/models").get("data") or []
        names = [str(entry.get("id")) for entry in listed if isinstance(entry, Mapping)]
        wanted = self.settings.model
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted in names:
            return str(wanted)
        raise UsageError(
            "which model?" if wanted is None else "the engine does not serve this model",
            where=self.settings.url,
            got=wanted,
            expected=f"one of {names}",
            remedy="--set engine.model=NAME",
        )

    @cached_property
    def version(self) -> str:
        """What the server says of its own version; ``unknown`` where it says nothing."""
        try:
            return str(self._get("/version").get("version", "unknown"))
        except GdistillError:  # not every server has this address
            return "unknown"

    def identity(self) -> dict[str, Any]:
        """What decides the scores, for a store's manifest."""
        settings = self.settings
        return {
            "id": self.model,
            "engine_version": self.version,
            "num_top": settings.num_top,
            "temperature": 1.0,
        }

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
        response = self._post("/v1/completions", self._request(token_ids), where)
        if response.get("model", self.model) != self.model:
            raise GdistillError(
                "the engine's model changed",
                where=where,
                got=response.get("model"),
                expected=self.model,
                remedy="serve the model that the run began with, then run the same command again",
            )
        return row_of_response(
            response,
            token_ids,
            vocab_size=self.vocab_size,
            num_top=self.settings.num_top,
            where=where,
        )

    def _request(self, token_ids: Sequence[int]) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self.model,
            "prompt": [int(token) for token in token_ids],
            "max_tokens": 1,
            "temperature": 1.0,
            "return_tokens_as_token_ids": True,
        }
        if self.settings.dialect == "echo":
            return {**request, "echo": True, "logprobs": self.settings.num_top}
        return {**request, "prompt_logprobs": self.settings.num_top}

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

    def _get(self, path: str) -> dict[str, Any]:
        return self._asked("GET", path, None, f"{self.settings.url}{path}")

    def _post(self, path: str, body: Mapping[str, Any], where: str) -> dict[str, Any]:
        return self._asked("POST", path, json.dumps(body).encode(), where)

    def _asked(self, method: str, path: str, body: bytes | None, where: str) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.settings.api_key_variable)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            answer = self._pool.request(method, self._base + path, body=body, headers=headers)
            text = answer.data
        except urllib3.exceptions.HTTPError as error:
            raise self._failed(where, str(error.__cause__ or error)) from error
        if answer.status != 200:
            raise self._failed(where, f"{answer.status} {text[:200].decode(errors='replace')}")
        try:
            value = json.loads(text)
        except ValueError as error:
            raise self._failed(where, f"no JSON: {text[:80]!r}") from error
        if not isinstance(value, dict):
            raise self._failed(where, f"no JSON object: {text[:80]!r}")
        return value

    @property
    def _base(self) -> str:
        assert self.settings.url is not None
        return self.settings.url.rstrip("/").removesuffix("/v1")

    def _failed(self, where: str, got: str) -> GdistillError:
        return GdistillError(
            "the engine does not answer",
            where=where,
            got=" ".join(got.split()),
            remedy="see the server's log, then run the same command again: shards are kept",
        )
