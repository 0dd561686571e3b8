"""Requests without a seed get one, and answers say it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from trainer.serving import plugin
from trainer.serving.asgi import SeededAnswers


def call(
    body: bytes,
    *,
    path: str = "/v1/completions",
    kind: bytes = b"application/json",
    parts: tuple[bytes, ...] | None = None,
) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """What the engine was asked, and the headers and body that came back."""
    asked, sent = [], []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        asked.append(message["body"])
        assert dict(scope["headers"])[b"content-length"] == str(len(message["body"])).encode()
        said = parts or (b'{"choices": [', b'{"text": "x"}]}')
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, part in enumerate(said, 1):
            more = number < len(said)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-length", str(len(body)).encode())],
    }
    asyncio.run(SeededAnswers(engine)(scope, receive, send))
    answer = b"".join(message["body"] for message in sent[1:])
    return asked[0], dict(sent[0]["headers"]), answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_missing_seed_is_drawn_and_returned(path: str) -> None:
    asked, headers, answer = call(b'{"prompt": "a"}', path=path)
    seed = json.loads(asked)["seed"]
    assert json.loads(asked)["prompt"] == "a"
    assert json.loads(answer)["seed"] == seed == int(headers[b"x-seed"])
    assert json.loads(answer)["choices"] == [{"text": "x"}]
    assert headers[b"content-length"] == str(len(answer)).encode()
    assert json.loads(call(b'{"prompt": "a"}')[0])["seed"] != seed


def test_a_given_seed_is_kept() -> None:
    asked, _, answer = call(b'{"prompt": "a", "seed": 7}')
    assert json.loads(asked)["seed"] == json.loads(answer)["seed"] == 7


def test_noise_is_told_only_where_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "noise" not in json.loads(call(b"{}")[2])
    monkeypatch.setattr(plugin, "is_registered", True)
    assert json.loads(call(b"{}")[2])["noise"] == "murmur3"


def test_a_stream_passes_as_it_comes_and_says_its_seed_in_a_header() -> None:
    parts = (b"data: {}\n\n", b"data: [DONE]\n\n")
    _, headers, answer = call(b"{}", kind=b"text/event-stream", parts=parts)
    assert answer == b"".join(parts)
    assert int(headers[b"x-seed"]) >= 0


@pytest.mark.parametrize("body", [b"not JSON", b"[1, 2]"])
def test_what_is_no_request_is_left_to_the_engine(body: bytes) -> None:
    assert call(body)[0] == body


def test_other_paths_are_left_alone() -> None:
    asked, headers, _ = call(b'{"prompt": "a"}', path="/v1/embeddings")
    assert asked == b'{"prompt": "a"}' and b"x-seed" not in headers
