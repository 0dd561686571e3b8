"""What a drafter's slots make of the noise that they are told, slot by slot, without decoding.

    python -m benchmarks.slot_noise --store STORE --backbone DIR NAME=MODEL [NAME=MODEL ...]

Each MODEL is a run of ``gdistill-train --student drafter`` from shards of this backbone. Behind
starting points of validation rows, with the row's own noise: the training loss of each slot, that
loss when the slots are told the noise of another row instead, and how often a slot drafts the row's
token, among all points and among those whose earlier slots did (slot 1 is the backbone's own, and
drafts nothing in ``gdistill-sample``). Noise that is read at all costs nats when it is exchanged.
Writes ``slot_noise.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from jaxtyping import Bool, Float, Int
from torch import Tensor

from benchmarks.acceptance import parse_models
from benchmarks.measure import machine
from shards.atomic import write_json_atomic
from shards.console import run_command
from shards.errors import UsageError
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from trainer.objective.batch import Batch, BatchMaker, Places
from trainer.students.drafter.layout import SlotLayout
from trainer.students.folder import open_model
from trainer.students.registry import Drafter

SEED = 17
BATCH_ROWS = 16


def validation_batches(store: ShardStore, num_rows: int) -> list[Batch]:
    """The first rows of an epoch of the validation split, with noise and probabilities."""
    make = BatchMaker(store, "validation", SEED, torch.device("cpu"), True)
    split = store.split("validation", make.arrays)
    stream = ShardStream(split, seed=SEED, global_batch_size=BATCH_ROWS, num_workers=0)
    rows = zip(stream, range(num_rows // BATCH_ROWS), strict=False)
    return [make(batch, 0) for batch, _ in rows]


@torch.no_grad()
def read_slots(student: Drafter, batch: Batch) -> dict[str, Tensor]:
    """``loss`` and ``loss_of_others`` [points, K], nats, and ``right`` [points, K]."""
    layout, places = student.draw_layout(batch), everywhere(batch)
    table = None
    if student.is_conditioned:
        assert batch.noise is not None
        embedded = student.embed_noise(batch.noise.at(places))
        blank = embedded.new_zeros(*batch.tokens.shape, embedded.shape[-1])
        table = blank.index_put(places.index, embedded)
    logits = slot_logits(student, batch, layout, table)
    others = None if table is None else table.roll(1, dims=0)
    exchanged = slot_logits(student, batch, layout, others)
    tokens = batch.tokens.gather(1, layout.places)
    drafted = logits if student.sees_own_noise else logits + gumbels_at(batch, layout)
    found = {
        "loss": slot_losses(student, batch, layout, logits),
        "loss_of_others": slot_losses(student, batch, layout, exchanged),
        "right": drafted.argmax(dim=-1) == tokens,
    }
    return {name: value.reshape(-1, student.num_slots) for name, value in found.items()}


def everywhere(batch: Batch) -> Places:
    """All places but the first of each row."""
    mask = torch.ones_like(batch.tokens, dtype=torch.bool)
    mask[:, 0] = False
    return Places.of(mask)


def slot_logits(
    student: Drafter, batch: Batch, layout: SlotLayout, table: Float[Tensor, "b l e"] | None
) -> Float[Tensor, "b n v"]:
    """Of every slot."""
    inputs = student.slot_inputs(batch.tokens, layout, table)
    return student.logits(student.slot_states(batch.tokens, layout, inputs))


def rows_of(values: Float[Tensor, "places v"], batch: Batch) -> Float[Tensor, "b l v"]:
    """Values at :func:`everywhere`, laid out like the rows."""
    num_rows, length = batch.tokens.shape
    return torch.nn.functional.pad(values.view(num_rows, length - 1, -1), (0, 0, 1, 0))


def at_slots(rows: Float[Tensor, "b l v"], layout: SlotLayout) -> Float[Tensor, "b n v"]:
    """What stands at the places that the slots propose."""
    return rows.gather(1, layout.places[..., None].expand(-1, -1, rows.shape[-1]))


def gumbels_at(batch: Batch, layout: SlotLayout) -> Float[Tensor, "b n v"]:
    """xi of the places that the slots propose."""
    assert batch.noise is not None
    return at_slots(rows_of(batch.noise.at(everywhere(batch)).gumbels(), batch), layout)


def slot_losses(
    student: Drafter, batch: Batch, layout: SlotLayout, logits: Float[Tensor, "b n v"]
) -> Float[Tensor, "b n"]:
    """What each slot is trained on: -log q(x) where it is told its own noise, else KL(p || q)."""
    log_q = logits.log_softmax(dim=-1)
    if student.sees_own_noise:
        tokens = batch.tokens.gather(1, layout.places)
        return -log_q.gather(-1, tokens[..., None])[..., 0]
    stored = batch.distribution(everywhere(batch)).tile(0, logits.shape[-1])
    probs = at_slots(rows_of(stored, batch), layout)
    return -(torch.special.entr(probs) + probs * log_q).sum(dim=-1)


def describe(found: dict[str, Tensor]) -> dict[str, Any]:
    """Means by slot; the conditional shares come with how many points they are of."""
    right: Bool[Tensor, "points k"] = found["right"]
    earlier = torch.cat((torch.ones_like(right[:, :1]), right[:, 1:-1]), dim=1).cumprod(dim=1)
    reached: Int[Tensor, "k1"] = earlier.sum(dim=0)
    accepted = (earlier * right[:, 1:]).sum(dim=0)
    return {
        "points": len(right),
        "loss_nats": found["loss"].mean(dim=0).tolist(),
        "loss_nats_with_noise_of_another_row": found["loss_of_others"].mean(dim=0).tolist(),
        "right": right.float().mean(dim=0).tolist(),
        "reached": reached.tolist(),
        "conditional_acceptance": (accepted / reached.clamp_min(1)).tolist(),
    }


def main(
    models: Annotated[list[str], typer.Argument(help="NAME=FOLDER of trained drafters.")],
    store: Annotated[Path, typer.Option(help="Shards of the backbone, codec posterior.")],
    backbone: Annotated[str, typer.Option(help="The frozen language model below all of them.")],
    rows: Annotated[int, typer.Option(help="Validation rows.")] = 128,
    out: Annotated[Path, typer.Option(help="Folder for slot_noise.json.")] = Path("out/bench"),
) -> None:
    """Compare what drafters make of the noise that they are told."""
    batches, found = validation_batches(ShardStore.open(store), rows), {}
    for name, folder in parse_models(models).items():
        student = open_model(folder, backbone=backbone).student
        if not isinstance(student, Drafter):
            raise UsageError("no drafter", where=str(folder), got=type(student).__name__)
        parts = [read_slots(student, batch) for batch in batches]
        found[name] = line = describe({key: torch.cat([p[key] for p in parts]) for key in parts[0]})
        for key, values in line.items():
            shown = " ".join(f"{v:.3f}" for v in values) if isinstance(values, list) else values
            print(f"{name}: {key} {shown}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    document = {"models": found, "seed": SEED, "machine": machine(torch.device("cpu"))}
    write_json_atomic(out / "slot_noise.json", document)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    run_command(app)
