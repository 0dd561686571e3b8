"""MAUVE between samples and reference text, and the states of a judge that such scores are of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from evaluation.score import NORMAL_QUANTILE, Score
from evaluation.text.distance import require_enough
from evaluation.text.reading import JudgeModel, side_by_side
from shards.atomic import canonical_json, write_bytes_atomic
from shards.console import progress_bar
from shards.errors import GdistillError, UsageError

FEW_TEXTS, PUBLISHED_TEXTS = 1000, 5000
LENGTH_RATIO = 1.25
"""Mean lengths that differ by more are named: the model's last state tells a text's length."""
SEEDS = (25, 26, 27, 28, 29)
"""Of the k-means; 25 is mauve-text's own."""
SCALING, MIXTURES, NUM_RESAMPLED = 5, 25, 200


def mauve_score(
    judge: JudgeModel, samples: TextFeatures, references: TextFeatures, *, max_tokens: int, seeds: Sequence[int] = SEEDS
) -> Score:
    """MAUVE (Pillutla et al. 2021) through mauve-text, averaged over k-means seeds.

    The published setting is 5,000 texts a side with gpt2-large features; fewer texts bias the
    score upward, so both counts are part of the result. The interval draws the samples' clusters
    again, the clusters themselves held fixed.

    Args:
        judge: The model the features are of.
        samples: Features of the samples.
        references: Features of texts of the real distribution, by the same judge and limit.
        max_tokens: The limit the texts were truncated to.
        seeds: Of the k-means.

    Raises:
        UsageError: With fewer than 128 texts on a side.
    """
    for name, found in (("samples", samples), ("references", references)):
        require_enough(len(found.values), f"MAUVE, {name}")
    import mauve

    both = {"p_features": references.values, "q_features": samples.values}
    fixed: dict[str, Any] = {"mauve_scaling_factor": SCALING, "verbose": False}
    results: list[Any] = [mauve.compute_mauve(**both, seed=seed, **fixed) for seed in seeds]
    values = [float(result.mauve) for result in results]
    value, generator, num = float(np.mean(values)), np.random.default_rng(0), len(samples.values)
    spreads = []
    for result in results:
        drawn = generator.multinomial(num, result.q_hist, size=NUM_RESAMPLED) / num
        spreads.append(np.std([mauve_of_histograms(result.p_hist, q) for q in drawn]))
    half = NORMAL_QUANTILE * float(np.mean(spreads))
    return Score(
        name="mauve",
        value=value,
        num_samples=num,
        interval=(max(0.0, value - half), min(1.0, value + half)),
        settings={
            **judge.identity,
            "num_references": len(references.values),
            "max_tokens": max_tokens,
            "scaling": SCALING,
            "seeds": list(seeds),
            "buckets": int(results[0].num_buckets),
        },
        details={
            "spread_over_seeds": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
            "by_seed": values,
            "mean_tokens": float(samples.num_tokens.mean()),
            "mean_tokens_reference": float(references.num_tokens.mean()),
            "num_empty": samples.num_empty,
        },
        cautions=tuple(_cautions(samples, references)),
    )


def mauve_of_histograms(p: Float[np.ndarray, "k"], q: Float[np.ndarray, "k"]) -> float:
    """Area under the divergence curve of two histograms: mauve-text's number without clustering."""
    from mauve.compute_mauve import get_divergence_curve_for_multinomials

    weights = np.linspace(1e-6, 1 - 1e-6, MIXTURES)
    x, y = get_divergence_curve_for_multinomials(p, q, weights, SCALING).T
    orders = ((x, y, np.argsort(x)), (y, x, np.argsort(y)))
    return float(sum(np.trapezoid(b[order], a[order]) for a, b, order in orders) / 2)


def _cautions(samples: TextFeatures, references: TextFeatures) -> list[str]:
    sizes = len(samples.values), len(references.values)
    found = []
    if min(sizes) < FEW_TEXTS:
        found.append(
            f"{sizes[0]} samples and {sizes[1]} references: fewer than {FEW_TEXTS:,} a side bias "
            f"MAUVE upward and make it coarse ({PUBLISHED_TEXTS:,} are usual)"
        )
    ours, theirs = samples.num_tokens.mean(), references.num_tokens.mean()
    if max(ours, theirs) > LENGTH_RATIO * min(ours, theirs):
        found.append(
            f"samples have {ours:.0f} tokens on average and references {theirs:.0f}: MAUVE tells "
            "them apart by length alone"
        )
    return found


# The states of a causal model without its head, at a text's last token or averaged over it.


