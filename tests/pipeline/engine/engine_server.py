"""A real HTTP server on loopback that answers as inference engines do, and errs when told to."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
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

SCORES = {"prompt_logprobs": "/v1/completions", "sglang": "/generate"}
VERSION = {"prompt_logprobs": "/version", "sglang": "/server_info"}


def last_norm(model: Any) -> torch.nn.Module:
    """The norm behind the last layer of a transformer."""
    inner = model.get_decoder().children()
    return [each for each in inner if "Norm" in type(each).__name__][-1]


class EngineServer:
    """Answers ``/v1/models``, ``/version`` and ``/v1/completions`` from a model folder.

    Attributes:
        misdeeds: What happens to the next requests for scores: an HTTP status, ``cut`` (the
            connection closes), ``wait`` (nothing is said for a minute), ``text`` (no JSON), ``list``,
            ``drop_top`` or ``other_tokens``; of states ``no_states``, ``no_file``, ``other_ids``,
            ``shifted_states`` or ``bfloat16``.
        name: The model's name in answers; may be changed while it runs.
        others: Models that it serves beside it.
        shift_nats: Added to every logit of token 3: another model under the same name.
        context: What ``/v1/models`` says, and beyond which a row and one token are refused.
        most_top: Log-probabilities at a position that may be asked for.
        states: Folder that hidden states go to, as vLLM's connector writes them; None for none.
    """

    def __init__(self, folder: Path, dialect: str = "prompt_logprobs") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        self.dialect, self.name, self.shift_nats = dialect, "tiny", 0.0
        self.context: int | None = None
        self.others: list[str] = []
        self.most_top = 20
        self.states: Path | None = None
        self._last = torch.empty(0)
        norm = last_norm(self.model)
        norm.register_forward_pre_hook(lambda _, given: setattr(self, "_last", given[0]))
        self.misdeeds: deque[str | int] = deque()
        self.authorization: str | None = None
        self.says_version = True
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
        log_probs = logits.log_softmax(-1)
        if self.dialect == "sglang":
            return _generated(ids, log_probs, request)
        tops: list[Any] = [None]
        for token, row in zip(ids[1:], log_probs, strict=True):
            chosen = {int(i) for i in row.topk(request["prompt_logprobs"]).indices} | {token}
            tops.append({str(i): {"logprob": float(row[i]), "rank": 1} for i in chosen})
        if misdeed == "drop_top":
            tops[2] = {}
        if misdeed == "other_tokens":
            tops.append(tops[-1])
        choice = {"text": "", "index": 0, "prompt_logprobs": tops}
        answer: dict[str, Any] = {"model": self.name, "choices": [choice]}
        if self.states is not None and misdeed != "no_states":
            path = self._write_states(self.states, ids, states, misdeed)
            answer["kv_transfer_params"] = {"hidden_states_path": path}
        return answer

    def _write_states(self, folder: Path, ids: list[int], states: torch.Tensor, error: str) -> str:
        """Behind a lock, which is held while a thread still writes."""
        path = f"{folder}/{uuid.uuid4()}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if error == "shifted_states":
            states = states.roll(1, dims=0)
        if error == "bfloat16":
            states = states.bfloat16()
        told = torch.tensor(ids[::-1] if error == "other_ids" else ids)

        def write() -> None:
            time.sleep(0.01)
            if error != "no_file":
                save_file({"hidden_states": states.contiguous(), "token_ids": told}, path)
            os.close(lock)

        threading.Thread(target=write).start()
        return path

    def answered(self, request: dict[str, Any], misdeed: str) -> tuple[int, Any]:
        """Status and answer of one request; what it does not take is refused in vLLM's words."""
        how = request.get("sampling_params", request)
        assert (how.get("max_tokens", how.get("max_new_tokens")), how["temperature"]) == (1, 1.0)
        asked = request.get("prompt_logprobs") or 0
        if asked > self.most_top:
            said = f"Requested prompt logprobs of {asked}, which is greater than max allowed"
        elif self.context and len(request.get("prompt", ())) + 1 > self.context:
            said = f"This model's maximum context length is {self.context} tokens"
        else:
            answer = self.completion(request, misdeed)
            return 200, {"text": "text", "list": []}.get(misdeed, answer)
        return 400, {"error": {"message": said}}

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
        pairs = zip(*row.topk(request["top_logprobs_num"]), strict=True)
        tops.append([[float(value), int(i), None] for value, i in pairs])
    meta: dict[str, Any] = {"id": "0", "finish_reason": {"type": "length", "length": 1}}
    meta |= {"input_token_logprobs": own, "input_top_logprobs": tops, "prompt_tokens": len(ids)}
    meta |= {"output_token_logprobs": [[-1.0, 0, None]]}
    meta |= {"output_top_logprobs": [[[-1.0, 0, None]]]}
    return {"text": "", "output_ids": [0], "meta_info": meta}


def _handler(owner: EngineServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            owner.authorization = self.headers["Authorization"]
            cards = [{"id": name, "max_model_len": owner.context} for name in (owner.name, *owner.others)]
            known: dict[str, Any] = {"/v1/models": {"data": cards}}
            known[VERSION[owner.dialect]] = {"version": "0.0.test"} if owner.says_version else {}
            self._send(200 if self.path in known else 404, known.get(self.path, {"error": "who?"}))

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with owner.counted() as misdeed:
                if isinstance(misdeed, int):
                    self._send(misdeed, {"error": "as told"})
                elif misdeed in ("wait", "cut"):
                    time.sleep(60 if misdeed == "wait" else 0)
                    self.close_connection = True
                    self.connection.close()
                elif self.path != SCORES[owner.dialect]:
                    self._send(404, {"error": "no such address"})
                else:
                    self._send(*owner.answered(request, misdeed))

        def _send(self, status: int, value: Any) -> None:
            body = b"not json" if value == "text" else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    return Handler
