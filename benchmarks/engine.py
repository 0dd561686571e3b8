"""An engine's scores beside our own extraction of the same rows.

    python -m benchmarks.engine --teacher ../shared/data/stories260K --text FILE [--out DIR]

A loopback server answers from the teacher as vLLM does, with the m likeliest tokens of every
position; the store made of that is compared with the teacher itself on the same rows: the largest
difference of log p of the tokens, and coupling agreement, the probability that argmax(logits +
decoded noise) is the token, in closed form. Beside it stands the store that our own extraction
makes with as many entries.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from benchmarks.measure import machine
from pipeline.engine import run_scored
from pipeline.run import run_extraction
from pipeline.settings import Worker, resolve_request
from shards.atomic import write_json_atomic
from shards.store.store import ShardStore
from tests.pipeline.engine.engine_server import EngineServer

NUM_ROWS, ROW_LENGTH = 64, 256


def extract(out: Path, text: Path, num_entries: int, teacher: Mapping[str, Any]) -> ShardStore:
    """A posterior store of the text's first rows."""
    given = {
        "corpus": {"spec": f"text:{text}", "row_length": ROW_LENGTH, "validation_fraction": 0.0},
        "codec": {"name": "posterior", "num_entries": num_entries},
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


def main(
    teacher: Annotated[Path, typer.Option(help="Folder of a causal LM with its tokenizer.")],
    text: Annotated[Path, typer.Option(help="Text to score.")],
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("benchmarks/results"),
) -> None:
    """Measure m = 5, 20 and 64."""
    model = AutoModelForCausalLM.from_pretrained(teacher).float().eval()
    found: dict[str, Any] = {}
    with EngineServer(teacher).running() as url, tempfile.TemporaryDirectory() as folder:
        for num_top in (5, 20, 64):
            served = {
                "engine": {"url": url, "num_top": num_top},
                "teacher": {"tokenizer": str(teacher)},
            }
            own = {"teacher": {"location": str(teacher)}}
            for name, who in (("engine", served), ("own extraction", own)):
                place = Path(folder, f"{name}-{num_top}")
                found[f"{name}, m = {num_top}"] = compare(extract(place, text, num_top, who), model)
    record = {"machine": machine(torch.device("cpu")), "teacher": teacher.name, "results": found}
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out / "engine.json", record)
    typer.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(main)