@dataclass(frozen=True)
class TextFeatures:
    """Features of n texts that have a token.

    Attributes:
        values: The state of each text's last token, MAUVE's.
        means: The states of each text, averaged over its tokens.
        gradients: Of each text's mean surprise (nats per token), with respect to the logarithm of a
            scale of each coordinate of the state below the head; 0 for a text of one token.
        num_tokens: Tokens of each text that were read.
        num_empty: Texts without a token, left out as mauve-text leaves them out.
    """

    values: Float[np.ndarray, "n d"]
    means: Float[np.ndarray, "n d"]
    gradients: Float[np.ndarray, "n d"]
    num_tokens: Int[np.ndarray, "n"]
    num_empty: int = 0

    def select(self, places: Int[np.ndarray, "k"]) -> TextFeatures:
        """Of some of the texts."""
        values, means = self.values[places], self.means[places]
        return TextFeatures(values, means, self.gradients[places], self.num_tokens[places])


def text_features(judge: JudgeModel, texts: Sequence[str], max_tokens: int, folder: Path | None = None) -> TextFeatures:
    """Features of texts, from ``folder`` where the same texts were read before.

    Texts are tokenized as mauve-text does: with the tokenizer's own special tokens, truncated.

    Args:
        judge: The model and its tokenizer.
        texts: The texts.
        max_tokens: Texts are truncated to this many tokens, at most the judge's context.
        folder: Where features are kept by content; None keeps none.

    Raises:
        UsageError: For a model that is all head.
        GdistillError: When no text has a token, or features cannot be kept.
    """
    full = [text for text in texts if text]
    if not full:
        raise GdistillError("no text has a token", got=f"{len(texts)} empty texts")
    file = None
    if folder is not None:
        content = hashlib.sha256(canonical_json(full)).hexdigest()
        key = {**judge.identity, "products": judge.products, "max_tokens": max_tokens, "texts_sha256": content}
        name = hashlib.sha256(canonical_json(key)).hexdigest()[:16]
        file = folder / f"{name}.features.safetensors"
    found = None if file is None else _read(file, len(full))
    arrays = found or _compute(judge, full, max_tokens)
    if file is not None and found is None:
        try:
            write_bytes_atomic(file, save(arrays))
        except OSError as error:
            raise GdistillError("cannot keep features", where=file, got=error.strerror) from error
    return TextFeatures(**arrays, num_empty=len(texts) - len(full))


def _read(file: Path, num_texts: int) -> dict[str, np.ndarray] | None:
    """What was kept; None where there is nothing whole, so that it is computed again."""
    try:
        kept = load_file(file)
    except (OSError, SafetensorError):
        return None
    shapes = {name: (array.ndim, len(array)) for name, array in kept.items()}
    whole = dict.fromkeys(("values", "means", "gradients"), (2, num_texts))
    whole |= {"num_tokens": (1, num_texts)}
    return kept if shapes == whole else None


@torch.no_grad()
def _compute(judge: JudgeModel, texts: Sequence[str], max_tokens: int) -> dict[str, np.ndarray]:
    body = judge.model.base_model
    if body is judge.model:
        what = "no features can be had of this model"
        got = f"{type(judge.model).__name__} in {judge.name}"
        expected = "a model of transformers, with layers below its head"
        remedy = "judge with such a model, or leave out --reference"
        raise UsageError(what, where="mauve", got=got, expected=expected, remedy=remedy)
    rows = [judge.tokenizer.encode(text, truncation=True, max_length=max_tokens) for text in texts]
    rows = [ids or [judge.document_start_id] for ids in rows]
    lengths = np.array([len(ids) for ids in rows])
    head = judge.model.get_output_embeddings()
    found: dict[int, np.ndarray] = {}
    lengths_of = lengths.tolist()
    with progress_bar("states", len(texts), unit="text") as bar:

        def read(members: list[int]) -> None:
            ids = side_by_side([rows[index] for index in members], judge.document_start_id)
            ids = ids.to(judge.model.device)
            states = body(input_ids=ids, use_cache=False).last_hidden_state.float()
            parts = []
            for index, row, tokens in zip(members, states, ids, strict=True):
                row, following = row[: lengths_of[index]], tokens[1 : lengths_of[index], None]
                error = head(row[:-1].to(head.weight.dtype)).float().softmax(-1)
                error.scatter_add_(1, following, -torch.ones_like(following, dtype=error.dtype))
                gradient = (error @ head.weight.float() * row[:-1]).sum(0)
                parts.append(torch.stack((row[-1], row.mean(0), gradient / max(1, len(error)))))
            found.update(zip(members, torch.stack(parts).cpu().numpy(), strict=True))
            bar.advance(len(members))

        judge.longest_first(lengths_of, read)
    last, means, gradients = np.stack([found[index] for index in range(len(rows))], axis=1)
    return {"values": last, "means": means, "gradients": gradients, "num_tokens": lengths}
