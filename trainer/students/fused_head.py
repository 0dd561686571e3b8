"""Output projection and cross-entropy in one: the logits of all rows are never held at once.

With logits z = features W^T + b and p = softmax(z), the loss sum_i w_i (-log p_i[target_i]) has
d loss / dz = w (p - onehot). The weights w are known in the forward pass, so it also computes the
gradients, chunk by chunk, and the backward pass only scales them: three matrix products in all,
as in the plain formulation, and memory for one chunk of logits. With a teacher the loss of a row
is that of :class:`Distillation`, and d loss / dz is left to autograd, chunk by
chunk (of a quarter of the rows, since it keeps intermediate results).
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from shards.language_model.forward import largest_batch
from shards.noise.embedding import add_product, even_width, product_dtype
from trainer.objective.corruption import MASK_LOGIT_OFFSET
from trainer.objective.distillation import Distillation

CHUNK_ROWS = {"cpu": 512, "cuda": 4096}
HEAD_MULTIPLE = {"cpu": 1, "cuda": 64}
"""Columns of a product are padded to a multiple of it: of V + 1 = 50,258, no GPU can align a row.
Padding has a bias of -inf, and so no probability and no gradient; the parameters know nothing."""


class WeightedNLL(torch.autograd.Function):
    """(features [n, D], W [V + 1, D], b, targets, weights, ...) -> (loss, NLL of each row)."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        row_weights: Tensor,
        mask_id: int,
        dtype: torch.dtype,
        distillation: Distillation | None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "n"]]:
        device, size = features.device, len(bias)
        nlls = torch.empty(len(targets), device=device)
        losses = nlls if distillation is None else torch.empty_like(nlls)
        narrow, narrow_bias = padded_head(weight, bias, dtype)
        gradients: tuple[Tensor, ...] = ()
        if any(ctx.needs_input_grad[:3]):
            head = torch.zeros(narrow.shape, device=device), torch.zeros(len(narrow), device=device)
            gradients = torch.empty(features.shape, device=device), *head
        width = even_width(len(targets), chunk_rows(device, len(narrow), distillation is not None))
        with torch.autocast(device.type, enabled=False):
            for start in range(0, len(targets), width):
                rows = slice(start, start + width)
                inputs, wanted, weights = features[rows].to(dtype), targets[rows], row_weights[rows]
                logits = torch.addmm(narrow_bias, inputs, narrow.T).float()
                logits[:, mask_id] += MASK_LOGIT_OFFSET
                own = logits.gather(-1, wanted[:, None])[:, 0]
                nlls[rows] = logits.logsumexp(dim=-1) - own
                if distillation is not None:
                    known = logits[:, :size]
                    losses[rows], slope = _distilled(distillation, known, wanted, weights, rows)
                    slope = pad(slope, (0, len(narrow) - size))
                elif gradients:  # w (p - onehot), written over the logits
                    slope = logits.sub_((nlls[rows] + own)[:, None]).exp_()
                    slope.scatter_add_(1, wanted[:, None], slope.new_full((len(wanted), 1), -1.0))
                    slope.mul_(weights[:, None])
                if gradients:
                    gradients[2].add_(slope.sum(dim=0))
                    slope = slope.to(dtype)
                    gradients[0][rows] = slope @ narrow
                    add_product(gradients[1], slope.T, inputs)
        # The padding's gradients stay here.
        ctx.save_for_backward(*gradients[:1], *(gradient[:size] for gradient in gradients[1:]))
        ctx.dtypes = features.dtype, weight.dtype, bias.dtype
        ctx.mark_non_differentiable(nlls)
        return (losses * row_weights).sum(), nlls

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [gradient.mul_(grad_loss) for gradient in ctx.saved_tensors]
        cast = [value.to(dtype) for value, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return *cast, None, None, None, None, None


def chunk_rows(device: torch.device, num_columns: int, is_distilled: bool) -> int:
    """Rows whose logits are held at once: none of a GPU's tensors is beyond 32 bits."""
    rows = CHUNK_ROWS.get(device.type, CHUNK_ROWS["cuda"])
    rows = max(1, rows // 4) if is_distilled else rows
    return min(rows, largest_batch(num_columns, device))


def padded_head(weight: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and bias of the product, in its precision and with as many columns as it computes."""
    size = len(bias)
    missing = -size % HEAD_MULTIPLE.get(weight.device.type, HEAD_MULTIPLE["cuda"])
    if not missing:
        return weight.to(dtype), bias.to(dtype)
    wide = torch.empty(size + missing, weight.shape[1], dtype=dtype, device=weight.device)
    wide[:size].copy_(weight)
    wide[size:].zero_()
    return wide, pad(bias.to(dtype), (0, missing), value=-torch.inf)


def _distilled(
    distillation: Distillation, logits: Tensor, targets: Tensor, row_weights: Tensor, rows: slice
) -> tuple[Float[Tensor, "c"], Float[Tensor, "c v1"]]:
    """(losses, d sum_i w_i loss_i / d logits) of one chunk."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        losses = distillation.losses(logits.log_softmax(dim=-1), targets, rows)
        (slope,) = torch.autograd.grad((losses * row_weights).sum(), logits)
    return losses.detach(), slope


def weighted_nll(
    features: Float[Tensor, "n d"],
    projection: torch.nn.Linear,
    targets: Int[Tensor, "n"],
    row_weights: Float[Tensor, "n"],
    mask_id: int,
    distillation: Distillation | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "n"]]:
    """sum_i w_i NLL_i with the mask excluded from the distribution, and the NLLs (detached), nats.

    ``features`` are what ``projection`` to V + 1 logits sees; w has no gradient. With a teacher the
    sum is of :meth:`Distillation.losses`; the NLLs stay what they are.
    """
    weight, bias = projection.weight, projection.bias
    rest = targets, row_weights, mask_id, product_dtype(weight), distillation
    return WeightedNLL.apply(features, weight, bias, *rest)  # type: ignore[no-any-return]
