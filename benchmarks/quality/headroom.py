"""The most that noise can be worth: the exact optimum of one pass without it, from the teacher.

    python -m benchmarks.quality.headroom --teacher DIR/stories260K

A model that sees no noise and fills m tokens in one pass draws each from its own marginal given
the known text. Drawn from the teacher's true marginals that is the best such model, and it can be
sampled exactly: token j of a fill is token j of a rollout of its own, so that tokens of one fill
are independent while each has the teacher's law. With noise the tokens are determined together, and
the best is the teacher's own continuation. Both have the same distribution of tokens at every
position, so a first pass is compared at equal entropy; what lies between them is the headroom.
Behind it the optimum goes on from its own incoherent text, as any decoder must.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Float, Int
from torch import Tensor

from shards.atomic import write_json_atomic
from shards.console import run_command
from shards.provenance import generator

BLOCKS = (1, 2, 4, 8, 16, 32)
AHEAD = 32
ROLLOUTS_AT_ONCE = 1024
NUM_RESAMPLES = 1000


@torch.no_grad()
def rollouts(
    teacher: Any, context: Int[Tensor, "n l"], length: int, random: torch.Generator
) -> Int[Tensor, "n length"]:
    """The teacher's own continuation of every row, drawn token by token."""
    read, cache, written = context, None, []
    for _ in range(length):
        output = teacher(input_ids=read, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        probabilities = output.logits[:, -1].double().softmax(-1)
        read = torch.multinomial(probabilities, 1, generator=random)
        written.append(read)
    return torch.cat((context[:, :0], *written), dim=1)


def independent_fill(
    teacher: Any, context: Int[Tensor, "n l"], size: int, random: torch.Generator
) -> Int[Tensor, "n size"]:
    """``size`` tokens behind every row, each from its marginal given the row, independent."""
    parts = []
    for rows in context.split(max(1, ROLLOUTS_AT_ONCE // size)):
        several = rollouts(teacher, rows.repeat_interleave(size, dim=0), size, random)
        parts.append(several.unflatten(0, (len(rows), size)).diagonal(dim1=1, dim2=2))
    return torch.cat(parts)


def fill_by_blocks(
    teacher: Any, context: Int[Tensor, "n l"], size: int, random: torch.Generator
) -> Int[Tensor, "n ahead"]:
    """AHEAD tokens in one pass per block of ``size``; 1 is the teacher itself."""
    rows = context
    for _ in range(AHEAD // size):
        rows = torch.cat((rows, independent_fill(teacher, rows, size, random)), dim=1)
    return rows[:, context.shape[1] :]


@torch.no_grad()
def nll(
    judge: Any, context: Int[Tensor, "n l"], written: Int[Tensor, "n m"]
) -> Float[Tensor, "n m"]:
    """-log p of each written token behind its context, nats."""
    logits = judge(input_ids=torch.cat((context, written), dim=1)).logits
    log_probs = logits[:, context.shape[1] - 1 : -1].float().log_softmax(-1)
    return -log_probs.gather(-1, written[..., None])[..., 0]


def interval(values: Float[Tensor, "n"]) -> dict[str, Any]:
    """Mean over rows with its 95% bootstrap interval."""
    numbers = values.double().numpy()
    draws = np.random.default_rng(0).integers(len(numbers), size=(NUM_RESAMPLES, len(numbers)))
    low, high = np.quantile(numbers[draws].mean(axis=1), [0.025, 0.975])
    return {"value": float(numbers.mean()), "interval_95": [float(low), float(high)]}


def measure(teacher: Any, first_token: int, num_rows: int, start: int, seed: int) -> dict[str, Any]:
    """NLL per token of the teacher and of the optimum without noise, by block and by distance."""
    random = generator(seed, "headroom")
    first = torch.full((num_rows, 1), first_token)
    context = torch.cat((first, rollouts(teacher, first, start - 1, random)), dim=1)
    own = nll(teacher, context, rollouts(teacher, context, AHEAD, random))
    by_block = {}
    for size in BLOCKS:
        found = nll(teacher, context, fill_by_blocks(teacher, context, size, random))
        by_block[str(size)] = {
            "nll_nats": interval(found.mean(1)),
            "headroom_nats": interval(found.mean(1) - own.mean(1)),
            "first_block_nll_nats": interval(found[:, :size].mean(1)),
            "first_block_headroom_nats": interval((found - own)[:, :size].mean(1)),
        }
    return {"teacher": {"nll_nats": interval(own.mean(1))}, "blocks": by_block}


def headroom(
    teacher: Annotated[Path, typer.Option(help="Folder of the teacher.")],
    out: Annotated[Path, typer.Option(help="Results.")] = Path("benchmarks/results"),
    num_rows: Annotated[int, typer.Option(help="Continuations.")] = 256,
    start: Annotated[int, typer.Option(help="Known tokens of each.")] = 48,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
) -> None:
    """Print and write what noise can be worth at most, for one pass per block."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    found = measure(model, int(model.config.bos_token_id), num_rows, start, seed)
    settings = {"teacher": teacher.name, "num_rows": num_rows, "start": start, "seed": seed}
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out / "quality-headroom.json", {"settings": settings, **found})
    table = headroom_table(found)
    (out / "quality-headroom.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    typer.echo("\n".join(table))


def headroom_table(found: dict[str, Any]) -> list[str]:
    """Markdown: a line per number of tokens that one pass fills."""
    lines = [
        "| tokens per pass | NLL of the first pass | headroom there | NLL of all 32 | headroom |"
        " teacher's perplexity over the optimum's |",
        "|---|---|---|---|---|---|",
    ]
    for size, row in sorted(found["blocks"].items(), key=lambda item: int(item[0])):
        ratio = math.exp(-row["headroom_nats"]["value"])
        names = ("first_block_nll_nats", "first_block_headroom_nats", "nll_nats", "headroom_nats")
        cells = " | ".join(_cell(row[name]) for name in names)
        lines.append(f"| {size} | {cells} | {ratio:.2g} |")
    return lines


def _cell(number: dict[str, Any]) -> str:
    low, high = number["interval_95"]
    return f"{number['value']:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(headroom)
    run_command(app)
