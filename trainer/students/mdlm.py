"""MDLM: masked diffusion over whole rows, with or without Gumbel conditioning."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput

from shards.errors import UsageError
from trainer.objective.batch import Batch, Places
from trainer.objective.corruption import Corruption, corrupt, masked_log_probs, partly_prior, substituted_log_probs
from trainer.students.base import LossOutput, Student, StudentConfig
from trainer.students.conditioning import EmbeddedNoise, LayerNoise
from trainer.students.dit import Attend, Level, States, Tokens, full_attention, masked_attention
from trainer.students.fused_head import weighted_nll


class MDLMConfig(StudentConfig):
    """Config of :class:`MDLM`."""

    model_type = "gdistill-mdlm"


class MDLM(Student):
    """Masked diffusion language model (Sahoo et al. 2024) on the DiT backbone.

    ``forward`` gives raw logits, ``predict`` log-probabilities for a sampler, ``loss`` the bound.
    """

    config_class = MDLMConfig
    reads = ("noise", "diffusion", "kd", "language_model", "predicts_next")

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
        return self.corrupted_loss(batch, self.corrupt(batch, time_bounds))

    def corrupt(self, batch: Batch, time_bounds: tuple[float, float] | None = None) -> Corruption:
        """Times, mask and loss weights of a batch; those of the bound where clips are given."""
        if time_bounds is None:
            return corrupt(batch, self.settings.diffusion, self.num_blocks, self.clips)
        return corrupt(batch, self.settings.diffusion.as_bound, self.num_blocks, time_bounds)

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
        return LossOutput(
            loss=loss,
            token_nlls=blank.index_put(places.index, nlls) * corruption.weight,
            num_tokens=batch.num_scored,
            num_masked=len(places),
            num_blocks=self.num_blocks,
        )

    def contextualize(self, embeddings: States, clean: Tokens, level: Level, noise: LayerNoise | None = None) -> States:
        """Hidden states of the noised row; ``clean`` is for subclasses that look at it."""
        positions = torch.arange(embeddings.shape[1], device=embeddings.device)
        return self.backbone(embeddings, level, positions, full_attention, noise=noise)

    def _batch_noise(self, batch: Batch, places: Places) -> EmbeddedNoise:
        if batch.noise is None:
            remedy = "read it from a store whose codec gives noise"
            raise UsageError("the batch carries no noise", where="conditioning", remedy=remedy)
        noise = batch.noise.at(places)
        if self.training and self.settings.noise.prior_share:
            noise = partly_prior(noise, batch, places, self.settings.noise.prior_share)
        return self.embed_noise(noise, self.settings.noise.tau)

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
        masked = self.is_conditioned and bool(self.masked_positions(input_ids).any())
        if masked and noise_embeddings is None:
            raise UsageError(
                "a conditioned student needs the noise of masked positions",
                where="noise_embeddings",
                remedy="pass student.embed_noise(noise), or call student.generate",
            )
        states = self.sampling_states(input_ids, noise_embeddings, sigma)
        return MaskedLMOutput(logits=self._project(*states))

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

    def denoise(
        self,
        noised: Tokens,
        clean: Tokens,
        noise_embeddings: EmbeddedNoise | None = None,
        sigma: Float[Tensor, "b"] | None = None,
    ) -> Float[Tensor, "b l v1"]:
        """Raw logits of a training pass at every position; ``clean`` matters to block models."""
        embeddings, noise = self.embed(noised, noise_embeddings)
        level = self._level(sigma)
        return self._project(self.contextualize(embeddings, clean, level, noise), level)

    def inject(
        self, embeddings: States, masked: Bool[Tensor, "b l"] | Places, noise: EmbeddedNoise
    ) -> tuple[States, LayerNoise | None]:
        """Put the noise of n masked positions (row-major) there, replacing embeddings or adding.

        Where states predict the next token, noise lies one to the left of its own position, at the
        state that it is to decide.

        Returns:
            The embeddings, and what later layers read.
        """
        places = Places.of(masked).shifted(-1 if self.settings.predicts_next else 0)
        values, is_added = noise.embedding.to(embeddings.dtype), self.adds_noise
        filled = embeddings.index_put(places.index, values, accumulate=is_added)
        return filled, LayerNoise.of(noise, places)

    def blend(
        self, embeddings: States, masked: Bool[Tensor, "b l"], noise: EmbeddedNoise
    ) -> tuple[States, LayerNoise | None]:
        """:meth:`inject` of noise that is laid out like the row, without listing any place.

        Only what later layers read is listed: listing makes the host wait for a GPU.
        """
        here, values = masked[..., None], noise.embedding.to(embeddings.dtype)
        if self.settings.predicts_next:  # position 0 is never masked
            here, values = here.roll(-1, dims=1), values.roll(-1, dims=1)
        filled = torch.where(here, embeddings + values if self.adds_noise else values, embeddings)
        if noise.scores is None:
            return filled, None
        places = Places.of(masked)
        shifted = places.shifted(-1 if self.settings.predicts_next else 0)
        return filled, LayerNoise.of(noise[places.index], shifted)

    def masked_positions(self, tokens: Tokens) -> Bool[Tensor, "b l"]:
        """Where a row is still to be filled."""
        return tokens == self.mask_id

    def embed(self, tokens: Tokens, noise_embeddings: EmbeddedNoise | None) -> tuple[States, LayerNoise | None]:
        """Token embeddings with the noise of masked positions, and what later layers read of it."""
        embeddings = self.backbone.vocab_embed(tokens)
        if noise_embeddings is None:
            return embeddings, None
        return self.blend(embeddings, self.masked_positions(tokens), noise_embeddings)

    def predict(
        self, tokens: Tokens, noise_embeddings: EmbeddedNoise | None = None, sigma: Float[Tensor, "b"] | None = None
    ) -> Float[Tensor, "b l v1"]:
        """Log-probabilities of x_0 (SUBS): one-hot where a token is known, the mask never."""
        logits = self._project(*self.sampling_states(tokens, noise_embeddings, sigma))
        return substituted_log_probs(logits, tokens, self.mask_id)

    def predict_at(
        self,
        tokens: Tokens,
        where: Bool[Tensor, "b l"] | Places,
        noise_embeddings: EmbeddedNoise | None = None,
        sigma: Float[Tensor, "b"] | None = None,
        visible: Bool[Tensor, "b l"] | None = None,
    ) -> Float[Tensor, "n v1"]:
        """``predict`` at some masked positions (row-major); only those go through the head.

        Positions outside ``visible`` are not attended to, as if the row ended before them.
        """
        attend = None if visible is None else masked_attention(visible[:, None, None, :])
        hidden, level = self.sampling_states(tokens, noise_embeddings, sigma, attend)
        return self._log_probs_at(hidden, where, level)
