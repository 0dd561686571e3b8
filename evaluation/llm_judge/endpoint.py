"""One question to an OpenAI-compatible endpoint, asked again where that can help."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests

from shards.base import GdistillError

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
MAX_WAIT_SECONDS = 60.0


class Faults(Counter[str]):
    """How often each kind of fault was met: ``http 429``, ``timeout``, ``broken answer``, ..."""


@dataclass
class Endpoint:
    """Where questions go.

    Attributes:
        url: Base URL (``http://host:8000/v1``).
        model: The model's name there.
        key: Bearer token; None sends none.
        timeout_seconds: For one answer.
        max_tries: Tries of one question, the first included.
        per_minute: Most questions in a minute; None for no limit.
        temperature: Of the judge's decoding.
        max_tokens: Most tokens of an answer.
        faults: What went wrong so far.
        sleep: Waits; tests give their own.
    """

    url: str
    model: str
    key: str | None = None
    timeout_seconds: float = 120.0
    max_tries: int = 6
    per_minute: float | None = None
    temperature: float = 0.0
    max_tokens: int = 400
    faults: Faults = field(default_factory=Faults)
    sleep: Callable[[float], None] = time.sleep
    _next_at: float = 0.0

    def ask(self, messages: Sequence[dict[str, str]]) -> str:
        """The answer's text.

        Raises:
            GdistillError: When no try succeeded, or the endpoint refuses for good (a wrong key or
                model), with its own words.
        """
        last = "no try"
        for number in range(self.max_tries):
            self._wait_for_turn()
            answer, last, wait = self._try(messages)
            if answer is not None:
                return answer
            if wait is None:
                break
            if number + 1 < self.max_tries:
                self.sleep(min(MAX_WAIT_SECONDS, max(wait, self._back_off(number))))
        raise GdistillError(
            "the endpoint gives no answer",
            where=self.url,
            got=last,
            expected=f"chat completions of {self.model}",
            remedy="check --url, --model and the key; the same command goes on from there",
        )

    def _try(self, messages: Sequence[dict[str, str]]) -> tuple[str | None, str, float | None]:
        """(answer or None, what went wrong, seconds to wait or None where a retry is no use)."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        try:
            response = requests.post(
                f"{self.url.rstrip('/')}/chat/completions",
                json=body,
                headers=headers,
                timeout=self.timeout_seconds,
                allow_redirects=False,  # texts and key go where the user said
            )
        except requests.Timeout:
            return self._fault("timeout", 0.0)
        except requests.RequestException as error:
            return self._fault("connection", 0.0, f"connection: {type(error).__name__}")
        if response.status_code != 200:
            told = f"http {response.status_code}: {' '.join(response.text.split())[:120]}"
            wait = _retry_after(response) if response.status_code in RETRIED else None
            return self._fault(f"http {response.status_code}", wait, told)
        try:
            content = response.json()["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            return self._fault("broken answer", 0.0)
        return (content, "", 0.0) if isinstance(content, str) else self._fault("broken answer", 0.0)

    def _fault(
        self, kind: str, wait: float | None, told: str | None = None
    ) -> tuple[None, str, float | None]:
        self.faults[kind] += 1
        return None, told or kind, wait

    def _back_off(self, number: int) -> float:
        # Half of it at random, so that many askers do not come back together.
        return 2.0**number * random.uniform(0.5, 1.0)

    def _wait_for_turn(self) -> None:
        if self.per_minute is None:
            return
        now = time.monotonic()
        if now < self._next_at:
            self.sleep(self._next_at - now)
        self._next_at = max(now, self._next_at) + 60.0 / self.per_minute


def _retry_after(response: Any) -> float:
    """Seconds that the endpoint asks for; 0 where it does not say, or names a date."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", 0)))
    except ValueError:
        return 0.0
