"""Train every drafter of a settings file, decode with it, time it, and write the table.

``python -m benchmarks.drafting benchmarks/drafting/stories3M.toml``. What is done lies in the
settings' ``folder`` and is not done again; a training that was cut off goes on where it was.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.drafting.drafters import Drafter, Form
from benchmarks.drafting.evaluation import (
    Decoded,
    Propose,
    decode,
    ngram_proposer,
    pooled,
    proposer,
    ratio,
    seconds,
    tokens_per_pass,
)
from benchmarks.drafting.target import Target, read_text, story_prompts, write_text
from benchmarks.drafting.training import Training, draft_vocabulary, train
from benchmarks.measure import machine


@dataclass(frozen=True, kw_only=True)
class Point:
    """One drafter under one rule: a line of the table."""

    name: str
    drafter: str | None
    rule: str
    loops: int | None = None
    greedy: bool = False


def points_of(settings: dict[str, Any]) -> list[Point]:
    """The table's lines: every drafter under its rules, passes and ways to draw."""
    points = [Point(name="n-gram", drafter=None, rule="coupled")]
    for entry in settings["drafter"]:
        for rule in entry.get("rules", ["standard", "coupled"]):
            for loops in entry.get("passes", [None]):
                name = f"{entry['name']}, {rule}" + (f", {loops} passes" if loops else "")
                points.append(Point(name=name, drafter=entry["name"], rule=rule, loops=loops))
        if entry.get("greedy"):
            name = f"{entry['name']}, greedy"
            points.append(Point(name=name, drafter=entry["name"], rule="standard", greedy=True))
    return points


class Bench:
    """The target, its text, the drafters and what was measured of them, in one folder."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.folder = settings, Path(settings["folder"])
        self.training = Training(**settings["training"])
        self.target = Target(Path(settings["target"]))
        text = settings["text"]
        stories = [Path(path) for path in text["stories"]]
        prompts = story_prompts(Path(settings["target"]), stories, text["rows"], text["prompt"])
        files = list(
            write_text(self.target, prompts, text["length"], text["seed"], self.folder / "text")
        )
        self.tokens = read_text(files)
        self.ids, self.log_q = draft_vocabulary(
            self.tokens, self.target.vocab_size, self.training.vocabulary
        )
        self.forms = {
            entry["name"]: Form(
                **{k: v for k, v in entry.items() if k in Form.__dataclass_fields__}
            )
            for entry in settings["drafter"]
        }

    def seeds(self, name: str) -> list[int]:
        """The seeds a drafter is trained with; its own, or those of the file."""
        entries = {entry["name"]: entry for entry in self.settings["drafter"]}
        return entries[name].get("seeds", self.settings["seeds"])

    def path(self, name: str, seed: int) -> Path:
        """Where a training lies."""
        return self.folder / "models" / f"{name}-seed{seed}.pt"

    def drafter(self, name: str, seed: int) -> Drafter:
        """A trained drafter."""
        form = self.forms[name]
        drafter = Drafter(form, self.target, self.ids, self.log_q, self.training.slots)
        saved = torch.load(self.path(name, seed), weights_only=True)
        drafter.load_state_dict(saved["drafter"])
        return drafter.eval()

    def proposer(self, point: Point, seed: int, slots: int) -> Propose:
        """What drafts at a point, so many slots a block."""
        if point.drafter is None:
            return ngram_proposer(self.tokens, slots)
        drafter = self.drafter(point.drafter, seed)
        drafter.slots = slots
        return proposer(drafter, loops=point.loops, greedy=point.greedy)

    def decoded(self, point: Point) -> list[Decoded]:
        """The decodes of every seed; kept in the folder."""
        evaluation, parts = self.settings["evaluation"], []
        stories = [Path(path) for path in evaluation["stories"]]
        prompts = story_prompts(
            Path(self.settings["target"]), stories, evaluation["prompts"], evaluation["prompt"]
        )
        by_uniform = None
        if point.drafter and self.forms[point.drafter].noise == "uniform":
            rest = torch.ones(self.target.vocab_size, dtype=torch.bool)
            rest[self.ids] = False
            by_uniform = torch.cat([self.ids, rest.nonzero()[:, 0]])
        for seed in self.seeds(point.drafter) if point.drafter else [0]:
            file = self.folder / "decoded" / f"{point.name}-{seed}.pt".replace(" ", "-")
            if not file.exists():
                propose = self.proposer(point, seed, self.training.slots)
                batches = [
                    decode(
                        self.target,
                        propose,
                        prompts[start : start + 125],
                        evaluation["tokens"],
                        self.training.slots,
                        point.rule,
                        evaluation["seed"],
                        by_uniform=by_uniform,
                        first_row=start,
                    )
                    for start in range(0, len(prompts), 125)
                ]
                save(asdict(pooled(batches)), file)
            parts.append(Decoded(**torch.load(file, weights_only=True)))
        return parts

    def times(self, points: list[Point]) -> dict[str, dict[str, float]]:
        """Least seconds by batch; the target's passes and all drafts in turns."""
        path, sizes = self.folder / "times.json", range(1, self.training.slots + 1)
        if path.exists():
            return json.loads(path.read_text())
        work: dict[str, tuple[Propose | None, int]] = {
            f"target {rows}": (None, rows) for rows in (1, *(size + 1 for size in sizes))
        }
        for point in points:
            for size in sizes:
                seed = self.seeds(point.drafter)[0] if point.drafter else 0
                work[f"{point.name} {size}"] = (self.proposer(point, seed, size), size)
        prompt, found = self.tokens[0, :64], {}
        for batch in (1, 16):
            repeats = self.settings["evaluation"]["repeats"]
            found[str(batch)] = seconds(self.target, work, prompt, batch, repeats)
        path.write_text(json.dumps(found))
        return found


