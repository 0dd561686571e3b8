"""Stories as a task: text of a small real teacher, judged by it and by a model that is not it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from benchmarks.quality.ahead import Fills, Prefixes, fills
from benchmarks.quality.gain import gain_of_first
from benchmarks.quality.matched import by_order, match_students, ratio_lines, ratios
from benchmarks.quality.plan import Plan, Run
from evaluation.curve import matched_table
from evaluation.text.diversity import unigram_entropy_nats
from shards.store.store import ShardStore
from trainer import load_student
from trainer.sampling.noise import sampling_noise
from trainer.sampling.registry import make_sampler

DISTANCES = (1, 2, 4, 8, 16, 32)
NUM_PREFIXES = 512
STARTS = (32, 64)
NUCLEUS_PS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.0)
WAYS: Mapping[str, Mapping[str, Any]] = {
    f"nucleus {p:g}": {"nucleus_p": p} for p in (1.0, 0.9, 0.8, 0.7, 0.6)
}
ARGMAX: Mapping[str, Mapping[str, Any]] = {"argmax": {"decision": "argmax"}}
ORDER_TEMPERATURES: Mapping[str, float] = {
    "surest first, noise 4": 4.0,
    "surest first, noise 10": 10.0,
    "as many in every pass": 1e6,
}
"""Orders of a student without noise, whose variety the surest tokens alone would cost. The last is
a uniform one."""
TEMPERATURES = (1.1, 1.0, 0.9, 0.8, 0.7)
SUREST_FIRST = "surest first"
SUREST_BY_SAMPLER: Mapping[str, Mapping[str, Any]] = {
    "ancestral": {"sampler": "confidence"},
    "block": {"inner": "confidence"},
}
"""Of whole rows, and of blocks."""
AHEAD_FILE = "ahead.npz"
PARTS = ("nll", "equal", "repeated")


class StoriesBench:
    """Judges students of one store of stories.

    Args:
        plan: Samples and passes.
        home: Folder of the extraction.
        teacher: Folder of the teacher.
        judge: Folder of the second judge, an autoregressive student; None for none.
    """

    def __init__(self, plan: Plan, home: Path, teacher: str, judge: Path | None) -> None:
        self.plan, self.home, self.teacher_folder, self.judge_folder = plan, home, teacher, judge

    @cached_property
    def judges(self) -> dict[str, Any]:
        """Name -> causal model; the teacher comes first."""
        from transformers import AutoModelForCausalLM

        teacher = AutoModelForCausalLM.from_pretrained(self.teacher_folder, dtype=torch.float32)
        models = {"teacher": teacher.eval()}
        if self.judge_folder is not None:
            models["other judge"] = load_student(self.judge_folder).eval()
        return models

    @cached_property
    def validation(self) -> Int[Tensor, "n l"]:
        """Rows that no student was trained on."""
        return validation_rows(self.home / "store")

    def measure(self, run: Run, folder: Path) -> dict[str, Any]:
        """Figures of one student; its fills of prefixes go to ``ahead.npz`` beside it."""
        student: Any = load_student(folder).eval()
        if self.plan.is_ahead:
            teacher, seed = self.judges["teacher"], self.plan.sample_seeds[0]
            save_ahead(fills_ahead(student, teacher, self.validation, seed), folder / AHEAD_FILE)
        ways = self.conditioned_ways if student.is_conditioned else WAYS
        orders = self._orders(student) if self.plan.further_orders else {}
        budgets = run.recipe.nfe or self.plan.nfe
        return {
            "validation": last_validation(folder),
            "samples": self._sweep(student, budgets, ways),
            "orders": {
                order: self._sweep(student, budgets, ways) for order, ways in orders.items()
            },
        }

    def _sweep(
        self, student: Any, budgets: Sequence[int], ways: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """NFE -> way -> samples."""
        return {
            str(nfe): {way: self._sample(student, nfe, settings) for way, settings in ways.items()}
            for nfe in budgets
        }

    def _orders(self, student: Any) -> dict[str, dict[str, dict[str, Any]]]:
        """Order -> ways of sampling in it: argmax at every tau, or temperatures."""
        surest = SUREST_BY_SAMPLER[student.default_sampler]
        if student.is_conditioned:
            ways = self.conditioned_ways.items()
            taken = {SUREST_FIRST: {way: {**settings, **surest} for way, settings in ways}}
            return taken | {
                f"{SUREST_FIRST}, drawn at tau {tau:g}": {
                    f"temperature {heat:g}": {**surest, "tau": tau, "temperature": heat}
                    for heat in TEMPERATURES
                }
                for tau in self.plan.drawn_tau
            }
        by_probability = {**surest, "confidence": "probability"}
        return {
            order: {
                f"temperature {heat:g}": {
                    **by_probability,
                    "order_temperature": noise,
                    "temperature": heat,
                }
                for heat in TEMPERATURES
            }
            for order, noise in ORDER_TEMPERATURES.items()
        }

    @property
    def conditioned_ways(self) -> Mapping[str, Mapping[str, Any]]:
        """Argmax at every tau of the plan; without any, nuclei and argmax at tau 1."""
        scales = self.plan.argmax_tau
        by_tau = {f"argmax, tau {tau:g}": {"decision": "argmax", "tau": tau} for tau in scales}
        return by_tau or {**WAYS, **ARGMAX}

    def reference(self) -> dict[str, Any]:
        """The entropy at which students are compared: that of the validation rows, nats."""
        rows = self.validation.tolist()
        return {"entropy_nats": float(np.mean([unigram_entropy_nats(row) for row in rows]))}

    def summarise(self, figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
        """Validation, perplexity at the validation rows' entropy per judge, and the gain map."""
        entropy, orders = self.reference()["entropy_nats"], by_order(figures)
        lines = ["| recipe | validation NLL, nats |", "| --- | --- |"]
        for name, seeds in figures.items():
            found = ", ".join(_validation(cells["validation"]) for cells in seeds)
            lines.append(f"| {name} | {found} |")
        for judge in self.judges:
            matched = match_students(orders, judge, entropy)
            source = f"the validation rows; judge: {judge}"
            lines += ["", matched_table(matched, entropy, source).to_markdown()]
            lines += ["", *ratio_lines(ratios(self.plan, figures, judge, entropy))]
        return [*lines, "", *self._gain_lines()] if self.plan.is_ahead else lines

    def _gain_lines(self) -> list[str]:
        """Every conditioned recipe against every plain one of its kind, token by token ahead."""
        head = ["gain in nats at equal entropy", *(f"{count} ahead" for count in DISTANCES)]
        lines = [head, ["---"] * len(head)]
        recipes = self.plan.recipes
        for noisy in (recipe for recipe in recipes if recipe.conditioning != "none"):
            for plain in (other for other in recipes if other.conditioning == "none"):
                if plain.kind == noisy.kind:
                    for seed in self.plan.seeds:
                        cells = self._gains(Run(plain, seed), Run(noisy, seed))
                        lines.append([f"{noisy.name} over {plain.name}, seed {seed}", *cells])
        return ["| " + " | ".join(line) + " |" for line in lines]

    def _gains(self, plain: Run, noisy: Run) -> list[str]:
        without, given = (read_ahead(self.home / run.folder / AHEAD_FILE) for run in (plain, noisy))
        width = given[0.0].nll.shape[1]
        cells = []
        for count in DISTANCES:
            if count > width:
                cells.append("")
                continue
            gain = gain_of_first(without, given, count)
            equal = float(given[0.0].equal[:, count - 1].float().mean())
            coupled = float(without[1.0].equal[:, count - 1].float().mean())
            low, high = gain.interval
            cells.append(
                f"{gain.value:+.2f} [{low:+.2f}, {high:+.2f}], agreement {100 * equal:.0f} "
                f"against {100 * coupled:.0f}"
            )
        return cells

    def _sample(self, student: Any, nfe: int, ways: Mapping[str, Any]) -> dict[str, Any]:
        return self.scores(self.draw(student, nfe, ways))

    @torch.no_grad()
    def draw(self, student: Any, nfe: int, ways: Mapping[str, Any]) -> Int[Tensor, "n l"]:
        """Samples, each begun with the token that rows begin with."""
        settings = {"sampler": student.default_sampler, "nfe": nfe, **ways}
        count, length = self.plan.num_samples, student.config.row_length
        seed, ids = self.plan.sample_seeds[0], torch.arange(self.plan.num_samples)
        rows = torch.full((count, length), student.mask_id)
        rows[:, 0] = self.validation[0, 0]
        noise = None
        if student.is_conditioned:
            vocab_size = student.config.vocab_size
            noise = sampling_noise(seed, ids, length, vocab_size, codec=student.codec)
            settings.setdefault("tau", 1.0)
        sampler = make_sampler(settings.pop("sampler"), **settings)
        return sampler.sample(student, rows, ids, noise, seed).tokens

    @torch.no_grad()
    def scores(self, tokens: Int[Tensor, "n l"]) -> dict[str, Any]:
        """As :func:`scores_of`, under each judge."""
        logits = ((name, judge(input_ids=tokens).logits) for name, judge in self.judges.items())
        return scores_of(tokens, {name: nll_sums(found, tokens) for name, found in logits})


