"""Offline distillation for trainers of language models: a store stands in for the teacher.

class Distilled(DistillationMixin, transformers.Trainer): ...  # or trl.SFTTrainer

A row of the store is a packed sequence. The loss of a token is (1 - weight) NLL + weight T^2
KL(teacher || student), with the teacher's listed tokens as outcomes of their own and all others as
one outcome (:class:`trainer.objective.distillation.Outcomes`). docs/trainers.md is the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.data import default_collate

from shards.errors import UsageError
from shards.settings import derive_seed
from shards.store.manifest import COUNTED
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from trainer.objective.distillation import NOWHERE, Distillation, Outcomes, tempered_kl

IGNORED = -100
"""The label that transformers leave out of a loss."""
NOISE_KEY = "noise_key"
ROWS_READ_TOGETHER = 16
SMALLEST = 1e-38


def store_rows(
    place: str | Path,
    split: str = "train",
    *,
    seed: int | None = 0,
    epochs: int | None = None,
    with_teacher: bool = True,
) -> IterableDataset:
    """Rows of a store as a data set of transformers and TRL, the same ones in every process.

    A row is ``input_ids``, ``attention_mask`` and ``labels``, [L] int64, and ``teacher``, the
    store's arrays by name, [L, ...], and ``noise_key``, seed and row that name the noise of this
    visit. Labels are -100 at position 0, which nothing predicts, and in
    conversations at all tokens but the assistant's. A trainer that resumes skips rows and so meets
    those that it would have met.

    Args:
        place: Path or URL of a store.
        split: Which of its splits.
        seed: Of the order, which differs from epoch to epoch; None keeps the stored order.
        epochs: Passes over the split; None never ends, and ``max_steps`` ends the training.
        with_teacher: False reads the text alone.

    Raises:
        GdistillError: If no complete store is there, or no such split.
    """
    ShardStore.find(place).split(split)
    # By name: workers that are spawned take no closure.
    return IterableDataset.from_generator(partial(_rows, place, split, seed, epochs, with_teacher))


def _rows(
    place: str | Path, split: str, seed: int | None, epochs: int | None, with_teacher: bool
) -> Iterator[dict[str, Any]]:
    store = ShardStore.find(place)
    text = ["tokens", *(COUNTED.keys() & store.manifest.arrays.keys())]
    reader = store.split(split, None if with_teacher else text)
    # A shuffled stream ends before a batch that would be too small: here there is none.
    size = max(n for n in range(1, ROWS_READ_TOGETHER + 1) if reader.num_rows % n == 0)
    stream = ShardStream(reader, seed=seed or 0, global_batch_size=size, shuffle=seed is not None)
    is_fresh, own = store.codec.is_fresh, store.manifest.noise_seed(split)
    noise_seed, epoch = derive_seed(seed or 0, "noise") if is_fresh else own, 0
    while epochs is None or epoch < epochs:
        for batch in stream.one_pass(epoch):
            rows = batch.row_ids + is_fresh * epoch * reader.num_rows
            key = torch.stack((torch.full_like(rows, noise_seed), rows), 1)
            yield from _examples(dict(batch.arrays), key if with_teacher else None)
        epoch += 1


def _examples(arrays: dict[str, Tensor], keys: Tensor | None) -> Iterator[dict[str, Any]]:
    counted = arrays.pop("counted", None)
    for row, tokens in enumerate(arrays.pop("tokens").long()):
        labels = tokens.clone()
        if counted is not None:
            labels[counted[row] == 0] = IGNORED
        labels[0] = IGNORED
        example = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
        if keys is not None:
            teacher = {name: array[row] for name, array in arrays.items()}
            example["teacher"] = {**teacher, NOISE_KEY: keys[row]}  # type: ignore
        yield example


class DistillationLoss:
    """Loss of a language model against the teacher's distribution in a store.

    Args:
        place: Path or URL of the store.
        weight: Share of the KL; the rest is the NLL of the text.
        temperature: T of both distributions in the KL, which is scaled by T^2.

    Raises:
        UsageError: If a setting is out of range, or the store keeps noise and no distribution.
    """

    def __init__(self, place: str | Path, *, weight: float = 0.5, temperature: float = 1.0) -> None:
        if not 0 <= weight <= 1:
            raise UsageError("share out of range", where="weight", got=weight, expected="0 to 1")
        if not temperature > 0:
            got = temperature
            raise UsageError("not a temperature", where="temperature", got=got, expected="above 0")
        self.store = ShardStore.find(place)
        self.weight, self.temperature = weight, temperature
        if not self.store.codec.is_fresh:
            nothing = torch.empty(0)
            self.store.codec.distribution({}, nothing.long(), nothing, {})  # refuses, says why
        self._resources: dict[torch.device, dict[str, Tensor]] = {}

    def __call__(
        self,
        logits: Float[Tensor, "b l w"],
        labels: Int[Tensor, "b l"],
        teacher: dict[str, Tensor],
        *,
        num_items: Tensor | int | None = None,
        weight: float | None = None,
    ) -> Float[Tensor, ""]:
        """Loss in nats per token; the logits at i are of token i + 1.

        Args:
            logits: A language model's; columns past the store's vocabulary (padding) are cut off.
            labels: Tokens, -100 where none counts.
            teacher: The store's arrays, [B, L, ...].
            num_items: Tokens to divide by; by default those of these labels.
            weight: Another share of the KL.

        Raises:
            UsageError: If the model's vocabulary is smaller than the store's.
        """
        size, device = self.store.manifest.vocab_size, logits.device
        if (width := logits.shape[-1]) < size:
            remedy = f"the store has {size}: train a model that has the teacher's tokenizer"
            raise UsageError("the student's vocabulary is too small", got=width, remedy=remedy)
        labels = labels.roll(-1, 1).index_fill(1, torch.tensor([-1], device=device), IGNORED)
        counted = labels != IGNORED
        weights = counted / (counted.sum().clamp(min=1) if num_items is None else num_items)
        tokens = labels.masked_fill(~counted, 0).flatten()
        arrays = {name: array for name, array in teacher.items() if name != NOISE_KEY}
        arrays = {name: array.roll(-1, 1).flatten(0, 1) for name, array in arrays.items()}
        if device not in self._resources:
            self._resources[device] = {n: a.to(device) for n, a in self.store.resources.items()}
        own, log_probs = self._resources[device], arrays.pop("token_log_probs")
        distribution = self.store.codec.distribution(arrays, tokens, log_probs, own)
        share = self.weight if weight is None else weight
        outcomes, scores = Outcomes.of(distribution), logits.flatten(0, 1)
        if outcomes.ids is None:
            log_probs = scores[:, :size].float().log_softmax(dim=1)
            mixed = Distillation(distribution, share, self.temperature)
            return (mixed.losses(log_probs, tokens, slice(None)) * weights.flatten()).sum()
        args = outcomes.ids, outcomes.log_probs, tokens, weights.flatten(), share, self.temperature
        return MixedLoss.apply(scores, *args, size)  # type: ignore


class MixedLoss(torch.autograd.Function):
    """sum_i w_i ((1 - share) NLL_i + share T^2 KL_i), and its gradient without a graph over V.

    With q the student's probabilities and o the outcomes, d KL / d z_j is c_j where j is listed and
    c_rest q_j / q_rest elsewhere, c_o = T (q~_o - p~_o), ~ for tempered and normalised over o. So
    one softmax is all that is kept, as by cross-entropy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "n w"],
        ids: Int[Tensor, "n k"],
        teacher: Float[Tensor, "n o"],
        tokens: Int[Tensor, "n"],
        weights: Float[Tensor, "n"],
        share: float,
        temperature: float,
        size: int,
    ) -> Float[Tensor, ""]:
        probs = logits[:, :size].softmax(dim=1, dtype=torch.float32)
        tops = logits[:, :size].amax(dim=1, keepdim=True), probs.amax(dim=1, keepdim=True)
        normalizer = tops[0].float() - tops[1].log()
        nll = (normalizer - logits.gather(1, tokens[:, None]).float())[:, 0]
        unused = ids == size
        ids = torch.where(unused, tokens[:, None], ids)  # the token is listed: no other is touched
        listed = probs.gather(1, ids).masked_fill(unused, 0.0)
        known = (logits.gather(1, ids).float() - normalizer).masked_fill(unused, NOWHERE)
        rest = probs.scatter_(1, ids, 0.0).sum(dim=1, keepdim=True).clamp(min=SMALLEST)
        student = torch.cat((known, rest.log()), dim=1)
        losses = (1 - share) * nll + share * tempered_kl(teacher, student, temperature)
        gaps = (student / temperature).softmax(dim=1) - (teacher / temperature).softmax(dim=1)
        gaps.mul_(share * temperature)
        scale = weights[:, None] * (1 - share + gaps[:, -1:] / rest)
        at_ids = weights[:, None] * ((1 - share) * listed + gaps[:, :-1].masked_fill(unused, 0.0))
        at_token = (share - 1) * weights[:, None]
        places, values = torch.cat((ids, tokens[:, None]), 1), torch.cat((at_ids, at_token), 1)
        ctx.save_for_backward(probs, scale, places, values)
        ctx.width, ctx.dtype = logits.shape[1], logits.dtype
        return (losses * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Float[Tensor, ""]) -> tuple[Tensor | None, ...]:
        probs, scale, ids, values = ctx.saved_tensors
        # In place: memory as large as the logits costs more than the product. autograd refuses a
        # second backward pass, which would find what it saved altered.
        gradient = probs.mul_(scale * upstream).scatter_add_(1, ids, values * upstream)
        if ctx.width > probs.shape[1]:  # padding by nothing would be a copy
            gradient = torch.nn.functional.pad(gradient, (0, ctx.width - probs.shape[1]))
        return gradient.to(ctx.dtype), *[None] * 7


class DistillationMixin:
    """Put before ``transformers.Trainer`` or ``trl.SFTTrainer``: its loss becomes that of a store.

    An evaluation's loss is the NLL alone, nats per token.

    Args:
        model, args, kwargs: As the trainer has them.
        distillation: The loss.
    """

    def __init__(self, model: Any, args: Any, *, distillation: DistillationLoss, **kwargs: Any):
        args.remove_unused_columns = False  # no model has a column for the teacher
        self.distillation = distillation
        super().__init__(model, args, data_collator=default_collate, **kwargs)  # type: ignore

    def compute_loss(
        self: Any,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch of :func:`store_rows`, summed and divided as the trainer does it."""
        if "teacher" not in inputs:
            raise UsageError("rows without their teacher", remedy="leave with_teacher=False out, or use plain Trainer")
        labels, teacher = inputs.pop("labels"), inputs.pop("teacher")
        outputs = model(**inputs)
        options = {"num_items": num_items_in_batch, "weight": None if model.training else 0.0}
        loss = self.distillation(outputs.logits, labels, teacher, **options)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss
