"""Trees that stop early, and trees by counts, for a target ten times as costly.

``python -m benchmarks.drafting.stopping SETTINGS.toml OUT.json [STORE]`` after the bench has trained
``small`` with these settings. A draft's time is that of its full depth over the target's pass (one
token), in the share of the steps that it takes; the draws of recursive rejection go as deep as their
tree. Counts are of the text that ``small`` learnt from, and of a store's rows.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch

from benchmarks.drafting.__main__ import BATCH, Bench
from benchmarks.drafting.evaluation import (
    Propose,
    decode,
    ngram_tree_proposer,
    pooled,
    sampled_tree_proposer,
    seconds,
    tokens_per_pass,
    tree_proposer,
)
from benchmarks.measure import machine
from shards.store.store import ShardStore
from trainer.sampling.ngrams import NGrams

NODES, SEED = 16, 0
RANKS = [[0.577, 0.102, 0.046, 0.037, 0.025, 0.018]]
"""As in the bench: how often the r-th draw is kept."""


def main(path: str, out: str, store: str = "") -> None:
    """Decode, time and write."""
    torch.set_num_threads(1)
    bench = Bench(tomllib.loads(Path(path).read_text()))
    part, size = bench.settings["evaluation"], bench.target.vocab_size
    prompts = bench.prompts(part, part["prompts"])
    cases: dict[str, tuple[Propose, str, int, list[int]]] = {}
    for width, reach in ((6, 0.0), (4, 0.0), (4, 0.2), (4, 0.35), (4, 0.5)):
        taken: list[int] = []
        drafter = bench.drafter("small", SEED, 8)
        made = tree_proposer(drafter, NODES, width, reach=reach, steps_taken=taken)
        cases[f"small, noise, {width} paths, steps at {reach}"] = made, "coupled", 8, taken
    for slots in (3, 4, 5, 6, 7):
        made = sampled_tree_proposer(bench.drafter("small", SEED, slots), NODES, RANKS)
        cases[f"small, recursive rejection, {slots} slots"] = made, "standard", slots, []
    texts = {"its text": bench.tokens.numpy()}
    if store:
        split = ShardStore.find(store).split("train", ["tokens"])
        texts["a store"] = split.read_rows(0, split.num_rows)["tokens"]
    for name, rows in texts.items():
        model = NGrams(rows, size)
        for nodes in (8, NODES):
            for blind in (False, True):
                made = ngram_tree_proposer(model, 8, nodes, blind=blind)
                cases[f"counts of {name}, {'blind' if blind else 'noise'}, {nodes} drafts"] = made, "coupled", 8, []
    work: dict[str, Any] = {"target": (None, 1), **{name: (case[0], case[2]) for name, case in cases.items()}}
    times = seconds(bench.target, work, bench.tokens[0, :64], 1, part["repeats"])
    lines = []
    for name, (propose, rule, slots, taken) in cases.items():
        taken.clear()
        batches = [
            decode(bench.target, propose, rows, part["tokens"], slots, rule, part["seed"], first_row=n * BATCH, room=18)
            for n, rows in enumerate(prompts.split(BATCH))
        ]
        share = sum(taken) / len(taken) / 8 if taken else 1.0
        kept, draft = tokens_per_pass([pooled(batches)]), share * times[name] / times["target"]
        line = {"name": name, "tokens_per_pass": kept, "draft_time": draft, "share_of_steps": share}
        lines.append({**line, "speed_up_x10": kept[0] / (1 + draft / 10), "speed_up_x100": kept[0] / (1 + draft / 100)})
        print(name, *(f"{v:.3f}" for v in (*kept, draft, lines[-1]["speed_up_x10"])), flush=True)
    report = {"machine": machine(torch.device("cpu")), "seed": SEED, "prompts": len(prompts), "lines": lines}
    Path(out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
