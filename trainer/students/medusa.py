"""Medusa heads (Cai et al., arXiv 2401.10774) on a frozen language model, with and without noise.

Behind token i the backbone's own head tells token i + 1, and head k = 1..K proposes token i + 1 + k
from the same hidden state h::

    head_k = W2 (SiLU(W1 u) + u),   u = h + A_k z_k,   z = transformer(softmax(tau xi) W)

z runs over the noise of the tokens i + 1 .. i + 1 + K, and is causal: no head sees the noise of a
token behind the one it proposes. With ``own_noise`` seen (the paper) z_k has seen that very token's
noise, which decides it; hidden, only that of the tokens before it, so that the head learns a
distribution and proposes argmax(log p + tau xi). W1 and A begin at zero and W2 as the backbone's
own head, so at step 0 every head is the backbone's.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, silu
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from shards.errors import UsageError
from trainer.objective.batch import Batch, all_but_first
from trainer.students.backbone import BackboneStudent, FrozenBackbone
from trainer.students.base import LossOutput, StudentConfig
from trainer.students.conditioning import EmbeddedNoise
from trainer.students.configuration import StudentSettings
from trainer.students.dit import Block, LayerNorm, Rotary, ZeroLinear, causal_attention
from trainer.students.fused_head import CHUNK_ROWS

HEAD_DECAY = 0.8
"""Head k counts 0.8^k in the loss (Medusa, section 2.2)."""


class MedusaConfig(StudentConfig):
    """Config of :class:`Medusa`."""

    model_type = "gdistill-medusa"


class NoiseSequence(nn.Module):
    """A small causal transformer over the noise embeddings of the next tokens."""

    def __init__(self, settings: StudentSettings) -> None:
        super().__init__()
        self.head_width = settings.hidden_size // settings.num_heads
        self.blocks = nn.ModuleList(Block(settings, layer, None) for layer in range(settings.num_layers))
        self.norm = LayerNorm(settings.hidden_size)

    def forward(self, embedded: Float[Tensor, "n w e"]) -> Float[Tensor, "n w e"]:
        """Slot k has seen the slots 0..k."""
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        rotary = Rotary.of(positions, self.head_width)
        for block in self.blocks:
            embedded = block(embedded, None, rotary, causal_attention, None)
        return self.norm(embedded)


class MedusaHead(nn.Module):
    """One head; W2 is the backbone's output layer and what is learnt to add to it.

    Args:
        width: D of the backbone.
        config: ``head_output`` says what is learnt of W2.
    """

    def __init__(self, width: int, config: StudentConfig) -> None:
        super().__init__()
        settings, vocab_size = config.settings, config.vocab_size
        conditioned = settings.conditioning == "gumbel"
        self.noise = ZeroLinear(settings.hidden_size, width, bias=False) if conditioned else None
        self.residual = ZeroLinear(width, width, bias=False)
        self.output: nn.Module | None = None
        if settings.backbone.head_output == "full":
            self.output = ZeroLinear(width, vocab_size, bias=False)
        elif settings.backbone.head_output == "low_rank":
            rank = settings.backbone.head_rank
            down, up = nn.Linear(width, rank, bias=False), ZeroLinear(rank, vocab_size, bias=False)
            self.output = nn.Sequential(down, up)

    def features(self, hidden: Float[Tensor, "*n d"], noise: Float[Tensor, "*n e"] | None) -> Float[Tensor, "*n d"]:
        """What W2 sees."""
        u = hidden.float()
        if self.noise is not None and noise is not None:
            u = u + self.noise(noise)
        return silu(self.residual(u)) + u

    def logits(self, features: Float[Tensor, "*n d"], backbone: FrozenBackbone) -> Float[Tensor, "*n v"]:
        """Logits over V tokens, float32."""
        logits = backbone.logits(features).float()
        return logits if self.output is None else logits + self.output(features).float()


class Medusa(BackboneStudent):
    """K heads that propose the tokens behind the next one."""

    config_class = MedusaConfig
    default_sampler = "medusa"
    reads = (*BackboneStudent.reads, "backbone.head_output", "backbone.head_rank")

    def _build(self, config: StudentConfig) -> None:
        width = (config.frozen or {})["hidden_size"]
        self.heads = nn.ModuleList(MedusaHead(width, config) for _ in range(self.settings.backbone.num_proposed))
        conditioned = self.settings.conditioning == "gumbel"
        self.noise_sequence = NoiseSequence(self.settings) if conditioned else None

    def loss(self, batch: Batch, *, time_bounds: tuple[float, float] | None = None) -> LossOutput:
        """Mean NLL of the heads' tokens behind positions 0 .. L-2-K, head k weighing 0.8^k.

        ``token_nlls`` hold at position i + 1 the weighted mean over the heads behind token i, whose
        weights sum to 1.

        Args:
            batch: Rows; their tokens are the targets and their noise the condition.
            time_bounds: Without meaning here.

        Raises:
            UsageError: For rows of fewer than K + 2 tokens.
        """
        tokens, num_heads = batch.tokens, len(self.heads)
        num_anchors = tokens.shape[1] - 1 - num_heads
        if num_anchors < 1:
            what, where = "rows too short for the heads", "model.backbone.num_proposed"
            expected = f"at most {tokens.shape[1] - 2} for rows of {tokens.shape[1]} tokens"
            raise UsageError(what, where=where, got=num_heads, expected=expected)
        hidden, noise = self.language_model.hidden(tokens)[:, :num_anchors].flatten(0, 1), None
        if self.is_conditioned:
            assert batch.noise is not None
            places = all_but_first(tokens)
            embedded = self.embed_noise(batch.noise.at(places)).laid_out(places.index, tokens.shape)
            noise = self._states(self._windows(embedded))
        raw = torch.tensor([HEAD_DECAY**k for k in range(1, num_heads + 1)])
        weights, nlls = (raw / raw.sum()).tolist(), []
        # A head learns a token that counts, as all between it and the anchor do: only these have
        # noise, and only behind such anchors does it draft.
        counted = batch.counted
        learnt = None if counted is None else counted[:, 1 : 1 + num_anchors].flatten()
        for k in range(1, num_heads + 1):
            targets = tokens[:, 1 + k : 1 + k + num_anchors].flatten()
            condition = None if noise is None else noise[:, k - 1]
            head_nlls = self._head_nlls(k - 1, hidden, condition, targets)
            if counted is not None and learnt is not None:
                learnt = learnt & counted[:, 1 + k : 1 + k + num_anchors].flatten()
                head_nlls = head_nlls * learnt
            nlls.append(weights[k - 1] * head_nlls)
        total = torch.stack(nlls).sum(dim=0).view(len(tokens), num_anchors)
        count, token_nlls = total.numel(), pad(total.detach(), (1, num_heads))
        scored = count if learnt is None else max(1, int((total > 0).sum()))
        return LossOutput(total.sum() / max(1, count), token_nlls, scored, count * num_heads, 1)

    def _head_nlls(
        self, index: int, hidden: Tensor, noise: Tensor | None, targets: Int[Tensor, "n"]
    ) -> Float[Tensor, "n"]:
        """NLL per token; the logits of one chunk at a time are held, in both passes."""
        head: Any = self.heads[index]

        def chunk_nlls(features: Tensor, wanted: Tensor) -> Tensor:
            logits = head.logits(features, self.language_model)
            return cross_entropy(logits, wanted, reduction="none")

        features = head.features(hidden, noise)
        size = CHUNK_ROWS.get(features.device.type, CHUNK_ROWS["cuda"])
        parts = [
            checkpoint(chunk_nlls, part, wanted, use_reentrant=False)
            for part, wanted in zip(features.split(size), targets.split(size), strict=True)
        ]
        return torch.cat(parts)  # type: ignore[arg-type]

    def _windows(self, noise: EmbeddedNoise) -> Float[Tensor, "n w e"]:
        """The noise of tokens i + 1 .. i + 1 + K for each i, of noise laid out like the rows."""
        return noise.embedding[:, 1:].unfold(1, len(self.heads) + 1, 1).transpose(2, 3).flatten(0, 1)

    def _states(self, windows: Float[Tensor, "n w e"]) -> Float[Tensor, "n k e"]:
        """z of heads 1..K; head k reads the slot of its own token, or the one before it."""
        sequence: Any = self.noise_sequence
        states = sequence(windows)
        return states[:, 1:] if self.sees_own_noise else states[:, :-1]

    def propose(self, hidden: Float[Tensor, "n d"], embedded: Float[Tensor, "n w e"] | None) -> Float[Tensor, "n k v"]:
        """Log-probabilities of tokens i + 2 .. i + 1 + K, given h_i.

        Args:
            hidden: h of token i, from the backbone.
            embedded: Noise embeddings of tokens i + 1 .. i + 1 + K; None without noise.

        Raises:
            UsageError: For a conditioned student without noise.
        """
        if self.is_conditioned and embedded is None:
            raise UsageError("a conditioned student needs noise", where="noise", got="none")
        states = None if embedded is None or not self.is_conditioned else self._states(embedded)
        logits = []
        heads: Any = self.heads
        for k, head in enumerate(heads):
            features = head.features(hidden, None if states is None else states[:, k])
            logits.append(head.logits(features, self.language_model))
        return torch.stack(logits, dim=1).log_softmax(dim=-1)

    def forward(
        self,
        input_ids: Int[Tensor, "b l"],
        noise_embeddings: EmbeddedNoise | None = None,
        attention_mask: Shaped[Tensor, "b l"] | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """Log-probabilities [B, l, K, V]: of the tokens 2 .. K + 1 behind each token.

        Args:
            input_ids: Tokens.
            noise_embeddings: Of positions 0 .. l + K, for a conditioned student.
            attention_mask: As tokenizers give it; all of it must be 1.
            **options: Of Hugging Face's callers; what would be ignored is refused.

        Raises:
            UsageError: For padding, labels, or a conditioned student without noise.
        """
        self._refuse_unread(attention_mask, options)
        hidden = self.language_model.hidden(input_ids)
        windows = None if noise_embeddings is None else self._windows(noise_embeddings)
        proposed: Any = self.propose(hidden.flatten(0, 1), windows)
        return CausalLMOutput(logits=proposed.unflatten(0, input_ids.shape))
