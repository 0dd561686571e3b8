"""The end of a run whose loss or gradient is not a number, told by the rows that caused it."""

from __future__ import annotations

import torch
from accelerate.utils import gather_object
from jaxtyping import Float, Int
from torch import Tensor

from shards.base import GdistillError

MAX_NAMED_ROWS = 16


def diverged(
    step: int,
    loss: float,
    grad_norm: float,
    rows: list[tuple[Int[Tensor, "b"], Float[Tensor, "b"]]],
    checkpoint_steps: list[int],
) -> GdistillError:
    """The error to raise, the same one on every process; all of them must call this.

    Args:
        step: The step that failed.
        loss: Global loss.
        grad_norm: Global gradient norm.
        rows: Row ids and NLLs of this process's micro-batches.
        checkpoint_steps: Checkpoints there are.
    """
    ids = torch.cat([row_ids for row_ids, _ in rows]).cpu()
    finite = torch.cat([nlls for _, nlls in rows]).isfinite().cpu()
    bad = gather_object(ids[~finite].tolist())
    everything = gather_object(ids.tolist())
    what = "the loss is not finite" if bad else "the gradient is not finite"
    last = f"the last good checkpoint is step {checkpoint_steps[-1]}" if checkpoint_steps else ""
    return GdistillError(
        what,
        where=f"step {step}",
        got=f"loss {loss}, gradient norm {grad_norm}, rows {_listed(bad or everything)}",
        remedy=f"look at these rows of the train split, or lower the learning rate; {last}",
    )


def _listed(rows: list[int]) -> str:
    named = ", ".join(map(str, sorted(rows)[:MAX_NAMED_ROWS]))
    more = len(rows) - MAX_NAMED_ROWS
    return f"{named} and {more} more" if more > 0 else named
