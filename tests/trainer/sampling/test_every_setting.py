"""Every setting of a sampler changes its samples or its passes, or is known not to."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from shards.errors import UsageError
from tests.changed_settings import changed
from tests.trainer.sampling_cases import LENGTH, draw, tiny_student
from trainer.sampling.fill import Sampler
from trainer.sampling.registry import make_sampler
from trainer.sampling.stopping import StopRule
from trainer.students.registry import Student

IDS = torch.arange(24)
VALUES = {
    "inner": "ancestral", "nfe": 3, "nucleus_p": 0.6, "passes_per_block": 2, "tau": 0.3,
    "order_temperature": 5.0, "stop.at_eos": True, "stop.entropy_window": 6, "top_k": 2,
    "stop.max_tries": 1, "stop.min_entropy_nats": 1.0, "temperature": 3.0,
}  # fmt: skip
REDRAWN = {"stop": StopRule(min_entropy_nats=1.7, entropy_window=LENGTH, max_tries=3)}
ARGMAX = {"decision": "argmax", "nucleus_p": 1.0}
KNOWN = {"final_argmax", "use_cache"}
"""One shows once in 10,000 rows, and a cache changes nothing: other tests have them."""
BASES: dict[str, list[dict[str, Any]]] = {
    "ancestral": [{"nfe": 6}],
    "fixed_count": [{"nfe": 6}],
    "confidence": [{"nfe": 6}],
    "first_hitting": [{}],
    "sequential": [{}],
    "block": [
        {"nfe": 6, "inner": "confidence"},
        {"passes_per_block": 1, "inner": "confidence"},
    ],
}


STUDENTS = {
    "block": partial(tiny_student, "bd3lm", block_size=4),
    "sequential": partial(tiny_student, "ar", "none"),
}


@pytest.mark.parametrize("name", BASES)
def test_every_setting_does_something(name: str) -> None:
    """Each changed alone, beside settings that let it matter: other tokens, or other counts."""
    student = STUDENTS.get(name, tiny_student)()
    silent = None
    for own in BASES[name]:
        for more in ({"nucleus_p": 0.8}, {"nucleus_p": 0.8, **REDRAWN}, ARGMAX):
            base = make_sampler(name, **{**own, **more})
            result, still = drawn(student, base), set()
            for key, other in changed(base, VALUES):
                try:
                    if other is None or drawn(student, other) == result:
                        still.add(key)
                except UsageError:  # it means nothing without another one
                    still.add(key)
            silent = still if silent is None else silent & still
    refused = {"tau"} if name == "sequential" else set()  # an AR student takes no noise
    assert not (silent or set()) - KNOWN - refused


def drawn(student: Student, sampler: Sampler) -> str:
    """All that is said of the samples."""
    values = vars(draw(student, sampler, IDS)).values()
    return repr([value.tolist() if isinstance(value, torch.Tensor) else value for value in values])
