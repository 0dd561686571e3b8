"""One training step of MDLM + Gumbel, three ways: ours, plainly dense, and with an online teacher.

All three take the same batch, weights, corruption and optimiser, and give the same loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from benchmarks.goldens import substituted_log_probs
from shards.noise.embedding import Noise, dense_arrivals
from shards.noise.gumbel import DenseProbabilities, KeyedPosterior
from shards.noise.philox import PositionKeys
from trainer.objective.batch import Batch, Places
from trainer.students.registry import MDLM
from trainer.training.checkpoint import clip_gradients


def finish_step(losses: Iterable[Tensor], student: MDLM, optimizer: torch.optim.Optimizer) -> None:
    """Backward of each loss, clip, update."""
    for loss in losses:
        loss.backward()
    clip_gradients(student.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def tiled_loss(student: MDLM, batch: Batch) -> Tensor:
    """Ours: noise decoded at masked positions, in tiles; only masked rows meet the head."""
    return student.loss(batch).loss


def dense_gumbels(batch: Batch) -> Tensor:
    """xi [B, L, V] of every position, as a tensor; position 0 has none and is 0."""
    assert batch.noise is not None
    everywhere = torch.ones_like(batch.tokens, dtype=torch.bool)
    everywhere[:, 0] = False
    rows = -dense_arrivals(batch.noise.at(everywhere)).log()
    xi = rows.new_zeros(*batch.tokens.shape, rows.shape[-1])
    return xi.masked_scatter_(everywhere[..., None], rows)


def dense_loss(student: MDLM, batch: Batch, xi: Tensor) -> Tensor:
    """The textbook formulation: softmax(xi) W and full-vocabulary logits at every position."""
    corruption = student.corrupt(batch)
    mask = corruption.mask[..., None]
    tokens = batch.tokens.masked_fill(corruption.mask, student.mask_id)
    assert student.conditioner is not None
    noise = torch.softmax(xi, dim=-1) @ student.conditioner.weight
    embeddings = torch.where(mask, noise, student.backbone.vocab_embed(tokens))
    level = student.backbone.embed_sigma(torch.zeros(len(tokens), device=tokens.device))
    hidden = student.contextualize(embeddings, batch.tokens, level)
    head = student.backbone.output_layer
    log_probs = substituted_log_probs(head(head.features(hidden, level)), tokens, student.mask_id)
    nlls = -log_probs.gather(-1, batch.tokens[..., None])[..., 0]
    return (nlls * corruption.weight).sum() / batch.tokens.numel()


@dataclass(frozen=True)
class OnlineNoise:
    """Row noise straight from a teacher's log-probabilities, [B, L-1, V]."""

    log_probs: Tensor
    tokens: Tensor
    row_ids: Tensor

    def at(self, where: Tensor | Places) -> Noise:
        """Posterior noise of the masked positions, drawn anew."""
        rows, positions = Places.of(where).index
        log_probs, tokens = self.log_probs[rows, positions - 1], self.tokens[rows, positions]
        chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
        keys = PositionKeys(3, self.row_ids[rows], positions)
        return KeyedPosterior(keys, tokens, chosen, DenseProbabilities(log_probs))

    def rows(self, part: slice) -> OnlineNoise:
        """The noise of some of the rows."""
        return OnlineNoise(self.log_probs[part], self.tokens[part], self.row_ids[part])

    def to(self, device: torch.device) -> OnlineNoise:
        """The same noise on another device."""
        return OnlineNoise(*(t.to(device) for t in (self.log_probs, self.tokens, self.row_ids)))


@torch.no_grad()
def online_batch(teacher: GPT2LMHeadModel, batch: Batch) -> Batch:
    """The batch with its noise from the teacher, run now."""
    logits = teacher(batch.tokens).logits[:, :-1].float()
    logits = logits - logits.mean(dim=-1, keepdim=True)
    log_probs = torch.log_softmax(logits, dim=-1)
    return replace(batch, noise=OnlineNoise(log_probs, batch.tokens, batch.row_ids))
