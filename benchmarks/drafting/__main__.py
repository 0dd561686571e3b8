"""Train every drafter of a settings file, decode with it, time it, and write the table.

``python -m benchmarks.drafting benchmarks/drafting/stories3M.toml``. What is done lies in the
settings' ``folder`` and is not done again; a training that was cut off goes on where it was.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import torch
from jaxtyping import Int
from torch import Tensor

from benchmarks.drafting.drafters import Drafter, Form
from benchmarks.drafting.evaluation import (
    Counts,
    Decoded,
    Propose,
    agreement,
    decode,
    ngram_tree_proposer,
    pooled,
    proposer,
    sampled_tree_proposer,
    seconds,
    tokens_per_pass,
    tree_proposer,
)
from benchmarks.drafting.target import Target, story_prompts, target_text
from benchmarks.drafting.training import Training, draft_vocabulary, train
from benchmarks.measure import machine
from shards.store.store import ShardStore
from trainer.sampling.ngrams import NGrams

BATCH = 125
"""Prompts decoded at once; the noise of each is its own, so that this changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A line of the table: a drafter, a rule, and how it drafts.

    Args:
        drafter: A trained drafter, or a name of the settings' ``counts``.
        tree: Drafts of a tree and paths that its search follows; a chain without.
        blind: The tree is chosen without a look at the noise.
        ranks: Of a tree of draws, for the standard rule: how often the r-th draw is kept, a list
            for each slot; the last is that of all slots behind it.
        reach: Of a tree: another step only where a path is right with this probability.
        slots: Of a block, where it is not that of the trainings.
    """

    drafter: str
    rule: str
    tree: tuple[int, int] | None = None
    blind: bool = False
    ranks: tuple[tuple[float, ...], ...] = ()
    reach: float = 0.0
    slots: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        object.__setattr__(self, "tree", self.tree and tuple(self.tree))

    @property
    def work(self) -> str:
        """What it computes; points that differ in their rule take the same time."""
        return f"{self.drafter} {self.tree} {self.ranks} {self.reach}"

    @property
    def name(self) -> str:
        """What the table calls it."""
        extra = [f"tree of {self.tree[0]}"] if self.tree else []
        extra += [f"{self.slots} slots"] if self.slots else []
        extra += ["blind"] if self.blind else []
        extra += [f"steps at {self.reach}"] if self.reach else []
        return ", ".join([self.drafter, self.rule, *extra])


class Bench:
    """The target, its text, the drafters and what was measured of them, in one folder."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.folder = settings, Path(settings["folder"])
        self.training, text = Training(**settings["training"]), settings["text"]
        self.target = Target(Path(settings["target"]))
        prompts = self.prompts(text, text["rows"])
        own = self.target, prompts, text["length"], text["seed"], self.folder / "text"
        self.tokens = target_text(*own)
        sizes = (self.target.vocab_size, self.training.vocabulary)
        self.vocabulary = draft_vocabulary(self.tokens, *sizes)
        self.forms = {entry["name"]: Form(**entry) for entry in settings["drafter"]}
        slots = self.training.slots
        self.sizes = sorted({*range(1, min(slots, 4) + 1), *range(6, slots + 1, 2), slots})
        """Slots of a block that are tried for the best speed-up."""
        self.points = [Point(**entry) for entry in settings["point"]]
        self.counts = {}
        for name, store in settings.get("counts", {}).items():
            rows = self.tokens.numpy()
            if store:
                split = ShardStore.find(store).split("train", ["tokens"])
                rows = split.read_rows(0, split.num_rows)["tokens"]
            self.counts[name] = NGrams(rows, self.target.vocab_size)

    def prompts(self, part: dict[str, Any], count: int) -> Int[Tensor, "n p"]:
        """The first tokens of a part's stories."""
        stories = [Path(path) for path in part["stories"]]
        return story_prompts(Path(self.settings["target"]), stories, count, part["prompt"])

    def seeds(self, name: str) -> list[int]:
        """The seeds a drafter is trained with."""
        seeds = self.settings["seeds"]
        return seeds.get(name, seeds["every"]) if name in self.forms else [0]

    def path(self, name: str, seed: int) -> Path:
        """Where a training lies."""
        return self.folder / "models" / f"{name}-seed{seed}.pt"

    def drafter(self, name: str, seed: int, slots: int) -> Drafter:
        """A trained drafter that is asked for so many slots."""
        drafter = Drafter(self.forms[name], self.target, *self.vocabulary, self.training.slots)
        drafter.load_state_dict(torch.load(self.path(name, seed), weights_only=True)["drafter"])
        drafter.slots = slots
        return drafter.eval()

    @cache  # noqa: B019  (there is one bench in a process)
    def proposer(self, point: Point, seed: int, slots: int) -> Propose:
        """What drafts at a point."""
        model = self.counts.get(point.drafter)
        drafter = Counts(model, slots) if model else self.drafter(point.drafter, seed, slots)
        if point.tree and point.ranks:
            return sampled_tree_proposer(drafter, point.tree[0], point.ranks)
        if isinstance(drafter, Counts):
            assert point.tree, "counts draft trees"
            return ngram_tree_proposer(drafter.model, slots, point.tree[0], blind=point.blind)
        if point.tree:
            return tree_proposer(drafter, *point.tree, blind=point.blind, reach=point.reach)
        return proposer(drafter)

    def decoded(self, point: Point) -> list[Decoded]:
        """The decodes of every seed; kept in the folder."""
        part, slots, parts = self.settings["evaluation"], point.slots or self.training.slots, []
        prompts = self.prompts(part, part["prompts"])
        for seed in self.seeds(point.drafter):
            file = self.folder / "decoded" / f"{point.name}-{seed}.pt".replace(" ", "-")
            if not file.exists():
                propose = self.proposer(point, seed, slots)
                room = 2 + (point.tree[0] if point.tree else 0)
                rule = part["tokens"], slots, point.rule, part["seed"]
                batches = [
                    decode(self.target, propose, rows, *rule, first_row=number * BATCH, room=room)
                    for number, rows in enumerate(prompts.split(BATCH))
                ]
                file.parent.mkdir(exist_ok=True)
                torch.save(asdict(pooled(batches)), file.with_suffix(".part"))
                os.replace(file.with_suffix(".part"), file)
            parts.append(Decoded(**torch.load(file, weights_only=True)))
        return parts

    def times(self) -> dict[str, dict[str, float]]:
        """Least seconds by batch; the target's passes and all drafts in turns."""
        path = self.folder / "times.json"
        if path.exists():
            return json.loads(path.read_text())
        trees = {point.tree[0] + 1 for point in self.points if point.tree}
        sizes = sorted({1, *(size + 1 for size in self.sizes), *trees})
        work: dict[str, tuple[Propose | None, int]] = {f"target {n}": (None, n) for n in sizes}
        for point in self.points:
            seed = self.seeds(point.drafter)[0]
            for size in [point.slots or self.training.slots] if point.tree else self.sizes:
                work[f"{point.work} {size}"] = (self.proposer(point, seed, size), size)
        repeats, prompt = self.settings["evaluation"]["repeats"], self.tokens[0, :64]
        found = {str(b): seconds(self.target, work, prompt, b, repeats) for b in (1, 16)}
        path.write_text(json.dumps(found))
        return found

    def line(self, point: Point, times: dict[str, dict[str, float]]) -> dict[str, Any]:
        """One line of the table; each speed-up at the block size that is best for it."""
        parts, slots = self.decoded(point), point.slots or self.training.slots
        per_pass = 1 + torch.stack([p.kept / p.reached[0] for p in parts]).mean(0).cumsum(0)
        reached, kept = (sum(getattr(p, name) for p in parts) for name in ("reached", "kept"))
        passes = sum(int(p.passes.sum()) for p in parts)
        line: dict[str, Any] = {"name": point.name, "seeds": len(parts)}
        line["tokens_per_pass"] = tokens_per_pass(parts)
        shares = zip(kept.tolist(), reached.tolist(), strict=True)
        share = line["share_of_steps"] = float(sum(p.steps.sum() for p in parts) / passes / slots)
        line["kept_by_slot"] = [round(n / of, 3) if of else None for n, of in shares]
        if point.drafter in self.forms:
            drafter = self.drafter(point.drafter, self.seeds(point.drafter)[0], slots)
            paths = point.tree[1] if point.tree and drafter.steps else 1
            flops = drafter.flops(48) * paths * share
            line["draft_flops"] = flops / self.target.flops(1, 48)
            line["weights"] = sum(w.numel() for w in drafter.parameters() if w.requires_grad)
        for batch, found in times.items():
            plain = found["target 1"]
            line[f"draft_time_batch{batch}"] = share * found[f"{point.work} {slots}"] / plain
            for scale in (1, 10, 100):
                ups = []
                for size in [slots] if point.tree else self.sizes:
                    draft = share * found[f"{point.work} {size}"] / plain / scale
                    # A large target is bound by its weights and reads a block as fast as a token.
                    rows = 1 + (point.tree[0] if point.tree else size)
                    verify = found[f"target {rows}"] / plain if scale == 1 else 1.0
                    ups.append((float(per_pass[size - 1]) / (verify + draft), size))
                line[f"speed_up_batch{batch}_x{scale}"] = max(ups)
        return line


