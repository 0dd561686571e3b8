"""log p of a completion given what stands before it, for students of every kind.

One pass: the completion is masked, all of it is predicted at once, and the log-probabilities of
its tokens are summed; block by block for BD3-LM, whose earlier blocks stand clean; token by token
for AR, where it is exact. The sum over many tokens ignores how they depend on each other.

The Monte-Carlo bound masks m of the n open tokens, m uniform in 1..n, and weighs their sum by
n / m: the ELBO of masked diffusion in another order of sums (Ou et al. 2024, Nie et al. 2025).

What the noise of a conditioned student is, is said: K draws of the prior, whose likelihoods are
averaged (p(x) = E p(x | xi)), or none, which the student has never seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from evaluation.likelihood.validation import prior_noise, require_likelihood
from shards.errors import UsageError
from shards.settings import derive_seed
from trainer.students.registry import AR, BD3LM, Student

ScoringNoise = Literal["prior", "none"]
Estimate = Literal["one_pass", "bound"]


@dataclass(frozen=True)
class CompletionScorer:
    """Scores completions under a student.

    Attributes:
        student: In evaluation mode.
        noise: ``prior`` or ``none``; a student without conditioning has none.
        num_draws: Draws of the prior.
        estimate: ``one_pass`` or ``bound``.
        num_masks: Monte-Carlo masks of the bound, per draw and block.
        seed: Of noise and masks.
    """

    student: Student
    noise: ScoringNoise = "prior"
    num_draws: int = 4
    estimate: Estimate = "one_pass"
    num_masks: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        require_likelihood(self.student)
        for name in ("num_draws", "num_masks"):
            if getattr(self, name) < 1:
                raise UsageError("a count below 1", where=name, got=getattr(self, name))

    @property
    def settings(self) -> dict[str, object]:
        """What a number must carry."""
        exact = isinstance(self.student, AR)
        return {
            "estimate": "exact" if exact else self.estimate,
            "noise": f"mean over {self._draws} prior draws" if self._reads_noise else "none",
            "num_masks": self.num_masks if self.estimate == "bound" and not exact else None,
            "seed": self.seed,
        }

    @property
    def _reads_noise(self) -> bool:
        return self.student.is_conditioned and self.noise == "prior"

    @property
    def _draws(self) -> int:
        return self.num_draws if self._reads_noise else 1

    @torch.no_grad()
    def __call__(
        self, tokens: Int[Tensor, "b l"], num_given: Sequence[int], row_ids: Sequence[int]
    ) -> tuple[list[float], list[bool]]:
        """Nats of each row's tokens behind the given ones, and whether each is the most probable.

        Args:
            tokens: Rows of one length, at most the student's.
            num_given: Tokens of each row that are context; at least 1.
            row_ids: Key the noise and the masks, so that no score depends on its batch.

        Raises:
            UsageError: For a row longer than the student reads, or without a context.
        """
        length, limit = tokens.shape[1], self.student.config.row_length
        if length > limit or min(num_given) < 1:
            got = f"{length} tokens, {min(num_given)} given"
            expected = f"at most {limit}, at least the first given"
            raise UsageError("a row of this length cannot be scored", got=got, expected=expected)
        tokens = tokens.to(self.student.device)
        places = torch.arange(length, device=tokens.device)
        target = places >= torch.tensor(num_given, device=tokens.device)[:, None]
        if isinstance(self.student, AR):
            log_probs = self.student.predict(tokens[:, :-1])
            own = log_probs.gather(-1, tokens[:, 1:, None])[..., 0].double()
            most_probable = (log_probs.argmax(-1) == tokens[:, 1:]) | ~target[:, 1:]
            return (own * target[:, 1:]).sum(1).tolist(), most_probable.all(1).tolist()
        draws, greedy = [], torch.full((len(tokens),), self.estimate == "one_pass")
        for draw in range(self._draws):
            total = torch.zeros(len(tokens), dtype=torch.float64)
            for masked, weights in self._maskings(target, row_ids, draw):
                log_probs, most_probable = self._predict(tokens, masked, row_ids, draw)
                total += (log_probs * weights).sum(1).cpu()
                greedy &= most_probable.cpu() | (draw > 0)
            draws.append(total)
        sums = torch.stack(draws).logsumexp(0) - math.log(len(draws))
        return sums.tolist(), greedy.tolist()

    def _maskings(
        self, target: Bool[Tensor, "b l"], row_ids: Sequence[int], draw: int
    ) -> Iterator[tuple[Bool[Tensor, "b l"], Float[Tensor, "b #l"]]]:
        """Masks with the weight of what they predict, block by block."""
        length = target.shape[1]
        size = self.student.block_size if isinstance(self.student, BD3LM) else length
        for start in range(0, length, size):
            block = torch.zeros_like(target)
            block[:, start : start + size] = target[:, start : start + size]
            if not block.any():
                continue
            if self.estimate == "one_pass":
                yield block, torch.ones(len(target), 1, dtype=torch.float64, device=target.device)
                continue
            for number in range(self.num_masks):
                yield self._some_of(block, row_ids, (draw, start, number))

    def _some_of(
        self, block: Bool[Tensor, "b l"], row_ids: Sequence[int], key: tuple[int, ...]
    ) -> tuple[Bool[Tensor, "b l"], Float[Tensor, "b 1"]]:
        """m of each row's n open positions, and n / m over the number of masks."""
        masked = torch.zeros_like(block)
        weights = torch.zeros(len(block), 1, dtype=torch.float64, device=block.device)
        for row, row_id in enumerate(row_ids):
            places = block[row].nonzero()[:, 0].cpu().numpy()
            if not len(places):
                continue
            seed = derive_seed(self.seed, f"masks {row_id} {key}")
            generator = np.random.default_rng(seed)
            count = int(generator.integers(1, len(places) + 1))
            masked[row, generator.permutation(places)[:count]] = True
            weights[row] = len(places) / count / self.num_masks
        return masked, weights

    def _predict(
        self, tokens: Int[Tensor, "b l"], masked: Bool[Tensor, "b l"], row_ids: Sequence[int], draw: int
    ) -> tuple[Float[Tensor, "b l"], Bool[Tensor, "b"]]:
        """log p of the masked tokens (0 elsewhere), and whether each is the most probable there."""
        student = self.student
        # Up to the end of the last block, open behind their own end, as blocks are sampled.
        missing = -tokens.shape[1] % student.block_size if isinstance(student, BD3LM) else 0
        row = tokens.masked_fill(masked, student.mask_id)
        row = torch.nn.functional.pad(row, (0, missing), value=student.mask_id)
        where = torch.nn.functional.pad(masked, (0, missing), value=False)
        noise = None
        if self._reads_noise:
            ids = torch.tensor([*row_ids], device=tokens.device)
            prior = prior_noise(student, ids, row.shape[1], self.seed, draw)
            noise = prior.embed(student, row == student.mask_id, torch.arange(len(ids), device=ids.device))
        found = student.predict_at(row, where, noise)  # type: ignore[operator]
        wanted, places = tokens[masked], masked.nonzero(as_tuple=True)
        own = found.gather(-1, wanted[:, None])[:, 0].double()
        right = torch.ones_like(masked).index_put(places, found.argmax(-1) == wanted)
        blank = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
        return blank.index_put(places, own), right.all(1)
