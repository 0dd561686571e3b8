"""A real HTTP server on loopback that answers as inference engines do, and errs when told to."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class EngineServer:
    """Answers ``/v1/models``, ``/version`` and ``/v1/completions`` from a model folder.

    Attributes:
        misdeeds: What happens to the next requests for scores: an HTTP status, ``cut`` (the
            connection closes), ``text`` (no JSON), ``drop_top`` or ``other_tokens``.
        name: The model's name in answers; may be changed while it runs.
        shift_nats: Added to every logit of token 3: another model under the same name.
        context: What ``/v1/models`` says, and beyond which a row and one token are refused.
        most_top: Log-probabilities at a position that may be asked for.
        padding: Ids beyond the tokenizer, to each of which the model gives a high probability.
    """

    def __init__(self, folder: Path, dialect: str = "prompt_logprobs") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        self.dialect, self.name, self.shift_nats = dialect, "tiny", 0.0
        self.context: int | None = None
        self.most_top, self.padding = 20, 0
        self.misdeeds: deque[str | int] = deque()
        self.num_scored, self.most_in_flight, self._in_flight = 0, 0, 0
        self._lock = threading.Lock()

    @torch.inference_mode()
    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request for scores."""
        ids = request["input_ids"] if self.dialect == "sglang" else request["prompt"]
        logits = self.model(torch.tensor([ids])).logits[0, :-1].float()
        logits[:, 3] += self.shift_nats
        logits = torch.cat([logits, logits.amax(1, keepdim=True).repeat(1, self.padding)], 1)
        log_probs = logits.log_softmax(-1)
        if self.dialect == "sglang":
            return _generated(ids, log_probs, request)
        if self.dialect == "echo":
            return self._answer({"logprobs": _echoed(ids, log_probs, request["logprobs"])})
        tops: list[Any] = [None]
        for token, row in zip(ids[1:], log_probs, strict=True):
            chosen = {int(i) for i in row.topk(request["prompt_logprobs"]).indices} | {token}
            tops.append({str(i): {"logprob": float(row[i]), "rank": 1} for i in chosen})
        return self._answer({"prompt_logprobs": tops})

    def refused(self, request: dict[str, Any]) -> str:
        """vLLM's own words for a request that it does not take; empty for one that it does."""
        asked = [request.get(name) or 0 for name in ("prompt_logprobs", "logprobs")]
        if max(asked) > self.most_top:
            return f"Requested prompt logprobs of {max(asked)}, which is greater than max allowed"
        if self.context and len(request.get("prompt", ())) + 1 > self.context:
            return f"This model's maximum context length is {self.context} tokens"
        return ""

    def _answer(self, scores: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.name, "choices": [{"text": "", "index": 0, **scores}]}

    @contextmanager
    def running(self) -> Iterator[str]:
        """The server's address while the context lasts."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()

    @contextmanager
    def counted(self) -> Iterator[str | int]:
        """One request under way, with what is to go wrong with it."""
        with self._lock:
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            misdeed = self.misdeeds.popleft() if self.misdeeds else ""
        try:
            yield misdeed
        finally:
            with self._lock:
                self._in_flight -= 1
                self.num_scored += 1


def _generated(ids: list[int], log_probs: torch.Tensor, request: dict[str, Any]) -> dict[str, Any]:
    """SGLang's answer: tuples of log p, id and text, of which the texts were not asked for."""
    assert request["return_logprob"] and request["logprob_start_len"] == 0
    own: list[Any] = [[None, ids[0], None]]
    tops: list[Any] = [None]
    for token, row in zip(ids[1:], log_probs, strict=True):
        own.append([float(row[token]), token, None])
        values, chosen = row.topk(request["top_logprobs_num"])
        pairs = zip(values, chosen, strict=True)
        tops.append([[float(value), int(i), None] for value, i in pairs])
    meta = {
        "id": "0", "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": len(ids),
        "input_token_logprobs": own, "input_top_logprobs": tops,
        "output_token_logprobs": [[-1.0, 0, None]], "output_top_logprobs": [[[-1.0, 0, None]]],
    }  # fmt: skip
    return {"text": "", "output_ids": [0], "meta_info": meta}


def _echoed(ids: list[int], log_probs: torch.Tensor, num_top: int) -> dict[str, Any]:
    own = [None, *(float(row[token]) for token, row in zip(ids[1:], log_probs, strict=True))]
    tops: list[Any] = [None]
    for row in log_probs:
        values, chosen = row.topk(num_top)
        tops.append({f"token_id:{int(i)}": float(v) for i, v in zip(chosen, values, strict=True)})
    names = [f"token_id:{token}" for token in ids]
    generated = {"tokens": ["token_id:0"], "token_logprobs": [-1.0], "top_logprobs": [{}]}
    return {
        "tokens": names + generated["tokens"],
        "token_logprobs": own + generated["token_logprobs"],
        "top_logprobs": tops + generated["top_logprobs"],
    }


def _handler(owner: EngineServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                card = {"id": owner.name, "object": "model", "max_model_len": owner.context}
                self._send(200, {"data": [card]})
            elif self.path == ("/server_info" if owner.dialect == "sglang" else "/version"):
                self._send(200, {"version": "0.0.test"})
            else:
                self._send(404, {"error": "no such address"})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with owner.counted() as misdeed:
                if isinstance(misdeed, int):
                    self._send(misdeed, {"error": "as told"}, {"Retry-After": "0"})
                elif misdeed == "cut":
                    self.close_connection = True
                    self.connection.close()
                elif self.path != ("/generate" if owner.dialect == "sglang" else "/v1/completions"):
                    self._send(404, {"error": "no such address"})
                elif said := owner.refused(request):
                    self._send(400, {"error": {"message": said}})
                else:
                    self._send(200, _spoilt(owner.completion(request), str(misdeed)))

        def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
            body = b"not json" if value == "text" else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    return Handler


def _spoilt(answer: dict[str, Any], misdeed: str) -> Any:
    if misdeed == "text":
        return "text"
    if not misdeed:
        return answer
    scores = answer["choices"][0]
    if misdeed == "drop_top":
        scores["prompt_logprobs"][2] = {}
    if misdeed == "other_tokens":
        scores["prompt_logprobs"].append(scores["prompt_logprobs"][-1])
    return answer
