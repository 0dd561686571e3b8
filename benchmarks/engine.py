"""An engine's scores beside our own extraction of the same rows.

    python -m benchmarks.engine --teacher ../shared/data/stories260K --text FILE [--out DIR]

A loopback server answers from the teacher as vLLM does, with the m likeliest tokens of every
position; the store made of that is compared with the teacher itself on the same rows: the largest
difference of log p of the tokens, and coupling agreement, the probability that argmax(logits +
decoded noise) is the token, in closed form. Beside it stands the store that our own extraction
makes with as many entries.

With ``--engine .vllm`` a real vLLM serves the teacher instead, and gives hidden states and the 20
most probable tokens in turns. ``engine-states.json`` says both stores' distance from the teacher,
and tokens per second and processor time (server and client) of both.
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
from statistics import median
from typing import Annotated, Any

import requests
import torch
import typer
from transformers import AutoModelForCausalLM

from benchmarks.measure import machine
from benchmarks.serving import Engine
from pipeline.engine import run_scored
from pipeline.run import run_extraction
from pipeline.settings import Worker, resolve_request
from shards.atomic import write_json_atomic
from shards.store.store import ShardStore
from tests.pipeline.engine.engine_server import EngineServer

NUM_ROWS, ROW_LENGTH = 64, 256
TURNS = 5
STARTS_WITHIN_S = 600


def extract(
    out: Path, text: Path, codec: Mapping[str, Any], teacher: Mapping[str, Any]
) -> ShardStore:
    """A store of the text's first rows."""
    given = {
        "corpus": {"spec": f"text:{text}", "row_length": ROW_LENGTH, "validation_fraction": 0.0},
        "codec": codec,
        "store": {"rows": NUM_ROWS, "rows_per_shard": 32, "rows_per_chunk": 8},
        **({} if "engine" in teacher else {"device": "cpu"}),
        **teacher,
    }
    request = resolve_request(out, given)
    (run_scored if request.is_scored else run_extraction)(request, Worker())
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
    exact = log_probs.gather(1, chosen[:, None])[:, 0]
    stored = store.codec.distribution(flat, chosen, own, store.resources)  # type: ignore[attr-defined]
    more = log_probs.exp() - stored.tile(0, log_probs.shape[1])
    more.scatter_(1, chosen[:, None], 0.0)
    agreement = 1 / (1 + more.clamp(min=0).sum(1, dtype=torch.float64))
    return {
        "num_tokens": len(chosen),
        "max_abs_log_prob_difference_nats": float((own - exact).abs().max()),
        "coupling_agreement": float(agreement.mean()),
        "bytes_per_token": _bytes_per_token(store),
    }


def _bytes_per_token(store: ShardStore) -> float:
    sizes = store.location.sizes("train")
    stored = sum(n for name, n in sizes.items() if "/tokens/" not in name and "/c/" in name)
    return stored / (NUM_ROWS * ROW_LENGTH)


@dataclass(frozen=True)
class Server:
    """A running ``vllm serve``.

    Attributes:
        url: Its address.
        process: The one that was started.
        states: Where it writes hidden states.
    """

    url: str
    process: subprocess.Popen[bytes]
    states: Path

    def cpu_seconds(self) -> float:
        """Processor time so far of all processes of its session."""
        ticks = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = file.read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(fields[3]) == self.process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def real_server(
    place: Path, teacher: Path, *options: str, has_states: bool = True
) -> Iterator[Server]:
    """vLLM in float32 with one thread, until the context ends.

    Args:
        place: The environment that it is installed in.
        teacher: The model's folder.
        *options: More of ``vllm serve``.
        has_states: Whether it writes hidden states, as docs/engines.md has it started.
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
        process = subprocess.Popen(
            [*command, *(with_states if has_states else [])],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
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


def real_engine(
    place: Path, teacher: Path, text: Path, model: torch.nn.Module
) -> dict[str, dict[str, Any]]:
    """Hidden states and the 20 most probable tokens, in turns; then those 20 of a plain server."""
    tokenizer = {"tokenizer": str(teacher)}
    top_20: dict[str, Any] = {"name": "posterior", "num_entries": 20}
    states = ({"name": "hidden"}, {"device": "cpu", "teacher": {"location": str(teacher)}})
    top = "prompt_logprobs, m = 20"
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "hidden states, int8": states,
        "hidden states, float16": ({"name": "hidden", "dtype": "float16"}, states[1]),
        top: (top_20, {"teacher": tokenizer, "engine": {"num_top": 20}}),
    }
    found: dict[str, dict[str, Any]] = {}
    for has_states in (True, False):
        with real_server(place, teacher, has_states=has_states) as server:
            asked = kinds if has_states else {top: kinds[top]}
            for turn in range(1 + TURNS):  # the first warms up
                for name, (codec, who) in asked.items():
                    engine = {"url": server.url, **who.get("engine", {})}
                    begun, busy = time.perf_counter(), server.cpu_seconds() + time.process_time()
                    with tempfile.TemporaryDirectory() as folder:
                        store = extract(Path(folder), text, codec, {**who, "engine": engine})
                        seconds = time.perf_counter() - begun
                        cpu = server.cpu_seconds() + time.process_time() - busy
                        key = name if has_states else f"{name}, an engine without states"
                        if not turn:
                            found[key] = {**compare(store, model), "seconds": [], "cpu_seconds": []}
                            continue
                        found[key]["seconds"].append(seconds)
                        found[key]["cpu_seconds"].append(cpu)
                    for left in server.states.iterdir():  # scores alone were asked for
                        left.unlink()
    for figures in found.values():
        figures["tokens_per_second"] = NUM_ROWS * ROW_LENGTH / median(figures["seconds"])
        figures["cpu_ms_per_token"] = 1e3 * median(figures["cpu_seconds"]) / (NUM_ROWS * ROW_LENGTH)
    return found


def main(
    teacher: Annotated[Path, typer.Option(help="Folder of a causal LM with its tokenizer.")],
    text: Annotated[Path, typer.Option(help="Text to score.")],
    engine: Annotated[Path | None, typer.Option(help="Environment with vLLM.")] = None,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("benchmarks/results"),
) -> None:
    """Measure m = 5, 20 and 64, or a real engine's hidden states beside its m = 20."""
    model = AutoModelForCausalLM.from_pretrained(teacher).float().eval()
    found: dict[str, Any] = {}
    out.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(torch.device("cpu")), "teacher": teacher.name}
    if engine is not None:
        found = real_engine(engine, teacher, text, model)
        write_json_atomic(out / "engine-states.json", {**about, "results": found})
        typer.echo(json.dumps(found, indent=2))
        return
    with EngineServer(teacher).running() as url, tempfile.TemporaryDirectory() as folder:
        for num_top in (5, 20, 64):
            served = {
                "engine": {"url": url, "num_top": num_top},
                "teacher": {"tokenizer": str(teacher)},
            }
            own = {"teacher": {"location": str(teacher)}}
            for name, who in (("engine", served), ("own extraction", own)):
                place = Path(folder, f"{name}-{num_top}")
                codec = {"name": "posterior", "num_entries": num_top}
                found[f"{name}, m = {num_top}"] = compare(extract(place, text, codec, who), model)
    write_json_atomic(out / "engine.json", {**about, "results": found})
    typer.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(main)
