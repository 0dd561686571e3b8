"""MDLM: masked diffusion over whole rows, with or without Gumbel conditioning."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput

from shards.errors import UsageError
from trainer.objective.batch import Batch, Places
from trainer.objective.corruption import (
    Corruption,
    corrupt,
    masked_log_probs,
    partly_prior,
    substituted_log_probs,
)
from trainer.students.base import LossOutput, Student
from trainer.students.dit import KeyValueCache, full_attention, masked_attention
from trainer.students.fused_head import weighted_nll
from trainer.students.hugging_face import StudentConfig


class MDLMConfig(StudentConfig):
    """Config of :class:`MDLM`."""

    model_type = "gdistill-mdlm"


class MDLM(Student):
    """Masked diffusion language model (Sahoo et al. 2024) on the DiT backbone.

    ``forward`` gives raw logits, ``predict`` log-probabilities for a sampler, ``loss`` the bound.
    """

    config_class = MDLMConfig

    @property
    def num_blocks(self) -> int:
        """Times per row: one."""
        return 1

    def loss(self, batch: Batch, *, time_bounds: tuple[float, float] | None = None) -> LossOutput:
        """sum over masked tokens of weight * NLL / (B L), with t and mask keyed by the batch.

        Args:
            batch: Rows with their noise (needed when the student is conditioned).
            time_bounds: Clips of t instead of the student's own (validation, schedule search).
        """
        corruption = self.corrupt(batch, time_bounds)
        return self.corrupted_loss(batch, corruption)

    def corrupt(self, batch: Batch, time_bounds: tuple[float, float] | None = None) -> Corruption:
        """Times, mask and loss weights of a batch; those of the bound where clips are given."""
        if time_bounds is None:
            return corrupt(batch, self.settings.diffusion, self.num_blocks, self.clips)
        return corrupt(batch, self.settings.diffusion.as_bound, self.num_blocks, time_bounds)

    def corrupted_loss(self, batch: Batch, corruption: Corruption) -> LossOutput:
        """The loss of given times and masks."""
        places = corruption.places
        noised = batch.tokens.masked_fill(corruption.mask, self.mask_id)
        embeddings = self.backbone.vocab_embed(noised)
        if self.conditioner is not None:
            embeddings = self.inject(embeddings, places, self._batch_noise(batch, places))
        sigma_embedding = self._embed_sigma(corruption.sigma)
        hidden = self.contextualize(embeddings, batch.tokens, sigma_embedding)
        loss, nlls = weighted_nll(
            self._masked_features(hidden, places, sigma_embedding),
            self.backbone.output_layer.linear,
            places.read(batch.tokens),
            places.read(corruption.token_weight) / corruption.num_counted,
            self.mask_id,
            self._distillation(batch, places),
        )
        return self._summarise(loss, nlls, corruption)

    def contextualize(
        self,
        embeddings: Float[Tensor, "b l e"],
        clean: Int[Tensor, "b l"],
        sigma_embedding: Float[Tensor, "rows c"] | None,
    ) -> Float[Tensor, "b l d"]:
        """Hidden states of the noised row; ``clean`` is for subclasses that look at it."""
        positions = torch.arange(embeddings.shape[1], device=embeddings.device)
        return self.backbone(embeddings, sigma_embedding, positions, full_attention)

    def _batch_noise(self, batch: Batch, places: Places) -> Float[Tensor, "n e"]:
        if batch.noise is None:
            remedy = "read it from a store whose codec gives noise"
            raise UsageError("the batch carries no noise", where="conditioning", remedy=remedy)
        noise = batch.noise.at(places)
        if self.training and self.settings.noise.prior_share:
            noise = partly_prior(noise, batch, places, self.settings.noise.prior_share)
        return self.embed_noise(noise, self.settings.noise.tau)

    def _embed_sigma(self, sigma: Float[Tensor, "b"] | None) -> Float[Tensor, "rows c"] | None:
        if sigma is None or not self.settings.diffusion.time_conditioning:
            sigma = torch.zeros(1, device=self.device)
        return self.backbone.embed_sigma(sigma)

    def _masked_features(
        self, hidden: Tensor, where: Bool[Tensor, "b l"] | Places, sigma_embedding: Tensor | None
    ) -> Float[Tensor, "n d"]:
        features = self.backbone.output_layer.features(hidden, sigma_embedding)
        return Places.of(where).read(features)

    def _log_probs_at(
        self, hidden: Tensor, where: Bool[Tensor, "b l"] | Places, sigma_embedding: Tensor | None
    ) -> Float[Tensor, "n v1"]:
        features = self._masked_features(hidden, where, sigma_embedding)
        return masked_log_probs(self.backbone.output_layer(features), self.mask_id)

    def _summarise(
        self, loss: Float[Tensor, ""], nlls: Float[Tensor, "n"], corruption: Corruption
    ) -> LossOutput:
        blank = torch.zeros(corruption.mask.shape, device=nlls.device)
        per_token = blank.index_put(corruption.places.index, nlls) * corruption.token_weight
        return LossOutput(
            loss=loss,
            token_nlls=per_token,
            num_tokens=corruption.num_scored,
            num_masked=nlls.shape[0],
            num_blocks=self.num_blocks,
        )

    def forward(
        self,
        input_ids: Int[Tensor, "b l"],
        noise_embeddings: Float[Tensor, "b l e"] | None = None,
        sigma: Float[Tensor, "b"] | None = None,
        attention_mask: Shaped[Tensor, "b l"] | None = None,
        **options: Any,
    ) -> MaskedLMOutput:
        """Raw logits [B, L, V + 1] of noised rows.

        Args:
            input_ids: Tokens; the mask id where unknown.
            noise_embeddings: Of ``embed_noise``, used at masked positions; a conditioned student
                has learnt nothing without them.
            sigma: Noise level, for a time-conditioned student.
            attention_mask: As tokenizers give it; all of it must be 1.
            **options: Of Hugging Face's callers; what would be ignored is refused.

        Raises:
            UsageError: For padding, labels, or masked positions without their noise.
        """
        self._refuse_unread(attention_mask, options)
        masked = self.is_conditioned and bool(self.masked_positions(input_ids).any())
        if masked and noise_embeddings is None:
            raise UsageError(
                "a conditioned student needs the noise of masked positions",
                where="noise_embeddings",
                remedy="pass student.embed_noise(noise), or call student.generate",
            )
        return MaskedLMOutput(logits=self._logits(input_ids, noise_embeddings, sigma))

    def _logits(
        self, tokens: Tensor, noise_embeddings: Tensor | None, sigma: Tensor | None
    ) -> Float[Tensor, "b l v1"]:
        return self._project(*self.sampling_states(tokens, noise_embeddings, sigma))

    def sampling_states(
        self,
        tokens: Int[Tensor, "b l"],
        noise_embeddings: Float[Tensor, "b l e"] | None = None,
        sigma: Float[Tensor, "b"] | None = None,
    ) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "rows c"] | None]:
        """Hidden states of a sampling pass and the noise-level vector that the head needs."""
        level = self._embed_sigma(sigma)
        return self.contextualize(self.embed(tokens, noise_embeddings), tokens, level), level

    def denoise(
        self,
        noised: Int[Tensor, "b l"],
        clean: Int[Tensor, "b l"],
        noise_embeddings: Float[Tensor, "b l e"] | None = None,
        sigma: Float[Tensor, "b"] | None = None,
    ) -> Float[Tensor, "b l v1"]:
        """Raw logits of a training pass at every position; ``clean`` matters to block models."""
        level = self._embed_sigma(sigma)
        hidden = self.contextualize(self.embed(noised, noise_embeddings), clean, level)
        return self._project(hidden, level)

    def embed(
        self, tokens: Int[Tensor, "b l"], noise_embeddings: Float[Tensor, "b l e"] | None
    ) -> Float[Tensor, "b l e"]:
        """Token embeddings with the noise embeddings at masked positions."""
        embeddings = self.backbone.vocab_embed(tokens)
        if noise_embeddings is None:
            return embeddings
        return self.blend(embeddings, self.masked_positions(tokens), noise_embeddings)

    def predict(
        self,
        tokens: Int[Tensor, "b l"],
        noise_embeddings: Float[Tensor, "b l e"] | None = None,
        sigma: Float[Tensor, "b"] | None = None,
    ) -> Float[Tensor, "b l v1"]:
        """Log-probabilities of x_0 (SUBS): one-hot where a token is known, the mask never."""
        logits = self._logits(tokens, noise_embeddings, sigma)
        return substituted_log_probs(logits, tokens, self.mask_id)

    def predict_at(
        self,
        tokens: Int[Tensor, "b l"],
        where: Bool[Tensor, "b l"] | Places,
        noise_embeddings: Float[Tensor, "b l e"] | None = None,
        sigma: Float[Tensor, "b"] | None = None,
        visible: Bool[Tensor, "b l"] | None = None,
    ) -> Float[Tensor, "n v1"]:
        """``predict`` at some masked positions (row-major); only those go through the head.

        Positions outside ``visible`` are not attended to, as if the row ended before them.
        """
        if visible is None:
            hidden, level = self.sampling_states(tokens, noise_embeddings, sigma)
        else:
            level = self._embed_sigma(sigma)
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            attend = masked_attention(visible[:, None, None, :])
            hidden = self.backbone(self.embed(tokens, noise_embeddings), level, positions, attend)
        return self._log_probs_at(hidden, where, level)

    def start_cache(self, batch_size: int) -> KeyValueCache:
        """Empty memory for the keys and values of ``batch_size`` rows.

        Raises:
            UsageError: Where states predict the next token: those before new ones are not kept.
        """
        if self.settings.predicts_next:
            raise UsageError(
                "a student that predicts the next token keeps no cache",
                where="model.predicts_next",
                remedy="draw with another sampler (ancestral, confidence, ...)",
            )
        return self.backbone.start_cache(batch_size, self.config.row_length)

    @torch.no_grad()
    def predict_behind(
        self,
        tokens: Int[Tensor, "b new"],
        where: Bool[Tensor, "b new"] | Places,
        noise_embeddings: Float[Tensor, "b new e"] | None,
        cache: KeyValueCache,
    ) -> Float[Tensor, "n v1"]:
        """``predict_at`` for the tokens behind the cached ones, which are not read again.

        Attention has no direction here, so cached keys and values are those of an earlier state of
        the row: an approximation, exact only with an empty cache. The cache then holds the new
        tokens too; set its ``length`` back to read some of them again.
        """
        level, stop = self._embed_sigma(None), cache.length + tokens.shape[1]
        positions = torch.arange(cache.length, stop, device=tokens.device)
        embeddings = self.embed(tokens, noise_embeddings)
        hidden = self.backbone(embeddings, level, positions, full_attention, cache)
        cache.length = stop
        return self._log_probs_at(hidden, where, level)
