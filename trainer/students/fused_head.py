"""Output projection and cross-entropy in one: the logits of all rows are never held at once.

With logits z = features W^T + b and p = softmax(z), the loss sum_i w_i (-log p_i[target_i]) has
d loss / dz = w (p - onehot). The weights w are known in the forward pass, so it also computes the
gradients, chunk by chunk, and the backward pass only scales them: three matrix products in all,
as in the plain formulation, and memory for one chunk of logits. With a teacher the loss of a row
is that of :class:`Distillation`, and d loss / dz is left to autograd, chunk by
chunk (of a quarter of the rows, since it keeps intermediate results).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from shards.language_model.forward import largest_batch
from shards.noise.embedding import add_product, even_width, product_dtype
from shards.noise.kinds import HeadAndTail, Probabilities
from trainer.objective.corruption import MASK_LOGIT_OFFSET

# Token-level knowledge distillation: the teacher's probabilities as target, not its one token.
#
# Where a store lists some tokens and the mass of the others, the others are one outcome, for the
# teacher and for the student alike: both normalise over the same outcomes, and within the rest the
# student keeps its own proportions. Where all V probabilities are known nothing is approximated.


NOWHERE = -2e6
"""Log-probability of listed tokens among the rest: finite, so that gradients are, and exp is 0."""


@dataclass(frozen=True)
class Outcomes:
    """What the teacher tells apart at n positions, and how likely that is.

    Attributes:
        log_probs: [n, o] float32, nats, -inf where impossible. Over all V tokens, or over k listed
            ones and, last, all others together (o = k + 1).
        ids: [n, k] listed tokens, an id past V in unused slots; None where all V are told apart.
    """

    log_probs: Float[Tensor, "n o"]
    ids: Int[Tensor, "n k"] | None = None

    @classmethod
    def of(cls, teacher: Probabilities) -> Outcomes:
        """The outcomes of a stored distribution."""
        size = teacher.vocab_size
        if not isinstance(teacher, HeadAndTail):
            return cls(teacher.tile(0, size).log())
        head = teacher.head
        is_whole = head.used.sum(dim=1) == size  # then what is left over is rounding, and no token
        rest = teacher.tail_mass.masked_fill(is_whole, 0.0)
        probs = torch.cat((head.values.masked_fill(~head.used, 0.0), rest[:, None]), dim=1)
        return cls(probs.log(), head.ids.masked_fill(~head.used, size))

    def group(self, log_probs: Float[Tensor, "n v1"]) -> Float[Tensor, "n o"]:
        """A student's log-probabilities over V tokens and the mask, summed within outcomes."""
        if self.ids is None:
            return log_probs[:, : self.log_probs.shape[1]]
        rest = log_probs.scatter(1, self.ids, NOWHERE).logsumexp(dim=1, keepdim=True)
        return torch.cat((log_probs.gather(1, self.ids), rest), dim=1)


def tempered_kl(
    teacher: Float[Tensor, "n o"], student: Float[Tensor, "n o"], temperature: float = 1.0
) -> Float[Tensor, "n"]:
    """T^2 KL(p || q) in nats, p and q proportional to the T-th roots (Hinton et al. 2015, eq. 4).

    T^2 keeps the gradient's size; at T = 1 it is the forward KL itself.

    Args:
        teacher: Log-probabilities, up to a constant per row; -inf where impossible.
        student: The same of the student, with gradient.
        temperature: T.
    """
    target = (teacher / temperature).log_softmax(dim=1)
    found = (student / temperature).log_softmax(dim=1)
    possible = target > -torch.inf
    gaps = torch.where(possible, target, 0.0) - found
    return temperature**2 * (target.exp() * gaps).sum(dim=1)


@dataclass(frozen=True)
class Distillation:
    """The loss of n positions with a teacher: (1 - weight) NLL + weight KL.

    Attributes:
        teacher: Its stored distribution at the n positions.
        weight: Share of the KL.
        temperature: T of both distributions in the KL.
    """

    teacher: Probabilities
    weight: float = 1.0
    temperature: float = 1.0

    def losses(
        self, log_probs: Float[Tensor, "c v1"], targets: Int[Tensor, "c"], rows: slice
    ) -> Float[Tensor, "c"]:
        """Of some of the positions, nats.

        Args:
            log_probs: The student's, over V tokens and the mask (about -1e6), with gradient.
            targets: The corpus tokens.
            rows: Which of the n positions these are.
        """
        outcomes = Outcomes.of(self.teacher.select(rows))
        kl = tempered_kl(outcomes.log_probs, outcomes.group(log_probs), self.temperature)
        nll = -log_probs.gather(1, targets[:, None])[:, 0]
        return (1 - self.weight) * nll + self.weight * kl


