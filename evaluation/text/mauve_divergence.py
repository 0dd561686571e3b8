"""MAUVE between samples and reference text, with its spread over k-means seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from evaluation.score import Score
from evaluation.text.reading import JudgeModel, side_by_side
from shards.atomic import canonical_json, write_bytes_atomic
from shards.console import progress_bar
from shards.errors import GdistillError, UsageError

MIN_TEXTS = 20
"""Below this k-means has a single pair of clusters and the number says nothing."""
FEW_TEXTS = 1000
PUBLISHED_TEXTS = 5000
LENGTH_RATIO = 1.25
"""Mean lengths that differ by more are named: the model's last state tells a text's length."""
SEEDS = (25, 26, 27, 28, 29)
"""Of the k-means; 25 is mauve-text's own."""


def check_counts(num_samples: int, num_references: int, where: object = "") -> None:
    """Refuse fewer than 20 texts on a side; ``where`` names the samples.

    Raises:
        UsageError: With both counts.
    """
    if min(num_samples, num_references) < MIN_TEXTS:
        raise UsageError(
            "too few texts for MAUVE",
            where=where,
            got=f"{num_samples} samples, {num_references} references",
            expected=f"at least {MIN_TEXTS} a side, {PUBLISHED_TEXTS} as in published numbers",
            remedy="sample more, or score without --reference",
        )


