"""Compiled kernels, each form of which is tried before its first use on a kind of device.

What the trial finds is kept for the process. Where a form cannot be compiled, or gives other
numbers than the eager path, that path goes on, and one line on stderr says so: once for each kernel
and kind of device, however many of its forms fail.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from shards.base import stderr

Kernel = Callable[..., Any]


class TriedKernels:
    """The forms of one kernel.

    Args:
        serves: What goes on eagerly where a form fails, for the line that says so.

    Attributes:
        forms: The compiled form by kind of device and name of the form; None where it failed.
    """

    def __init__(self, serves: str) -> None:
        self.serves = serves
        self.forms: dict[tuple[str, Hashable], Kernel | None] = {}

    def find(
        self, device: torch.device, form: Hashable, trial: Callable[[], tuple[Kernel | None, str]]
    ) -> Kernel | None:
        """A form's kernel, None where the eager path goes on.

        Args:
            device: Where it would run.
            form: The form's name.
            trial: Compiles and compares: a kernel, or None and why not; asked once.
        """
        key = device.type, form
        if key not in self.forms:
            said_before = None in self._on(device)
            self.forms[key], obstacle = trial()
            if obstacle and not said_before:
                stderr.print(f"{self.serves}: eager on {device.type}; {obstacle}", markup=False)
        return self.forms[key]

    def all_run(self, device: torch.device | str) -> bool:
        """Whether some form was tried on this kind of device, and none failed."""
        tried = self._on(torch.device(device))
        return bool(tried) and None not in tried

    def _on(self, device: torch.device) -> list[Kernel | None]:
        return [kernel for (kind, _), kernel in self.forms.items() if kind == device.type]