# Output projection and cross-entropy.


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
        needs_gradient = any(ctx.needs_input_grad[:3])
        nlls = torch.empty(len(targets), device=features.device)
        losses = nlls if distillation is None else torch.empty_like(nlls)
        narrow, narrow_bias = padded_head(weight, bias, dtype)
        gradients = _empty_gradients(features, narrow) if needs_gradient else None
        width = chunk_rows(features.device, len(narrow), distillation is not None)
        width = even_width(len(targets), width)
        with torch.autocast(features.device.type, enabled=False):
            for start in range(0, len(targets), width):
                rows = slice(start, start + width)
                inputs = features[rows].to(dtype)
                logits = torch.addmm(narrow_bias, inputs, narrow.T).float()
                logits[:, mask_id] += MASK_LOGIT_OFFSET
                nlls[rows] = _row_nlls(logits, targets[rows])
                slope = None
                if distillation is not None:
                    losses[rows], slope = _distilled(
                        distillation, logits[:, : len(bias)], targets[rows], row_weights[rows], rows
                    )
                    slope = pad(slope, (0, len(narrow) - len(bias)))
                elif needs_gradient:
                    slope = _slope_(logits, nlls[rows], targets[rows], row_weights[rows])
                if gradients is not None and slope is not None:
                    _accumulate(gradients, rows, slope, inputs, narrow)
        if gradients is not None:  # without the padding's
            gradients = gradients[0], gradients[1][: len(bias)], gradients[2][: len(bias)]
        ctx.save_for_backward(*(gradients or ()))
        ctx.dtypes = features.dtype, weight.dtype, bias.dtype
        ctx.mark_non_differentiable(nlls)
        return (losses * row_weights).sum(), nlls

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            (gradient.mul_(grad_loss) if gradient.dtype == torch.float32 else gradient * grad_loss)
            for gradient in ctx.saved_tensors
        ]
        cast = [value.to(dtype) for value, dtype in zip(scaled, ctx.dtypes, strict=True)]
        return *cast, None, None, None, None, None


Gradients = tuple[Tensor, Tensor, Tensor]


def chunk_rows(device: torch.device, num_columns: int, is_distilled: bool) -> int:
    """Rows whose logits are held at once: none of a GPU's tensors is beyond 32 bits."""
    rows = CHUNK_ROWS.get(device.type, CHUNK_ROWS["cuda"])
    rows = max(1, rows // 4) if is_distilled else rows
    return min(rows, largest_batch(num_columns, device))


def padded_head(
    weight: Float[Tensor, "v1 d"], bias: Float[Tensor, "v1"], dtype: torch.dtype
) -> tuple[Float[Tensor, "columns d"], Float[Tensor, "columns"]]:
    """Weight and bias of the product, in its precision and with as many columns as it computes."""
    kind, size = weight.device.type, len(bias)
    missing = -size % HEAD_MULTIPLE.get(kind, HEAD_MULTIPLE["cuda"])
    if not missing:
        return weight.to(dtype), bias.to(dtype)
    wide = torch.empty(size + missing, weight.shape[1], dtype=dtype, device=weight.device)
    wide[:size].copy_(weight)
    wide[size:].zero_()
    return wide, pad(bias.to(dtype), (0, missing), value=-torch.inf)


def _empty_gradients(features: Tensor, weight: Tensor) -> Gradients:
    device = features.device
    return (
        torch.empty(features.shape, device=device),
        (torch.empty if len(features) else torch.zeros)(weight.shape, device=device),
        torch.zeros(len(weight), device=device),
    )


def _row_nlls(logits: Float[Tensor, "c v1"], targets: Int[Tensor, "c"]) -> Float[Tensor, "c"]:
    return logits.logsumexp(dim=-1) - logits.gather(-1, targets[:, None])[:, 0]


def _slope_(logits: Tensor, nlls: Tensor, targets: Tensor, row_weights: Tensor) -> Tensor:
    """w (p - onehot), written over the logits."""
    log_normalizer = nlls + logits.gather(-1, targets[:, None])[:, 0]
    slope = logits.sub_(log_normalizer[:, None]).exp_()
    slope.scatter_add_(1, targets[:, None], slope.new_full((len(targets), 1), -1.0))
    return slope.mul_(row_weights[:, None])


def _distilled(
    distillation: Distillation, logits: Tensor, targets: Tensor, row_weights: Tensor, rows: slice
) -> tuple[Float[Tensor, "c"], Float[Tensor, "c v1"]]:
    """(losses, d sum_i w_i loss_i / d logits) of one chunk."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        losses = distillation.losses(logits.log_softmax(dim=-1), targets, rows)
        (slope,) = torch.autograd.grad((losses * row_weights).sum(), logits)
    return losses.detach(), slope


def _accumulate(
    gradients: Gradients, rows: slice, slope: Tensor, inputs: Tensor, weight: Tensor
) -> None:
    grad_features, grad_weight, grad_bias = gradients
    grad_bias += slope.sum(dim=0)
    narrow = slope.to(inputs.dtype)
    grad_features[rows] = narrow @ weight
    add_product(grad_weight, narrow.T, inputs, first=rows.start == 0)


def weighted_nll(
    features: Float[Tensor, "n d"],
    projection: torch.nn.Linear,
    targets: Int[Tensor, "n"],
    row_weights: Float[Tensor, "n"],
    mask_id: int,
    distillation: Distillation | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "n"]]:
    """sum_i w_i NLL_i with the mask excluded from the distribution, and the NLLs (detached), nats.

    With a teacher the sum is of :meth:`Distillation.losses`; the NLLs stay what they are.

    Args:
        features: What the projection sees, one row per masked token.
        projection: Linear to V + 1 logits.
        targets: The tokens to predict.
        row_weights: w, without gradient.
        mask_id: Column whose probability is zero.
        distillation: The teacher at the same rows, and how much it counts.
    """
    return WeightedNLL.apply(  # type: ignore[no-any-return]
        features,
        projection.weight,
        projection.bias,
        targets,
        row_weights,
        mask_id,
        product_dtype(projection.weight),
        distillation,
    )
