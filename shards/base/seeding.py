"""Seeds derived by name, so that no two uses of one user seed share a random stream."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of ``parts`` (for example seed, "mask", epoch, row).

    The parts are hashed with their types and lengths, so ("a", "bc") and ("ab", "c") differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator seeded with :func:`derive_seed` of ``parts``."""
    import torch  # manifests derive seeds, and need no torch

    return torch.Generator(device=device).manual_seed(derive_seed(*parts))
