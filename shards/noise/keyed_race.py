"""Compiled kernels, each form of which is tried before its first use on a kind of device.

What the trial finds is kept for the process. Where a form cannot be compiled, or gives other
numbers than the eager path, that path goes on, and one line on stderr says so: once for each kernel
and kind of device, however many of its forms fail.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from shards.console import stderr
from shards.errors import first_line
from shards.noise.philox import (
    PositionKeys,
    keyed_bits,
    keyed_words,
    noise_kernel,
    ordinary,
    shared_rounds,
)

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


# Categorical draws by the exponential race argmax_k p_k / E_k, keyed by position and token id.
#
# Draws are made in float64: float32 uniforms have no value within 6e-8 of 1, which silences tokens
# of small probability and so lowers the effective temperature (Zheng et al., arXiv 2409.02908).
#
# Operation by operation a draw moves about 600 bytes for each of the V tokens, most of them for the
# uniforms' bits. On a GPU whose noise kernel is compiled, one more kernel makes bits, waits and the
# winner together and reads nothing but the scores: 4 or 8 bytes a token. It draws what the eager
# form draws, up to ties within the rounding of float64, and is tried against it before its first
# use.


RACE_EPS = 1e-10
RACED_ON = ("cuda",)
"""Where draws are compiled; a CPU's results are reproduced bit for bit."""
TRIAL_POSITIONS, TRIAL_TOKENS = 48, 1003

Scores = Float[Tensor, "n v"]
KERNELS = TriedKernels("categorical draws")


def uniforms(keys: PositionKeys, start: int, stop: int) -> Float[Tensor, "n tile"]:
    """U(0, 1) in float64 with 32 random bits, for entries start..stop-1 of each position."""
    return (keyed_bits(keys, start, stop).double() + 0.5) * 2.0**-32


def race(probs: Float[Tensor, "n v"], uniform: Float[Tensor, "n v"]) -> Int[Tensor, "n"]:
    """Categorical draws by the exponential race argmax_k p_k / (1e-10 - log(U_k + 1e-10)).

    The authors' form, in the precision of its arguments; ``probs`` need not be normalised.
    """
    return (probs / (RACE_EPS - (uniform + RACE_EPS).log())).argmax(dim=-1)


def race_of_probs(probs: Scores, keys: PositionKeys) -> Int[Tensor, "n"]:
    """One token per position from float64 probabilities, which need not be normalised."""
    kernel = _kernel(probs, is_log=False)
    if kernel is None:
        return race(probs, uniforms(keys, 0, probs.shape[-1]))
    return _run(kernel, probs, 1.0, keys)


def race_of_logits(
    logits: Scores, temperature: float, keys: PositionKeys
) -> Int[Tensor, "n"] | None:
    """The tokens that :func:`race` draws from softmax(logits / T), in one kernel.

    None where there is no such kernel, or one position only: then whoever asks makes the
    probabilities, a few positions at a time.
    """
    kernel = _kernel(logits, is_log=True)
    return None if kernel is None else _run(kernel, logits, temperature, keys)


def draws_kernel(device: torch.device | str) -> str:
    """What has drawn on a kind of device: ``compiled``, or ``eager`` if any of it could not be."""
    return "compiled" if KERNELS.all_run(device) else "eager"


def _kernel(scores: Scores, *, is_log: bool) -> Kernel | None:
    """The kernel for these scores; the first question about a form of it compiles and tries it."""
    device = scores.device
    # Sizes of 1 would be compiled apart.
    if len(scores) < 2 or device.type not in RACED_ON or noise_kernel(device) == "eager":
        return None
    return KERNELS.find(device, is_log, partial(_trial, device, is_log))


def _run(kernel: Kernel, scores: Scores, temperature: float, keys: PositionKeys) -> Tensor:
    # Tokens have no gradients; under one mode there is one compiled kernel for all callers.
    with torch.inference_mode(False), torch.no_grad():
        rows, columns, later = shared_rounds(keys, 0, scores.shape[1])
        (scores,) = ordinary([scores])
        best, lane_ids = kernel(scores, _scalar(temperature, scores.device), *rows, *columns, later)
        # Four winners a position, one for each word of a counter; the smaller id where they tie.
        tied = torch.where(best == best.amax(1, keepdim=True), lane_ids, scores.shape[1])
        return tied.amin(1)


@lru_cache(maxsize=16)
def _scalar(value: float, device: torch.device) -> Float[Tensor, ""]:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float64, device=device)


def _form(is_log: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """What is compiled: per lane of the counters, the best score and its id, each [n, 4]."""

    @no_type_check  # torch.compile cannot trace run-time checks of annotations
    def winners(scores, temperature, *words_of):
        lanes = keyed_words(*words_of)
        missing = 4 * lanes[0].shape[1] - scores.shape[1]
        scores = pad(scores, (0, missing), value=-torch.inf)  # beyond the vocabulary none wins
        scores = scores.unflatten(1, (-1, 4))
        best, ids = [], []
        for lane, bits in enumerate(lanes):
            uniform = (bits.double() + 0.5) * 2.0**-32
            wait = RACE_EPS - (uniform + RACE_EPS).log()
            given = scores[:, :, lane].double()
            raced = given / temperature - wait.log() if is_log else given / wait
            top = raced.max(dim=1)
            best.append(top.values)
            ids.append(4 * top.indices + lane)
        return torch.stack(best, 1), torch.stack(ids, 1)

    return winners


def _trial(device: torch.device, is_log: bool) -> tuple[Kernel | None, str]:
    """The compiled form, or why not: flat distributions, where every wait decides."""
    index = torch.arange(TRIAL_POSITIONS, device=device)
    keys = PositionKeys(0x123456789ABCDEF, index, index + 1, 7)
    steps = torch.arange(TRIAL_POSITIONS * (TRIAL_TOKENS + 1), device=device)
    logits = ((steps * 7919 % 10007) / 5003).view(TRIAL_POSITIONS, -1)[:, :TRIAL_TOKENS]
    scores, temperature = (logits, 0.75) if is_log else (logits.double().exp(), 1.0)
    try:
        kernel: Kernel = torch.compile(_form(is_log), dynamic=True, fullgraph=True)
        found = _run(kernel, scores, temperature, keys)
    except Exception as error:
        return None, f"cannot compile their kernel: {first_line(error)}"
    probs = (logits.double() / temperature).exp() if is_log else scores
    expected = race(probs, uniforms(keys, 0, TRIAL_TOKENS))
    if torch.equal(found, expected):
        return kernel, ""
    return None, f"the compiled kernel draws {int((found != expected).sum())} other tokens"
