"""MDLM: masked diffusion over whole rows, with or without Gumbel conditioning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput

from shards.errors import UsageError
from trainer.objective.batch import Batch, Places
from trainer.objective.corruption import Corruption, corrupt, masked_log_probs, partly_prior
from trainer.students.base import LossOutput, Student, StudentConfig
from trainer.students.conditioning import EmbeddedNoise, LayerNoise
from trainer.students.dit import Attend, Level, States, Tokens, full_attention, masked_attention
from trainer.students.fused_head import weighted_nll


class MDLMConfig(StudentConfig):
    """Config of :class:`MDLM`."""

    model_type = "gdistill-mdlm"


class MDLM(Student):
    """Masked diffusion language model (Sahoo et al. 2024) on the DiT backbone.

    ``forward`` gives raw logits, ``predict_at`` log-probabilities, ``loss`` the bound.
    """

    config_class = MDLMConfig
    reads = ("noise", "diffusion", "kd", "language_model", "predicts_next")

    @property
    def num_blocks(self) -> int:
        return 1

    def loss(self, batch: Batch, *, time_bounds: tuple[float, float] | None = None) -> LossOutput:
        """sum over masked tokens of weight * NLL / (B L), with t and mask keyed by the batch.

        ``time_bounds`` are clips of t instead of the student's own (validation, schedule search).
        """
        return self.corrupted_loss(batch, self.corrupt(batch, time_bounds))

    def corrupt(self, batch: Batch, time_bounds: tuple[float, float] | None = None) -> Corruption:
        """Times, mask and loss weights of a batch; those of the bound where clips are given."""
        settings = self.settings.diffusion
        if time_bounds is not None:
            settings = replace(settings, max_loss_weight=None, fully_masked_share=0.0)
        return corrupt(batch, settings, self.num_blocks, time_bounds or self.clips)

    def corrupted_loss(self, batch: Batch, corruption: Corruption) -> LossOutput:
        """The loss of given times and masks."""
        places = corruption.places
        noised = batch.tokens.masked_fill(corruption.mask, self.mask_id)
        embeddings, noise = self.backbone.vocab_embed(noised), None
        if self.conditioner is not None:
            embeddings, noise = self.inject(embeddings, places, self._batch_noise(batch, places))
        level = self._level(corruption.sigma)
        hidden = self.contextualize(embeddings, batch.tokens, level, noise)
        head = self.backbone.output_layer
        loss, nlls = weighted_nll(
            places.read(head.features(hidden, level)),
            head.linear,
            places.read(batch.tokens),
            places.read(corruption.weight) / corruption.mask.numel(),
            self.mask_id,
            self._distillation(batch, places),
        )
        blank = torch.zeros(batch.tokens.shape, device=nlls.device)
        token_nlls = blank.index_put(places.index, nlls) * corruption.weight
        return LossOutput(loss, token_nlls, batch.num_scored, len(places), self.num_blocks)

    def contextualize(self, embeddings: States, clean: Tokens, level: Level, noise: LayerNoise | None = None) -> States:
        """Hidden states of the noised row; ``clean`` is for subclasses that look at it."""
        positions = torch.arange(embeddings.shape[1], device=embeddings.device)
        return self.backbone(embeddings, level, positions, full_attention, noise=noise)

    def _batch_noise(self, batch: Batch, places: Places) -> EmbeddedNoise:
        if batch.noise is None:
            remedy = "read it from a store whose codec gives noise"
            raise UsageError("the batch carries no noise", where="conditioning", remedy=remedy)
        noise, settings = batch.noise.at(places), self.settings.noise
        if self.training and settings.prior_share:
            noise = partly_prior(noise, batch, places, settings.prior_share)
        return self.embed_noise(noise, settings.tau)

    def _level(self, sigma: Float[Tensor, "b"] | None) -> Level:
        if sigma is None or not self.settings.diffusion.time_conditioning:
            sigma = torch.zeros(1, device=self.device)
        return self.backbone.embed_sigma(sigma)

    def _log_probs_at(self, hidden: Tensor, where: Bool[Tensor, "b l"] | Places, level: Level) -> Float[Tensor, "n v1"]:
        head = self.backbone.output_layer
        features = Places.of(where).read(head.features(hidden, level))
        return masked_log_probs(head(features), self.mask_id)

    def forward(
        self,
        input_ids: Tokens,
        noise_embeddings: EmbeddedNoise | None = None,
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
        if noise_embeddings is None and self.is_conditioned and bool((input_ids == self.mask_id).any()):
            raise UsageError(
                "a conditioned student needs the noise of masked positions",
                where="noise_embeddings",
                remedy="pass student.embed_noise(noise), or call student.generate",
            )
        return MaskedLMOutput(logits=self._project(*self.sampling_states(input_ids, noise_embeddings, sigma)))

    def sampling_attention(self, length: int) -> Attend:
        """Who sees whom in a sampling pass over the row, or a prefix of it: everyone everyone."""
        return full_attention

    def sampling_states(
        self,
        tokens: Tokens,
        noise_embeddings: EmbeddedNoise | None = None,
        sigma: Float[Tensor, "b"] | None = None,
        attend: Attend | None = None,
    ) -> tuple[States, Level]:
        """Hidden states of a sampling pass and the noise-level vector that the head needs."""
        embeddings, noise = self.embed(tokens, noise_embeddings)
        positions, level = torch.arange(tokens.shape[1], device=tokens.device), self._level(sigma)
        attend = self.sampling_attention(tokens.shape[1]) if attend is None else attend
        return self.backbone(embeddings, level, positions, attend, noise=noise), level

    def inject(self, embeddings: States, places: Places, noise: EmbeddedNoise) -> tuple[States, LayerNoise | None]:
        """The embeddings with the noise of n places, replacing or added, and what later layers read.

        Noise lies at the state that it is to decide: one to the left where states predict the next token.
        """
        places = places.shifted(-1) if self.settings.predicts_next else places
        values = noise.embedding.to(embeddings.dtype)
        filled = embeddings.index_put(places.index, values, accumulate=self.adds_noise)
        return filled, LayerNoise.of(noise, places)

    def embed(self, tokens: Tokens, noise: EmbeddedNoise | None) -> tuple[States, LayerNoise | None]:
        """:meth:`inject` into the tokens' embeddings, of noise that is laid out like the rows."""
        embeddings = self.backbone.vocab_embed(tokens)
        if noise is None:
            return embeddings, None
        places = Places.of(tokens == self.mask_id)
        return self.inject(embeddings, places, noise[places.index])

    def predict_at(
        self,
        tokens: Tokens,
        where: Bool[Tensor, "b l"] | Places,
        noise_embeddings: EmbeddedNoise | None = None,
        sigma: Float[Tensor, "b"] | None = None,
        visible: Bool[Tensor, "b l"] | None = None,
    ) -> Float[Tensor, "n v1"]:
        """Log-probabilities of x_0 at some masked positions (row-major); only those go through the head.

        Positions outside ``visible`` are not attended to, as if the row ended before them.
        """
        attend = None if visible is None else masked_attention(visible[:, None, None, :])
        hidden, level = self.sampling_states(tokens, noise_embeddings, sigma, attend)
        return self._log_probs_at(hidden, where, level)
