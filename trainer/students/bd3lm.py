"""BD3-LM: diffusion inside blocks, autoregression over blocks (Arriola et al. 2025).

Training reads [x_t ; x_0] in one pass. Sampling goes block by block with the keys and values of
finished blocks in memory, ``finished`` being what the cache lacks of them::

    cache = student.start_cache(batch_size)
    for block in range(num_blocks):
        while block is not filled:
            log_probs = student.predict_after(finished, block, where, noise_embeddings, cache)
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.console import stderr
from shards.errors import UsageError, first_line
from trainer.objective.batch import Places
from trainer.students.base import StudentConfig
from trainer.students.conditioning import EmbeddedNoise, LayerNoise
from trainer.students.dit import Attend, KeyValueCache, Level, States, Tokens, full_attention, masked_attention
from trainer.students.mdlm import MDLM


# FlexAttention traces this function, and cannot trace run-time type checks.
@no_type_check
def training_pattern(
    query: Int[Tensor, "*i"], key: Int[Tensor, "*j"], row_length: int, block_size: int
) -> Bool[Tensor, "*k"]:
    """Which entries of [x_t ; x_0] (indices 0..2L-1) see which others (BD3-LM, section 3.2).

    x_t sees x_t of its own block and x_0 of strictly earlier blocks; x_0 sees x_0 of its own and
    earlier blocks.
    """
    noised_query, noised_key = query < row_length, key < row_length
    block_query = (query % row_length) // block_size
    block_key = (key % row_length) // block_size
    own = noised_query & noised_key & (block_query == block_key)
    history = noised_query & ~noised_key & (block_key < block_query)
    clean = ~noised_query & ~noised_key & (block_key <= block_query)
    return own | history | clean


@functools.lru_cache(maxsize=16)
def training_mask(row_length: int, block_size: int, device: torch.device) -> Tensor:
    """The pattern as a [2L, 2L] boolean tensor; built once per shape and device."""
    index = torch.arange(2 * row_length, device=device)
    return training_pattern(index[:, None], index[None, :], row_length, block_size)


@functools.lru_cache(maxsize=16)
def flex_works(device: torch.device) -> bool:
    """Whether FlexAttention trains on a GPU, tried once on a few tokens; if not, says why: sdpa is slower."""
    try:
        attend = flex_training_attention(64, 16, device)
        zeros = torch.zeros(2, 1, 128, 16, device=device, requires_grad=True)
        attend(zeros, zeros, zeros).sum().backward()
    except Exception as error:  # whatever a compiler may lack
        said = f"attention: sdpa on {device}; FlexAttention fails: {first_line(error)}"
        stderr.print(said, markup=False)
        return False
    return True


@functools.lru_cache(maxsize=16)
def flex_training_attention(row_length: int, block_size: int, device: torch.device) -> Attend:
    """FlexAttention with the training pattern; the block mask is built once per shape and device.

    On CUDA the kernel is compiled; elsewhere it runs uncompiled and without gradients, which
    PyTorch does not offer there.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    @no_type_check
    def sees(batch, head, query, key):
        return training_pattern(query, key, row_length, block_size)

    length = 2 * row_length
    mask = create_block_mask(sees, None, None, length, length, device=device)
    kernel = torch.compile(flex_attention) if device.type == "cuda" else flex_attention

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(query, key, value, block_mask=mask)  # type: ignore[return-value]

    return attend


class BD3LMConfig(StudentConfig):
    """Config of :class:`BD3LM`; ``block_size`` is the tokens per block."""

    model_type = "gdistill-bd3lm"


