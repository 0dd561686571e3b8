"""A real HTTP server on loopback that answers as inference engines do, and errs when told to."""

from __future__ import annotations

import json
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


class EngineServer:
    """Answers ``/v1/models``, ``/version`` and ``/v1/completions`` from a model folder.

    Attributes:
        misdeeds: What happens to the next requests for scores: an HTTP status, ``cut`` (the
            connection closes), ``text`` (no JSON), ``drop_top`` or ``other_tokens``; of states
            ``no_states``, ``no_file``, ``other_ids``, ``shifted_states`` or ``bfloat16``.
        name: The model's name in answers; may be changed while it runs.
        shift_nats: Added to every logit of token 3: another model under the same name.
        context: What ``/v1/models`` says, and beyond which a row and one token are refused.
        most_top: Log-probabilities at a position that may be asked for.
        padding: Ids beyond the tokenizer, to each of which the model gives a high probability.
        states: Folder that hidden states go to, as vLLM's connector writes them; None for none.
    """

    def __init__(self, folder: Path, dialect: str = "prompt_logprobs") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        self.dialect, self.name, self.shift_nats = dialect, "tiny", 0.0
        self.context: int | None = None
        self.most_top, self.padding = 20, 0
        self.states: Path | None = None
        inner = self.model.get_decoder().children()
        norm = [each for each in inner if "Norm" in type(each).__name__][-1]
        self._last = torch.empty(0)
        norm.register_forward_pre_hook(lambda _, given: setattr(self, "_last", given[0]))
        self.misdeeds: deque[str | int] = deque()
        self.num_scored, self.most_in_flight, self._in_flight = 0, 0, 0
        self._lock = threading.Lock()

    @torch.inference_mode()
    def completion(self, request: dict[str, Any], misdeed: str = "") -> dict[str, Any]:
        """The answer to one request for scores."""
        ids = request["input_ids"] if self.dialect == "sglang" else request["prompt"]
        with self._lock:
            logits = self.model(torch.tensor([ids])).logits[0, :-1].float()
            states = self._last[0][:, None]
        logits[:, 3] += self.shift_nats
        logits = torch.cat([logits, logits.amax(1, keepdim=True).repeat(1, self.padding)], 1)
        log_probs = logits.log_softmax(-1)
        if self.dialect == "sglang":
            return _generated(ids, log_probs, request)
        tops: list[Any] = [None]
        for token, row in zip(ids[1:], log_probs, strict=True):
            chosen = {int(i) for i in row.topk(request["prompt_logprobs"]).indices} | {token}
            tops.append({str(i): {"logprob": float(row[i]), "rank": 1} for i in chosen})
        answer = self._answer({"prompt_logprobs": tops})
        if self.states is not None and misdeed != "no_states":
            path = self.states / f"{uuid.uuid4()}.safetensors"
            Path(f"{path}.lock").touch()
            if misdeed == "shifted_states":
                states = states.roll(1, dims=0)
            if misdeed == "bfloat16":
                states = states.bfloat16()
            told = torch.tensor(ids[::-1] if misdeed == "other_ids" else ids)
            tensors = {"hidden_states": states.contiguous(), "token_ids": told}
            if misdeed != "no_file":
                save_file(tensors, path)
            answer["kv_transfer_params"] = {"hidden_states_path": str(path)}
        return answer

    def refused(self, request: dict[str, Any]) -> str:
        """vLLM's own words for a request that it does not take; empty for one that it does."""
        if (asked := request.get("prompt_logprobs") or 0) > self.most_top:
            return f"Requested prompt logprobs of {asked}, which is greater than max allowed"
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
                    answer = owner.completion(request, str(misdeed))
                    self._send(200, _spoilt(answer, str(misdeed)))

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
