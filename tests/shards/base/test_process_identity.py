"""A process counts as ended only where that is certain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shards.store import remote as process_identity
from shards.store.remote import has_ended, this_process


def test_this_process_lives() -> None:
    assert not has_ended(this_process())


@pytest.fixture
def ended() -> dict[str, object]:
    """A process that has ended and been reaped, as it named itself."""
    code = "import json; from shards.store.remote import *; print(json.dumps(this_process()))"

    text = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    return json.loads(text)


def test_an_ended_process_has_ended(ended: dict[str, object]) -> None:
    assert has_ended(ended)


def test_a_process_not_yet_reaped_has_ended() -> None:
    told, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(told[1], json.dumps(this_process()).encode())
        os.read(go[0], 1)
        os._exit(0)
    note = json.loads(os.read(told[0], 4096))
    assert note["pid"] == child and not has_ended(note)
    os.write(go[1], b"x")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert has_ended(note)
    os.waitpid(child, 0)


def test_an_id_given_to_another_process_names_an_ended_one() -> None:
    assert has_ended({**this_process(), "started": "1"})


@pytest.mark.parametrize(
    "change",
    [
        {"pid_space": None},
        {"started": None},
        {"pid_space": "another boot pid:[4026531836]"},
        {"pid": "x"},
        {"pid": 0},
        {"pid": 10**30},
        {"pid": None},
    ],
    ids=str,
)
def test_what_is_not_certain_is_not_concluded(ended: dict[str, object], change: dict) -> None:
    assert not has_ended({**ended, **change})


def test_notes_without_these_fields_are_in_doubt(ended: dict[str, object]) -> None:
    assert not has_ended({name: ended[name] for name in ("host", "pid")})


def test_a_system_that_tells_nothing_is_in_doubt(
    ended: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_identity, "BOOT_ID", Path("/proc/no such file"))
    assert this_process()["pid_space"] is None and not has_ended(ended)