def scores_of(tokens: Int[Tensor, "n l"], sums: Mapping[str, list[float]]) -> dict[str, Any]:
    """Per sample: summed NLL under each judge, tokens that count and entropy."""
    return {
        "nll_sums": sums,
        "num_tokens": tokens.shape[1] - 1,
        "entropies": rounded([unigram_entropy_nats(row) for row in tokens.tolist()]),
    }


def last_validation(folder: Path) -> dict[str, Any]:
    """The last line of validation of the run in ``folder``."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "validation"][-1]


def _validation(line: Mapping[str, Any]) -> str:
    return f"{line['nll_nats']:.3f} ({'given noise' if line['conditional'] else 'bound'})"


def rounded(values: list[float]) -> list[float]:
    """To 1e-4 nats, of sums over a row too: the results are read by people and kept in git."""
    return [round(value, 4) for value in values]


def nll_sums(logits: Float[Tensor, "n l v"], tokens: Int[Tensor, "n l"]) -> list[float]:
    """Per sample, nats: of all tokens but the first, by a causal model's logits."""
    log_probs = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return rounded((-log_probs.double().sum(1)).tolist())


def validation_rows(store: Path) -> Int[Tensor, "n l"]:
    """The first rows of a store that no student was trained on."""
    return rows_of(store, "validation", NUM_PREFIXES)


