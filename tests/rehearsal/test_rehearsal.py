"""The GPU's paths run on a pretended one: no device is mixed, and the host waits little."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rehearsal.run import compiler, rehearse

pytestmark = pytest.mark.slow
CEILINGS = {
    "the pretence itself": 0,
    "micro-batch": 4,
    "micro-batch, ar": 0,
    "micro-batch, cross-attention": 7,
    "optimiser step": 2,
    "extraction batch": 2,
    "sampling pass": 2,
    "sampling pass, block": 3,
    "sampling token, sequential": 0,
    "training run": 700,
    "training run, bd3lm, search": 1200,
    "training run, resumed": 1200,
    "verified pass": 30,
    "judge": 5,
    "perplexity": 10,
    "student": 1,
}
"""Waits per repetition, by the longest name that a scenario's name begins with.

A training run is counted whole: most waits place weights or bring them to a checkpoint, one for
each tensor; its steps are counted above. A pass of verified decoding waits for what it decides:
which tokens agree, how far each row got, which rows are done.
"""


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, Any]]:
    if compiler() is None:
        pytest.skip("no C++ compiler to build the device guard with")
    return {record["scenario"]: record for record in rehearse()}


def test_every_path_runs_without_mixing_devices(counted: dict[str, dict[str, Any]]) -> None:
    failed = {name: record["error"] for name, record in counted.items() if "error" in record}
    assert not failed, "\n".join(f"{name}\n{error}" for name, error in failed.items())
    assert len(counted) >= 40 and "the pretence itself" in counted


def test_the_host_waits_no_more_than_it_must(counted: dict[str, dict[str, Any]]) -> None:
    above = {}
    for name, record in counted.items():
        longest = max((key for key in CEILINGS if name.startswith(key)), key=len)
        if record.get("waits", 0) > CEILINGS[longest]:
            above[name] = record["places"]
    assert not above, json.dumps(above, indent=2)
