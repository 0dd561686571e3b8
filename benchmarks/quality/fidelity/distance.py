"""How far samples are from text, in the states in which a judge reads both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.errors import UsageError


def frechet_distance(x: Float[np.ndarray, "n d"], y: Float[np.ndarray, "m d"]) -> float:
    """Squared Fréchet distance of the Gaussians fitted to x and y (Dowson and Landau 1982).

    |mean_x - mean_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2)); of language models' states de Masson
    d'Autume et al. 2019, of pictures' FID. Few rows bias it upward: compare equal numbers.

    Raises:
        UsageError: With fewer than two rows, which have no covariance.
    """
    if min(len(x), len(y)) < 2:
        got = f"{len(x)} and {len(y)} rows"
        raise UsageError("a covariance needs two", where="samples", got=got, remedy="--num 64")
    first, second = (np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (x, y))
    values, vectors = np.linalg.eigh(first)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    # The trace of (C_x C_y)^(1/2) by the eigenvalues of a symmetric matrix that has the same.
    common = np.sqrt(np.linalg.eigvalsh(root @ second @ root).clip(min=0)).sum()
    apart = ((x.mean(axis=0) - y.mean(axis=0)) ** 2).sum()
    return float(apart + np.trace(first) + np.trace(second) - 2 * common)


@torch.no_grad()
def read(
    judge: Any, tokens: Int[Tensor, "n l"]
) -> tuple[Float[Tensor, "n l v"], Float[np.ndarray, "n d"]]:
    """The judge's logits and its last states.

    Returns:
        Logits, and the states, float64, averaged over all tokens but the first, which is given.
    """
    body = judge.backbone if hasattr(judge, "backbone") else judge.base_model
    kept: list[Any] = []
    hook = body.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    try:
        logits = judge(input_ids=tokens).logits
    finally:
        hook.remove()
    states = getattr(kept[0], "last_hidden_state", kept[0])
    return logits, states[:, 1:].double().mean(dim=1).numpy()
