"""Requests without a seed get one, and answers say it: middleware for ``vllm serve``.

``vllm serve MODEL --middleware trainer.serving.asgi.SeededAnswers``: a completion without a seed is
given one, and every answer tells seed and noise, in headers (``x-seed``, ``x-noise``) and, unless
it is streamed, as fields ``seed`` and ``noise`` of its JSON: what a certificate needs later.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from trainer.serving import plugin

NOISE = "murmur3"
PATHS = ("/completions", "/chat/completions")
SEED_BITS = 53
"""What a JSON number keeps in every language."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class SeededAnswers:
    """An ASGI application around the engine's."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One call of the server."""
        is_completion = scope["type"] == "http" and scope["method"] == "POST"
        if not is_completion or not scope["path"].endswith(PATHS):
            return await self.app(scope, receive, send)
        body = await _whole_body(receive)
        try:
            request = json.loads(body)
        except ValueError:
            request = None  # the engine says what is wrong with it
        if not isinstance(request, dict):
            return await self.app(scope, _replay(body, receive), send)
        if request.get("seed") in (None, -1):  # to vLLM both are none
            request["seed"] = secrets.randbits(SEED_BITS)
            body = json.dumps(request).encode()
        headers = [pair for pair in scope["headers"] if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        told = {"seed": request["seed"]}
        if plugin.is_registered:
            told["noise"] = NOISE
        inner = {**scope, "headers": headers}
        return await self.app(inner, _replay(body, receive), _telling(send, told))


async def _whole_body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """What was read is read again; then what comes, such as the caller's leaving."""
    first = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        return next(first, None) or await receive()

    return again


def _telling(send: Send, told: dict[str, Any]) -> Send:
    """Adds what is told to an answer; one that is no JSON object has it in its headers alone."""
    start: Message | None = None
    said = b""

    async def forward(message: Message) -> None:
        nonlocal start, said
        if message["type"] == "http.response.start":
            extra = [(f"x-{name}".encode(), str(value).encode()) for name, value in told.items()]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
            kind = dict(message["headers"]).get(b"content-type", b"")
            if message["status"] != 200 or not kind.startswith(b"application/json"):
                return await send(message)
            start = message
            return None
        if start is None:
            return await send(message)
        said += message.get("body", b"")
        if message.get("more_body", False):
            return None
        answer = json.loads(said)
        if isinstance(answer, dict):
            said = json.dumps({**answer, **told}).encode()
        kept = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
        kept.append((b"content-length", str(len(said)).encode()))
        await send({**start, "headers": kept})
        return await send({**message, "body": said})

    return forward
