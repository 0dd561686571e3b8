"""The codec benchmark's table and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = {
    "full": "#4d4d4d",
    "quantized": "#b07aa1",
    "topk": "#76b7b2",
    "seeded": "#e15759",
    "posterior": "#4e79a7",
    "hidden": "#59a14f",
    "peer": "#f28e2b",
}
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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    teachers = report["teachers"]
    figure, axes = plt.subplots(
        2, len(teachers), figsize=(6.6 * len(teachers), 8.6), squeeze=False, layout="constrained"
    )
    for column, (name, teacher) in enumerate(teachers.items()):
        axes[0][column].set_title(TITLES[name].format(**teacher), fontsize=11)
        _panel(axes[0][column], teacher["results"], _disagreement, "1 - coupling agreement")
        _panel(
            axes[1][column], teacher["results"], _embedding, "relative L2 error of softmax(xi) W"
        )
        axes[1][column].set_xlabel("bytes per token on disk")
    handles, labels = axes[0][0].get_legend_handles_labels()
    for column in range(1, len(teachers)):
        more = zip(*axes[0][column].get_legend_handles_labels(), strict=True)
        for handle, label in more:
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _disagreement(result: dict[str, Any]) -> float:
    return max(FLOOR, 1 - result["coupling_agreement"])


def _embedding(result: dict[str, Any]) -> float:
    return max(FLOOR, result["relative_l2_error"])


def _panel(axes: Any, results: list[dict[str, Any]], height: Any, label: str) -> None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault("peer" if result["peer"] else result["codec"], []).append(result)
    for codec, members in groups.items():
        members = sorted(members, key=lambda result: result["bytes_per_token"])
        x = [result["bytes_per_token"] for result in members]
        y = [height(result) for result in members]
        fresh = members[0]["fresh_draws"]
        axes.plot(
            x,
            y,
            marker="D" if codec == "peer" else ("o" if fresh else "s"),
            linestyle="none" if codec == "peer" else "-",
            color=COLORS[codec],
            markersize=6,
            linewidth=1.3,
            label="other projects" if codec == "peer" else codec,
        )
        for result, left, top in zip(members, x, y, strict=True):
            text = result["label"].removeprefix(codec).strip()
            level = top <= FLOOR  # labels of points side by side would cover each other
            axes.annotate(
                text.replace("-like", ""),
                (left, top),
                xytext=(4, 4) if codec == "peer" else (0, 5) if level else (-2, -4),
                textcoords="offset points",
                rotation=60 if level else 35 if codec == "peer" else -45,
                ha="left",
                va="bottom" if level or codec == "peer" else "top",
                rotation_mode="anchor",
                fontsize=6.5,
                color=COLORS[codec],
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 2, 1.5)
    axes.axhline(FLOOR, color="#999999", linewidth=0.7, linestyle=":")
    axes.text(0.99, FLOOR * 0.7, f"exact, or below {FLOOR:g}", fontsize=7, color="#777777",
              ha="right", transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_ylabel(label)
    axes.grid(True, which="major", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