def write(results: Path, lines: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """All figures as JSON, the table as Markdown, and the plot, with lines of other runs ``beside`` it."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    results.parent.mkdir(parents=True, exist_ok=True)
    results.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    columns = "drafter, rule|tokens per pass|kept by slot|draft: FLOPs, time|speed-up batch 1"
    table = [f"|{columns}|batch 16|target x10|x100|".replace("|", " | ").strip(), "|---" * 8 + "|"]
    figure, axes = pyplot.subplots(figsize=(10, 6))
    for line in lines:
        (mean, low, high), at = line["tokens_per_pass"], line["draft_time_batch1"]
        slots = ["-" if v is None else f"{v:.2f}".lstrip("0") for v in line["kept_by_slot"]]
        cells = [line["name"], f"{mean:.2f} [{low:.2f}, {high:.2f}]", " ".join(slots)]
        cells.append(f"{line.get('draft_flops', 0):.2f}, {at:.2f}")
        for key in ("batch1_x1", "batch16_x1", "batch1_x10", "batch1_x100"):
            cells.append("{:.2f} (k {})".format(*line[f"speed_up_{key}"]))
        table.append("| " + " | ".join(cells) + " |")
    known = {line["name"] for line in lines}
    others = [
        line for path in report["settings"].get("beside", []) for line in json.loads(Path(path).read_text())["lines"]
    ]
    plotted = lines + [line for line in others if line["name"] not in known]
    ordered = sorted(plotted, key=lambda line: line["tokens_per_pass"][0], reverse=True)
    for number, line in enumerate(ordered, 1):
        (mean, low, high), at = line["tokens_per_pass"], line["draft_time_batch1"]
        label, error = f"{number}  {line['name']}", [[mean - low], [high - mean]]
        axes.errorbar(at, mean, error, fmt="o", capsize=2, label=label)
        axes.annotate(str(number), (at, mean), (5, 2), textcoords="offset points", fontsize=7)
    results.with_name(results.name + "-table.md").write_text("\n".join(table) + "\n")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)
    axes.set(xlabel="time of a draft, in passes of the target (batch 1)")
    axes.set(ylabel="tokens per pass of the target")
    figure.savefig(results.with_suffix(".png"), dpi=120, bbox_inches="tight")


def main(path: str) -> None:
    """All of it."""
    settings = tomllib.loads(Path(path).read_text())
    torch.set_num_threads(1)
    bench, part = Bench(settings), settings["evaluation"]
    (bench.folder / "models").mkdir(parents=True, exist_ok=True)
    for name, form in bench.forms.items():
        for seed in bench.seeds(name):
            train(form, bench.target, bench.tokens, bench.training, seed, bench.path(name, seed))
    decoded = {point.name: bench.decoded(point) for point in bench.points}
    times = bench.times()
    lines = [bench.line(point, times) for point in bench.points]
    prompts, given = bench.prompts(part, min(64, part["prompts"])), {}
    for name in [name for name, form in bench.forms.items() if form.kind == "steps"]:
        drafter = bench.drafter(name, bench.seeds(name)[0], bench.training.slots)
        given[name] = agreement(bench.target, drafter, prompts, part["seed"])
    report = {
        "machine": machine(torch.device("cpu")),
        "settings": settings,
        "lines": lines,
        "given the earlier tokens": given,
        "ratios": {
            f"{over} / {under}": tokens_per_pass(decoded[over], decoded[under]) for over, under in settings["ratios"]
        },
        "seconds": times,
    }
    write(Path(settings["results"]), lines, report)


if __name__ == "__main__":
    main(sys.argv[1])
