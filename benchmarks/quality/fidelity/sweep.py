"""Every order, tau and temperature of a trained student, and how far its samples are from text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from benchmarks.quality.fidelity.distance import frechet_distance, read
from benchmarks.quality.stories import (
    ORDER_TEMPERATURES,
    SUREST_BY_SAMPLER,
    SUREST_FIRST,
    StoriesBench,
    nll_sums,
    rows_of,
    scores_of,
)
from benchmarks.quality.variety import frequency_divergence_nats
from shards.console import progress_bar
from shards.store.store import ShardStore
from trainer import load_student

NUCLEUS_PS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TAUS = (0.7, 0.85, 1.0, 1.2, 1.5, 2.2, 3.0)
DRAWN_TAUS = (0.7, 0.85, 1.0)
DRAWN_TEMPERATURES = (0.5, 0.7, 0.85, 1.0)
BY_PROBABILITY = "by probability"
Ways = dict[str, dict[str, dict[str, Any]]]


def ways_of(student: Any, nfe: int) -> Ways:
    """Order -> way -> settings of the sampler.

    Where a block has one pass there is no order, and one stands for all.
    """
    surest = SUREST_BY_SAMPLER[student.default_sampler]
    by_probability = {**surest, "confidence": "probability"}
    found = _conditioned(surest, by_probability) if student.is_conditioned else _plain(surest)
    has_order = nfe > student.config.row_length // student.config.tokens_per_block
    left_out = set() if has_order else {BY_PROBABILITY, *list(ORDER_TEMPERATURES)[1:]}
    return {order: ways for order, ways in found.items() if order not in left_out}


def _conditioned(surest: Mapping[str, Any], by_probability: Mapping[str, Any]) -> Ways:
    found: Ways = {
        order: {f"argmax, tau {tau:g}": {**base, "decision": "argmax", "tau": tau} for tau in TAUS}
        for order, base in ((SUREST_FIRST, surest), (BY_PROBABILITY, by_probability))
    }
    for tau in DRAWN_TAUS:
        found[f"{SUREST_FIRST}, drawn at tau {tau:g}"] = {
            f"T {heat:g}": {**surest, "tau": tau, "temperature": heat}
            for heat in DRAWN_TEMPERATURES
        }
    return found


def _plain(surest: Mapping[str, Any]) -> Ways:
    found: Ways = {"ancestral": {f"nucleus {p:g}": {"nucleus_p": p} for p in NUCLEUS_PS}}
    for order, noise in ORDER_TEMPERATURES.items():
        base = {**surest, "confidence": "probability", "order_temperature": noise}
        found[order] = {f"T {heat:g}": {**base, "temperature": heat} for heat in TEMPERATURES}
    return found


class Fidelity:
    """Samples of a bench's students against its validation rows.

    Args:
        bench: Judges, validation rows, samples.
    """

    def __init__(self, bench: StoriesBench) -> None:
        self.bench = bench
        self.corpus = bench.validation[:, 1:].tolist()
        self.vocab_size = ShardStore.open(bench.home / "store").manifest.vocab_size
        self.states = {name: read(judge, bench.validation)[1] for name, judge in self._judges}

    @property
    def _judges(self) -> Iterable[tuple[str, Any]]:
        return self.bench.judges.items()

    def measure(self, folder: Path, nfe: int) -> list[dict[str, Any]]:
        """A figure per order and way of one student."""
        student: Any = load_student(folder).eval()
        cells = [
            (order, way, settings)
            for order, ways in ways_of(student, nfe).items()
            for way, settings in ways.items()
        ]
        found = []
        with progress_bar(f"{folder.name}, NFE {nfe}", len(cells), unit="settings") as bar:
            for order, way, settings in cells:
                tokens = self.bench.draw(student, nfe, settings)
                place = {"nfe": nfe, "order": order, "way": way}
                found.append({**place, **self.figures_of(tokens)})
                bar.advance(1)
        return found

    def text(self) -> dict[str, Any]:
        """Of as many rows that students were trained on: what chance alone leaves."""
        rows = rows_of(self.bench.home / "store", "train", self.bench.plan.num_samples)
        return self.figures_of(rows)

    def figures_of(self, tokens: Int[Tensor, "n l"]) -> dict[str, Any]:
        """Scores of each sample, and how far all of them are from the text."""
        samples = tokens[:, 1:].tolist()
        sums: dict[str, list[float]] = {}
        distances: dict[str, float] = {}
        for name, judge in self._judges:
            logits, states = read(judge, tokens)
            sums[name] = nll_sums(logits, tokens)
            distances[name] = frechet_distance(states, self.states[name])
        return {
            **scores_of(tokens, sums),
            "divergence_nats": frequency_divergence_nats(samples, self.corpus, self.vocab_size),
            "distances": distances,
        }
