"""The bars set for a GPU: which figure of the suite answers each, and the page that says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Part = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        part: How the names of the suite's parts begin that it is about.
        what: What is compared.
        figure: Reads the figure from a part.
        bound: The bar.
        is_least: Whether the figure must reach the bound, or stay below it.
    """

    part: str
    what: str
    figure: Callable[[Part], float]
    bound: float
    is_least: bool

    def met_by(self, figure: float) -> bool:
        """Whether the bar is met; a figure that is no number meets none."""
        return figure >= self.bound if self.is_least else figure <= self.bound

    @property
    def title(self) -> str:
        """What is compared, with the bound."""
        return f"{self.what} {'>=' if self.is_least else '<='} {self.bound:g}"


BARS = (
    Bar(
        "training, ",
        "tokens per second from shards over an online teacher",
        lambda part: part["decoupling_gain"],
        2.5,
        is_least=True,
    ),
    Bar(
        "conditioner ",
        "time of the tiled conditioner over a dense one",
        lambda part: part["noise in memory"]["time_ratio"],
        0.5,
        is_least=False,
    ),
    Bar(
        "first hitting",
        "tokens per second of 16 rows over one",
        lambda part: part["batched_gain"],
        6.0,
        is_least=True,
    ),
    Bar(
        "extraction",
        "stage 2 over the bare forward pass",
        lambda part: part["figures"]["posterior"]["ratio"],
        1.10,
        is_least=False,
    ),
)


def bars_of(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Title -> figure and whether the bar is met; parts that failed or were left out have none."""
    bars: dict[str, dict[str, Any]] = {}
    for bar in BARS:
        for name, part in found.items():
            if name.startswith(bar.part) and isinstance(part, dict) and "error" not in part:
                figure = bar.figure(part)
                bars[f"{name}: {bar.title}"] = {"figure": figure, "met": bar.met_by(figure)}
    return bars


def page_of(record: Mapping[str, Any]) -> str:
    """The suite's record as one Markdown page: bars, then checks, then what is missing."""
    machine = ", ".join(f"{name} {value}" for name, value in record["machine"].items())
    lines = ["# GPU suite", "", f"Shape `{record['shape']}`. {machine}.", ""]
    kernels = {name: record.get(f"{name}_kernel", "eager") for name in ("conditioner", "draws")}
    also = ", ".join(f"{name} {kernel}" for name, kernel in kernels.items())
    lines += [f"Noise kernel: {record['noise_kernel']}; {also}.", ""]
    lines += ["| bar | figure | met |", "| --- | ---: | --- |"]
    for name, bar in record["bars"].items():
        lines.append(f"| {name} | {bar['figure']:.3g} | {'yes' if bar['met'] else 'NO'} |")
    unanswered = [
        bar.title for bar in BARS if not any(bar.title in name for name in record["bars"])
    ]
    lines += [f"| {title} | not measured | NO |" for title in unanswered]
    lines += ["", "| check | error | passed |", "| --- | ---: | --- |"]
    for name, check in record["checks"].items():
        lines.append(
            f"| {name} | {check.get('error', '')} | {'yes' if check['passed'] else 'NO'} |"
        )
    lines += ["", f"Failed: {', '.join(record['failures']) or 'nothing'}."]
    lines += [f"Left out for want of time: {', '.join(record['left_out_for_time']) or 'nothing'}."]
    return "\n".join(lines) + "\n"
