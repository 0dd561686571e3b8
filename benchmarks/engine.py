"""A real vLLM that serves a teacher, and stores of what it says beside the teacher itself.

``make test-engine`` runs it: coupling agreement, the probability that argmax(logits + decoded
noise) is the token, in closed form, and the largest difference of log p of the tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch

from benchmarks.serving import Engine
from pipeline.cli import run
from pipeline.settings import Worker, resolve_request
from shards.store.store import ShardStore

NUM_ROWS, ROW_LENGTH = 64, 256
STARTS_WITHIN_S = 600


def extract(out: Path, text: Path, codec: Mapping[str, Any], teacher: Mapping[str, Any]) -> ShardStore:
    """A store of the text's first rows."""
    given = {
        "corpus": {"spec": f"text:{text}", "row_length": ROW_LENGTH, "validation_fraction": 0.0},
        "codec": codec,
        "store": {"rows": NUM_ROWS, "rows_per_shard": 32, "rows_per_chunk": 8},
        **({} if "engine" in teacher else {"device": "cpu"}),
        **teacher,
    }
    request = resolve_request(out, given)
    run(request, Worker())
    return ShardStore.open(out / "store")


@torch.inference_mode()
def compare(store: ShardStore, model: torch.nn.Module) -> dict[str, float]:
    """A store beside the model: log p of the tokens, and coupling agreement."""
    read = store.split("train").read_rows(0, NUM_ROWS)
    tokens = torch.from_numpy(read["tokens"]).long()
    log_probs = torch.cat([model(part).logits[:, :-1] for part in tokens.split(8)])
    log_probs = log_probs.float().log_softmax(-1).flatten(0, 1)
    flat = {name: torch.from_numpy(array[:, 1:]).flatten(0, 1) for name, array in read.items()}
    chosen, own = flat.pop("tokens").long(), flat.pop("token_log_probs")
    stored = store.codec.distribution(flat, chosen, own, store.resources)  # type: ignore[attr-defined]
    more = log_probs.exp() - stored.tile(0, log_probs.shape[1])
    more.scatter_(1, chosen[:, None], 0.0)
    agreement = 1 / (1 + more.clamp(min=0).sum(1, dtype=torch.float64))
    return {
        "num_tokens": len(chosen),
        "max_abs_log_prob_difference_nats": float((own - log_probs.gather(1, chosen[:, None])[:, 0]).abs().max()),
        "coupling_agreement": float(agreement.mean()),
    }


@dataclass(frozen=True)
class Server:
    """A running ``vllm serve``: its address, its process, where it writes hidden states."""

    url: str
    process: subprocess.Popen[bytes]
    states: Path


@contextmanager
def real_server(place: Path, teacher: Path, *options: str, has_states: bool = True) -> Iterator[Server]:
    """vLLM of the environment ``place`` in float32 with one thread, until the context ends.

    With ``has_states`` it writes hidden states, started as docs/engines.md says.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    states = Path(tempfile.mkdtemp(dir=shared))
    layers = json.loads((teacher / "config.json").read_text())["num_hidden_layers"]
    drafts = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [layers]}},
    }
    transfer = {
        "kv_connector": "StatesConnector",
        "kv_connector_module_path": "trainer.serving.states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states)},
    }
    with_states = ["--speculative-config", json.dumps(drafts)]
    with_states += ["--kv-transfer-config", json.dumps(transfer)]
    command = [str(place / "bin" / "vllm"), "serve", str(teacher), "--served-model-name", "teacher"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-num-seqs", "16", "--gpu-memory-utilization", "0.3", *options]
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, **Engine.settings(plugin=True), "PYTHONPATH": str(root)}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with tempfile.TemporaryFile() as log:
        command += with_states if has_states else []
        said = {"stdout": log, "stderr": log}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **said)
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTS_WITHIN_S
        try:
            while True:
                try:
                    requests.get(f"{url}/health", timeout=5).raise_for_status()
                    break
                except requests.RequestException:
                    time.sleep(1)
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"error: vLLM does not start: {log.read()[-3000:].decode()}")
            yield Server(url, process, states)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            shutil.rmtree(states, ignore_errors=True)