class BD3LM(MDLM):
    """Block diffusion on the same backbone; with one block per row it is MDLM to the last bit."""

    config_class = BD3LMConfig
    default_sampler = "block"
    reads = ("noise", "diffusion", "kd", "language_model", "block_size")

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.config.tokens_per_block

    @property
    def num_blocks(self) -> int:
        """Blocks, and times, per row."""
        return self.config.row_length // self.block_size

    def contextualize(self, embeddings: States, clean: Tokens, level: Level, noise: LayerNoise | None = None) -> States:
        """Hidden states of the noised half of [x_t ; x_0].

        A single block never looks at x_0, so the clean half is left out then.
        """
        if self.num_blocks == 1:
            return super().contextualize(embeddings, clean, level, noise)
        length = clean.shape[1]
        known = self.backbone.vocab_embed(clean).to(embeddings.dtype)
        both = torch.cat((embeddings, known), dim=1)
        positions = torch.arange(length, device=clean.device).repeat(2)
        attend = self._training_attention(length, clean.device)
        hidden = self.backbone(both, level, positions, attend, noise=noise)
        return hidden[:, :length]

    def _training_attention(self, length: int, device: torch.device) -> Attend:
        choice, is_gpu = self.settings.attention, device.type == "cuda"
        if choice == "auto":
            choice = "flex" if is_gpu and self.backbone.head_width >= 16 and flex_works(device) else "sdpa"
        if choice == "sdpa":
            return masked_attention(training_mask(length, self.block_size, device))
        if not is_gpu and torch.is_grad_enabled():
            what, got = "FlexAttention has no gradient on this device", f"flex on {device.type}"
            remedy = "set model.attention=auto, which takes sdpa here"
            raise UsageError(what, where="model.attention", got=got, remedy=remedy)
        return flex_training_attention(length, self.block_size, device)

    def sampling_attention(self, length: int) -> Attend:
        """See :class:`MDLM`: each block sees itself and the blocks before it."""
        block = torch.arange(length, device=self.device) // self.block_size
        return masked_attention(block[:, None] >= block)

    def start_cache(self, batch_size: int) -> KeyValueCache:
        """Empty memory for the keys and values of ``batch_size`` rows.

        Raises:
            UsageError: For a time-conditioned student, whose finished blocks change with time.
        """
        if self.settings.diffusion.time_conditioning:
            what = "a time-conditioned student has no block cache"
            remedy = "sample without one (use_cache=false), or by predict_at over the prefix"
            raise UsageError(what, where="time_conditioning", remedy=remedy)
        return KeyValueCache.empty(self.backbone, batch_size, self.config.row_length)

    @torch.no_grad()
    def predict_after(
        self,
        finished: Int[Tensor, "b new"],
        block_tokens: Int[Tensor, "b open"],
        where: Bool[Tensor, "b open"] | Places,
        noise_embeddings: EmbeddedNoise | None,
        cache: KeyValueCache,
    ) -> Float[Tensor, "n v1"]:
        """``predict_at`` for a block whose predecessors' keys and values are kept.

        Args:
            finished: Finished blocks that the cache lacks (none, one, or a prompt of several); the
                cache grows by them.
            block_tokens: Tokens of the block behind them, or of several blocks where rows differ in
                the block they are in; the mask id where unknown.
            where: Masked positions to predict; only those go through the head.
            noise_embeddings: Noise embeddings of these positions, used where masked.
            cache: Keys and values of the blocks before ``finished``.

        Returns:
            SUBS log-probabilities of the n positions of ``where``, row-major.
        """
        new = finished.shape[1]
        both = torch.cat((finished, block_tokens), dim=1)
        embeddings, noise = self.embed(block_tokens, noise_embeddings)
        if new:
            known = self.backbone.vocab_embed(finished).to(embeddings.dtype)
            embeddings = torch.cat((known, embeddings), dim=1)
            if noise is not None:
                noise = replace(noise, places=noise.places.shifted(new))
        keys = torch.arange(cache.length + both.shape[1], device=both.device)
        positions, level = keys[cache.length :], self._level(None)
        allowed = positions[:, None] // self.block_size >= keys[None, :] // self.block_size
        attend = masked_attention(allowed) if both.shape[1] > self.block_size else full_attention
        hidden = self.backbone(embeddings, level, positions, attend, cache, noise)[:, new:]
        cache.length += new
        return self._log_probs_at(hidden, where, level)