def mauve_score(
    judge: JudgeModel,
    samples: TextFeatures,
    references: TextFeatures,
    *,
    max_tokens: int,
    seeds: Sequence[int] = SEEDS,
) -> Score:
    """MAUVE (Pillutla et al. 2021) through mauve-text, averaged over k-means seeds.

    The published setting is 5,000 texts a side with gpt2-large features; fewer texts bias the
    score upward, so both counts are part of the result.

    Args:
        judge: The model the features are of.
        samples: Features of the samples.
        references: Features of texts of the real distribution, by the same judge and limit.
        max_tokens: The limit the texts were truncated to.
        seeds: Of the k-means.

    Raises:
        UsageError: With fewer than 20 texts on a side.
    """
    check_counts(len(samples.values), len(references.values))
    import mauve

    results: list[Any] = [
        mauve.compute_mauve(
            p_features=references.values,
            q_features=samples.values,
            seed=seed,
            mauve_scaling_factor=5,
            verbose=False,
        )
        for seed in seeds
    ]
    values = [float(result.mauve) for result in results]
    return Score(
        name="mauve",
        value=float(np.mean(values)),
        num_samples=len(samples.values),
        settings={
            **judge.identity,
            "num_references": len(references.values),
            "max_tokens": max_tokens,
            "scaling": 5,
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


# The features MAUVE clusters: a causal model's last hidden state at a text's last token.
#
# As mauve-text has them: of the model without its head.


@dataclass(frozen=True)
class TextFeatures:
    """Features of n texts that have a token.

    Attributes:
        values: One row per text.
        num_tokens: Tokens of each text that were read.
        num_empty: Texts without a token, left out as mauve-text leaves them out.
    """

    values: Float[np.ndarray, "n d"]
    num_tokens: Int[np.ndarray, "n"]
    num_empty: int = 0


def text_features(
    judge: JudgeModel,
    texts: Sequence[str],
    max_tokens: int,
    folder: Path | None = None,
    pooling: Literal["last", "mean"] = "last",
) -> TextFeatures:
    """Features of texts, from ``folder`` where the same texts were read before.

    Texts are tokenized as mauve-text does: with the tokenizer's own special tokens, truncated.

    Args:
        judge: The model and its tokenizer.
        texts: The texts.
        max_tokens: Texts are truncated to this many tokens; 1 to the judge's context.
        folder: Where features are kept by content; None keeps none.
        pooling: The state of a text's last token (MAUVE's), or the mean over its tokens.

    Raises:
        UsageError: For another limit, or a model that is all head.
        GdistillError: When no text has a token, or features cannot be kept.
    """
    if not 1 <= max_tokens <= judge.context_length:
        raise UsageError(
            "no such limit",
            where="max_tokens",
            got=max_tokens,
            expected=f"1..{judge.context_length}, the context of {judge.name}",
        )
    full = [text for text in texts if text]
    if not full:
        raise GdistillError("no text has a token", got=f"{len(texts)} empty texts")
    file = None if folder is None else folder / _name(judge, full, max_tokens, pooling)
    found = None if file is None else _read(file, len(full))
    values, num_tokens = found or _compute(judge, full, max_tokens, pooling)
    if file is not None and found is None:
        _keep(file, values, num_tokens)
    return TextFeatures(values, num_tokens, len(texts) - len(full))


def _body(judge: JudgeModel) -> Any:
    """The model without its head, which would make V numbers for every token read."""
    if judge.model.base_model is judge.model:
        raise UsageError(
            "no features can be had of this model",
            where="mauve",
            got=f"{type(judge.model).__name__} in {judge.name}",
            expected="a model of transformers, with layers below its head",
            remedy="judge with such a model, or leave out --reference",
        )
    return judge.model.base_model


def _name(judge: JudgeModel, texts: Sequence[str], max_tokens: int, pooling: str) -> str:
    content = hashlib.sha256(canonical_json(list(texts))).hexdigest()
    key = {**judge.identity, "max_tokens": max_tokens, "texts_sha256": content}
    key |= {} if pooling == "last" else {"pooling": pooling}
    return f"{hashlib.sha256(canonical_json(key)).hexdigest()[:16]}.features.safetensors"


def _read(file: Path, num_texts: int) -> tuple[np.ndarray, np.ndarray] | None:
    """What was kept; None where there is nothing whole, so that it is computed again."""
    try:
        kept = load_file(file)
    except (OSError, SafetensorError):
        return None
    values, num_tokens = kept.get("values"), kept.get("num_tokens")
    if values is None or num_tokens is None or values.ndim != 2:
        return None
    return (values, num_tokens) if len(values) == num_texts == len(num_tokens) else None


def _keep(file: Path, values: np.ndarray, num_tokens: np.ndarray) -> None:
    try:
        write_bytes_atomic(file, save({"values": values, "num_tokens": num_tokens}))
    except OSError as error:
        raise GdistillError("cannot keep features", where=file, got=error.strerror) from error


@torch.no_grad()
def _compute(
    judge: JudgeModel, texts: Sequence[str], max_tokens: int, pooling: str
) -> tuple[Float[np.ndarray, "n d"], Int[np.ndarray, "n"]]:
    body = _body(judge)
    rows = [judge.tokenizer.encode(text, truncation=True, max_length=max_tokens) for text in texts]
    rows = [ids or [judge.document_start_id] for ids in rows]
    lengths = np.array([len(ids) for ids in rows])
    features: list[np.ndarray] = [np.empty(0)] * len(rows)
    with progress_bar("mauve features", len(texts), unit="text") as bar:

        def read(members: list[int]) -> None:
            ids = side_by_side([rows[index] for index in members], judge.document_start_id)
            ids = ids.to(judge.model.device)
            states = body(input_ids=ids, use_cache=False).last_hidden_state
            ends = torch.from_numpy(lengths[members] - 1).to(ids.device)
            if pooling == "last":
                kept = states[torch.arange(len(members), device=ends.device), ends].float()
            else:
                inside = torch.arange(ids.shape[1], device=ends.device) <= ends[:, None]
                kept = (states.float() * inside[..., None]).sum(1) / (ends + 1)[:, None]
            for index, state in zip(members, kept.cpu().numpy(), strict=True):
                features[index] = state
            bar.advance(len(members))

        judge.room.fill(lengths.tolist(), max_tokens, read)
    return np.stack(features), lengths