def save(values: dict[str, Any], path: Path) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(values, part)
    os.replace(part, path)


def describe(
    bench: Bench, point: Point, parts: list[Decoded], times: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """One line of the table; speed-ups at the block size that is best for each."""
    kept = torch.stack([part.kept / part.reached[0] for part in parts]).mean(0)
    by_slot = torch.stack([part.kept / part.reached for part in parts]).mean(0)
    per_pass = 1 + kept.cumsum(0)
    line: dict[str, Any] = {"name": point.name, "seeds": len(parts)}
    line["tokens_per_pass"] = tokens_per_pass(parts)
    line["kept_by_slot"] = [round(value, 3) for value in by_slot.tolist()]
    if point.drafter is not None:
        drafter = bench.drafter(point.drafter, bench.seeds(point.drafter)[0])
        line["weights"] = sum(w.numel() for w in drafter.parameters())
        line["draft_flops"] = drafter.flops(48, point.loops) / bench.target.flops(1, 48)
    for batch, found in times.items():
        plain = found["target 1"]
        for scale in (1, 10, 100):
            best = (0.0, 0)
            for size in range(1, len(per_pass) + 1):
                draft = found[f"{point.name} {size}"] / plain / scale
                # A target so large that weights bound its pass reads k + 1 rows as fast as one.
                verify = found[f"target {size + 1}"] / plain if scale == 1 else 1.0
                best = max(best, (float(per_pass[size - 1]) / (verify + draft), size))
            line[f"speed_up_batch{batch}_x{scale}"] = best
        line[f"draft_time_batch{batch}"] = found[f"{point.name} {len(per_pass)}"] / plain
    return line


def write(results: Path, lines: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """The table as Markdown, all figures as JSON, and the plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results.parent.mkdir(parents=True, exist_ok=True)
    results.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    head = "| drafter, rule | tokens per pass | kept, slots 1 to 8 | draft: FLOPs, time | speed-up"
    table = [
        head + " batch 1 | batch 16 | target x10 | x100 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        mean, low, high = line["tokens_per_pass"]
        ups = [
            line[f"speed_up_{key}"]
            for key in ("batch1_x1", "batch16_x1", "batch1_x10", "batch1_x100")
        ]
        table.append(
            f"| {line['name']} | {mean:.2f} [{low:.2f}, {high:.2f}] | "
            + " ".join(f"{value:.2f}"[1:] for value in line["kept_by_slot"])
            + f" | {line.get('draft_flops', 0):.2f}, {line['draft_time_batch1']:.2f} | "
            + " | ".join(f"{value:.2f} (k {size})" for value, size in ups)
            + " |"
        )
    results.with_name(results.name + "-table.md").write_text("\n".join(table) + "\n")
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for line in lines:
        mean, low, high = line["tokens_per_pass"]
        at = line["draft_time_batch1"]
        axes.errorbar(at, mean, [[mean - low], [high - mean]], fmt="o", capsize=2)
        axes.annotate(
            line["name"], (at, mean), fontsize=6, xytext=(4, 3), textcoords="offset points"
        )
    axes.set_xlabel("time of a draft of 8 slots, in passes of the target (batch 1)")
    axes.set_ylabel("tokens per pass of the target")
    axes.set_xscale("log")
    figure.tight_layout()
    figure.savefig(results.with_suffix(".png"), dpi=120)


def main(path: str) -> None:
    """All of it."""
    settings = tomllib.loads(Path(path).read_text())
    torch.set_num_threads(settings.get("threads", 1))
    bench = Bench(settings)
    (bench.folder / "models").mkdir(parents=True, exist_ok=True)
    for name, form in bench.forms.items():
        for seed in bench.seeds(name):
            file = bench.path(name, seed)
            train(form, bench.target, bench.tokens, bench.training, seed, file)
    points = points_of(settings)
    decoded = {}
    for point in points:
        decoded[point.name] = bench.decoded(point)
        print(point.name, tokens_per_pass(decoded[point.name]), flush=True)
    times = bench.times(points)
    lines = [describe(bench, point, decoded[point.name], times) for point in points]
    ratios = {
        f"{over} / {under}": ratio(decoded[over], decoded[under])
        for over, under in settings.get("ratios", [])
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    report = {
        "commit": commit.strip(),
        "machine": machine(torch.device("cpu")),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": settings,
        "lines": lines,
        "ratios": ratios,
        "seconds": times,
    }
    write(Path(settings["results"]), lines, report)


if __name__ == "__main__":
    main(sys.argv[1])
