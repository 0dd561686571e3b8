"""The autoregressive baseline: the same backbone, causal, without noise level."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import CausalLMOutput

from shards.errors import UsageError
from trainer.objective.batch import Batch, all_but_first
from trainer.objective.corruption import masked_log_probs
from trainer.students.base import LossOutput, Student, StudentConfig
from trainer.students.dit import KeyValueCache, States, Tokens, causal_attention, full_attention
from trainer.students.fused_head import weighted_nll


class ARConfig(StudentConfig):
    """Config of :class:`AR`."""

    model_type = "gdistill-ar"


class AR(Student):
    """Next-token prediction; the mask is in the vocabulary but has no probability.

    Raises:
        UsageError: With ``conditioning = "gumbel"``: there is no masked position to condition.
    """

    config_class = ARConfig
    uses_sigma = takes_noise = False
    default_sampler = "sequential"
    reads = ("kd",)

    def loss(self, batch: Batch, *, time_bounds: tuple[float, float] | None = None) -> LossOutput:
        """Mean NLL of tokens 1..L-1 given the tokens before them; with ``kd=token`` mixed with KL.

        Args:
            batch: Rows; their noise is not looked at.
            time_bounds: Without meaning here.
        """
        inputs, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
        head, num_tokens = self.backbone.output_layer, targets.numel()
        weights = torch.full(targets.shape, 1 / max(1, num_tokens), device=targets.device)
        if batch.counted is not None:
            weights = weights * batch.counted[:, 1:]
        loss, nlls = weighted_nll(
            head.features(self._hidden(inputs), None).flatten(0, 1),
            head.linear,
            targets.flatten(),
            weights.flatten(),
            self.mask_id,
            self._distillation(batch, all_but_first(batch.tokens)),
        )
        token_nlls = pad(nlls.view_as(targets) * (weights > 0), (1, 0))
        return LossOutput(loss, token_nlls, batch.num_scored, num_masked=num_tokens, num_blocks=1)

    def forward(
        self, input_ids: Tokens, attention_mask: Shaped[Tensor, "b l"] | None = None, **options: Any
    ) -> CausalLMOutput:
        """Raw logits [B, l, V + 1]; those at position i are about token i + 1.

        Args:
            input_ids: Tokens.
            attention_mask: As tokenizers give it; all of it must be 1.
            **options: Of Hugging Face's callers; what would be ignored is refused.

        Raises:
            UsageError: For padding or labels.
        """
        self._refuse_unread(attention_mask, options)
        return CausalLMOutput(logits=self._project(self._hidden(input_ids), None))

    def _hidden(self, tokens: Tokens) -> States:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.backbone(self.backbone.vocab_embed(tokens), None, positions, causal_attention)

    def predict(self, tokens: Tokens) -> Float[Tensor, "b l v1"]:
        """Log-probabilities of the token after each position."""
        return masked_log_probs(self(tokens).logits, self.mask_id)

    def start_cache(self, batch_size: int) -> KeyValueCache:
        """Empty memory for the keys and values of ``batch_size`` rows."""
        return KeyValueCache.empty(self.backbone, batch_size, self.config.row_length)

    @torch.no_grad()
    def predict_next(self, tokens: Int[Tensor, "b new"], cache: KeyValueCache) -> Float[Tensor, "b v1"]:
        """Read further tokens (the whole prompt into an empty cache, then one at a time).

        Returns:
            Log-probabilities of the token after the last one; the cache has grown.

        Raises:
            UsageError: For several tokens behind a cache that is not empty.
        """
        new = tokens.shape[1]
        if new > 1 and cache.length:
            raise UsageError("give one token at a time after the prompt", got=new)
        positions = torch.arange(cache.length, cache.length + new, device=tokens.device)
        attend = causal_attention if new > 1 else full_attention
        embeddings = self.backbone.vocab_embed(tokens)
        hidden = self.backbone(embeddings, None, positions, attend, cache)
        cache.length += new
        return masked_log_probs(self._project(hidden[:, -1:], None)[:, 0], self.mask_id)