def rows_of(store: Path, split: str, count: int) -> Int[Tensor, "n l"]:
    """The first rows of a split, ``count`` at most."""
    reader = ShardStore.open(store).split(split, ["tokens"])
    rows = reader.read_rows(0, min(reader.num_rows, count))["tokens"]
    return torch.from_numpy(np.asarray(rows)).long()


def fills_ahead(
    student: Any, teacher: Any, rows: Int[Tensor, "n l"], seed: int
) -> dict[float, Fills]:
    """Nucleus p -> a student's fills behind the beginnings of rows, all starts together."""
    width = min(DISTANCES[-1], student.config.tokens_per_block)
    by_start = [
        fills(
            student,
            teacher,
            Prefixes(rows, start, width),
            (seed, seed + 1),
            NUCLEUS_PS,
            own_draws=not student.is_conditioned,
        )
        for start in STARTS
    ]
    return {
        p: Fills(
            **{name: torch.cat([getattr(found[p], name) for found in by_start]) for name in PARTS}
        )
        for p in NUCLEUS_PS
    }


def save_ahead(found: Mapping[float, Fills], file: Path) -> None:
    """Keep fills; :func:`read_ahead` reads them."""
    arrays = {
        f"{p:g}/{name}": getattr(fill, name).numpy() for p, fill in found.items() for name in PARTS
    }
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read_ahead(file: Path) -> dict[float, Fills]:
    """What :func:`save_ahead` has kept."""
    arrays = np.load(file, allow_pickle=False)
    return {
        p: Fills(**{name: torch.from_numpy(arrays[f"{p:g}/{name}"]) for name in PARTS})
        for p in NUCLEUS_PS
    }
