"""The codec benchmark's table and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evaluation.figures import figure_file, look

CODECS = ("posterior", "seeded", "hidden", "topk", "quantized", "full", "peer")
"""In the order of the palette; ``peer`` is what other projects store."""
FLOOR = 2e-4
TITLES = {
    "synthetic": "synthetic posteriors, V = {vocab_size}",
    "stories260K": "stories260K on TinyStories, V = {vocab_size}",
}


def markdown_table(report: dict[str, Any]) -> str:
    """One table per teacher, and the bars."""
    lines: list[str] = []
    for name, teacher in report["teachers"].items():
        lines += [
            f"### {TITLES[name].format(**teacher)}",
            "",
            f"{teacher['num_tokens']} tokens, mean entropy {teacher['entropy_nats']:.2f} nats, "
            f"mean mass of the 64 likeliest tokens {teacher['mass_of_top_64']:.3f}; "
            f"fp16 vectors take {teacher['fp16_vector_bytes_per_token']:,} B/token.",
            "",
            "| codec | draw | B/token | coupling agreement | max / mean error of xi (nats) "
            "| error of softmax(xi) W | encode / decode (tokens/s) |",
            "|---|---|---:|---:|---:|---:|---:|",
            *(_row(result) for result in teacher["results"]),
            "",
            *_peer_lines(teacher["results"]),
            *_layout_lines(teacher["id_layouts_bytes_per_token"]),
        ]
    lines += ["| promise | measured | |", "|---|---:|---|"]
    for bar in report["bars"]:
        mark = "met" if bar["met"] else "**missed**"
        what = f"{bar['teacher']}, {bar['label']}: {bar['promise']}"
        lines.append(f"| {what} | {bar['measured']:.5g} | {mark} |")
    return "\n".join(lines) + "\n"


def _peer_lines(results: list[dict[str, Any]]) -> list[str]:
    """Each peer beside the smallest setting with fresh draws and at least its agreement."""
    lines = [
        "| at equal coupling agreement | B/token | smallest of ours, fresh draws | B/token |",
        "|---|---:|---|---:|",
    ]
    for peer in (result for result in results if result["peer"]):
        level = peer["coupling_agreement"]
        rivals = [
            result
            for result in results
            if not result["peer"]
            and result["fresh_draws"]
            and result["coupling_agreement"] >= level
        ]
        best = min(rivals, key=lambda result: result["bytes_per_token"], default=None)
        ours = "none | n/a"
        if best is not None:
            ours = (
                f"{best['label']} ({best['coupling_agreement']:.4f}) "
                f"| {best['bytes_per_token']:,.0f}"
            )
        lines.append(f"| {peer['label']} ({level:.4f}) | {peer['bytes_per_token']:,.0f} | {ours} |")
    return [*lines, ""]


def _layout_lines(layouts: dict[str, float]) -> list[str]:
    if not layouts:
        return []
    rows = [f"| {name} | {size:.1f} |" for name, size in layouts.items()]
    return ["| ids of `posterior`, default settings | B/token |", "|---|---:|", *rows, ""]


def _row(result: dict[str, Any]) -> str:
    agreement = f"{result['coupling_agreement']:.4f}"
    if result["codec"] == "topk":
        agreement += f" ({result['coupling_agreement_shown']:.3f} as shown to the student)"
    errors = "n/a"
    if not result["fresh_draws"]:
        errors = f"{result['max_abs_error_nats']:.3g} / {result['mean_abs_error_nats']:.2g}"
    return " | ".join(
        [
            f"| {'*' + result['label'] + '*' if result['peer'] else result['label']}",
            "fresh" if result["fresh_draws"] else "frozen",
            f"{result['bytes_per_token']:,.0f}",
            agreement,
            errors,
            f"{result['relative_l2_error']:.2g}",
            f"{result['encode_tokens_per_second']:,.0f} / "
            f"{result['decode_tokens_per_second']:,.0f} |",
        ]
    )


def draw_figure(report: dict[str, Any], path: Path) -> None:
    """Two rows (agreement, conditioner's input) by one column per teacher."""
    teachers = report["teachers"]
    measures = {
        "1 - coupling agreement": lambda result: 1 - result["coupling_agreement"],
        "relative L2 error of softmax(xi) W": lambda result: result["relative_l2_error"],
    }
    size = (7.4 * len(teachers), 10)
    with figure_file(path, 2, len(teachers), size=size) as (figure, panels):
        for column, (name, teacher) in zip(panels.T, teachers.items(), strict=True):
            column[0].set_title(TITLES[name].format(**teacher))
            for axes, (label, height) in zip(column, measures.items(), strict=True):
                names = _panel(axes, teacher["results"], height, label)
            beside = {"transform": column[0].transAxes, "fontsize": 7, "va": "top"}
            for place, (text, color) in enumerate(names):
                column[0].text(1.02, 1 - 0.042 * place, text, color=color, **beside)
            column[-1].set_xlabel("bytes per token on disk")
        shown = {}
        for axes in panels[0]:
            handles, labels = axes.get_legend_handles_labels()
            shown |= dict(zip(labels, handles, strict=True))
        figure.legend(shown.values(), shown, loc="outside lower center", ncols=len(shown))


def _panel(
    axes: Any, results: list[dict[str, Any]], height: Any, label: str
) -> list[tuple[str, str]]:
    """A line per codec; points are numbered. Returns the list of numbers and names, with colours.

    Names beside the points would lie on each other: settings of one codec differ by a few bytes.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault("peer" if result["peer"] else result["codec"], []).append(result)
    names: list[tuple[str, str]] = []
    for codec in (codec for codec in CODECS if codec in groups):
        members = sorted(groups[codec], key=lambda result: result["bytes_per_token"])
        style = look(CODECS.index(codec))
        if codec == "peer":
            style["ls"] = "none"
        x = [result["bytes_per_token"] for result in members]
        y = [max(FLOOR, height(result)) for result in members]
        title = "other projects" if codec == "peer" else codec
        axes.plot(x, y, label=title, ms=6, **style)
        for result, left, top in zip(members, x, y, strict=True):
            text = result["label"].removeprefix(codec).strip().replace("-like", "")
            whose = "" if codec == "peer" else codec
            names.append((f"{len(names) + 1}  {whose} {text}", style["color"]))
            axes.annotate(
                str(len(names)),
                (left, top),
                xytext=(0, 5 if codec == "peer" or len(names) % 2 else -11),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=style["color"],
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 2, 1.5)
    axes.axhline(FLOOR, color="#999999", linewidth=0.7, linestyle=":")
    axes.text(0.01, FLOOR * 0.6, f"exact, or below {FLOOR:g}", fontsize=7, color="#777777",
              transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_ylabel(label)
    axes.grid(True, which="major", color="#eeeeee")
    return names
