"""Claims at a URL: an object that its holder renews; one that is no longer renewed is void.

Object stores have no locks. A claim whose holder has ended on this machine is void too. Should two
writers ever hold one claim (a clock far off), they write the same bytes: a shard is a function of
its inputs.

What is guaranteed where: S3 and fsspec's memory create a file only if there is none, in one step,
so exactly one process gets a claim (an S3 server that ignores ``If-None-Match`` lets two have it
that look within a request of each other). Elsewhere (webhdfs, hdfs, ftp) a client can only look
first and then write: there a claim is read back after a pause, and who was overwritten has lost it.
Two hold it only if one was held up between look and write for longer than the pause.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, runtime_checkable

from shards.base import has_ended, this_process

TAKEOVER = "~"
LEASE_SECONDS = 120.0
POLL_SECONDS = 0.5
SETTLE_SECONDS = 1.0
"""Before a claim is read back: what looking and writing take at most, in general."""


@runtime_checkable
class LeasePlace(Protocol):
    """What a place of files offers for claims."""

    @property
    def creates_exclusively(self) -> bool:
        """Whether :meth:`create` looks and writes in one step."""
        ...

    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replace the file."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write the file if there is none; whether there was none."""
        ...

    def delete(self, name: str) -> None:
        """Remove the file if it is there."""
        ...


class Leases:
    """Claims as files of a place.

    Args:
        place: Where they lie.
        lease_seconds: A claim is void that was last renewed so long ago.
    """

    def __init__(self, place: LeasePlace, lease_seconds: float = LEASE_SECONDS) -> None:
        self._place, self._lease_seconds = place, lease_seconds

    @contextmanager
    def hold(self, name: str, wait: bool) -> Iterator[bool]:
        """Hold ``name`` against every other process while the context lasts; False if taken."""
        owner = {**this_process(), "id": uuid.uuid4().hex}
        while not (mine := self._take(name, owner)) and wait:
            time.sleep(POLL_SECONDS)
        if not mine:
            yield False
            return
        released = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(name, owner, released), daemon=True)
        renewal.start()
        try:
            yield True
        finally:
            released.set()
            renewal.join()
            if self._holder(name) == owner["id"]:
                self._place.delete(name)

    def _take(self, name: str, owner: Mapping[str, Any]) -> bool:
        """Create the claim, or take over one that is void."""
        # Looked at first, as some clients would overwrite a claim that is there.
        held = self._held(name)
        if held is not None:
            return self._is_void(held) and self._take_over(name, held, owner)
        if not self._place.create(name, _claim_bytes(owner)):
            return False
        if self._place.creates_exclusively:
            return True
        time.sleep(SETTLE_SECONDS)
        return self._holder(name) == owner["id"]

    def _take_over(self, name: str, void: Mapping[str, Any], owner: Mapping[str, Any]) -> bool:
        """Put our claim in a void one's place; of several processes that try, one does.

        Whoever may do it holds a claim on the void claim's id, and looks again before writing: by
        then another may have taken over and let go of that second claim. One left by a process
        killed in between becomes void itself.
        """
        takeover = f"{name}{TAKEOVER}{void.get('id', '')}"
        if not self._take(takeover, owner):
            return False
        try:
            if self._held(name) != void:
                return False
            self._place.write(name, _claim_bytes(owner))
            return True
        finally:
            self._place.delete(takeover)

    def _held(self, name: str) -> dict[str, Any] | None:
        """What a claim says, empty if it is no claim of ours; None if it is gone."""
        try:
            value = json.loads(self._place.read(name))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _holder(self, name: str) -> str | None:
        return (self._held(name) or {}).get("id")

    def _is_void(self, held: Mapping[str, Any]) -> bool:
        """Whether a claim's holder has died here, or has stopped renewing it elsewhere."""
        try:
            if has_ended(held):
                return True
            return time.time() - held["renewed"] > self._lease_seconds
        except (ValueError, KeyError, TypeError):  # not a claim that any version of ours wrote
            return True

    def _renew(self, name: str, owner: Mapping[str, Any], released: threading.Event) -> None:
        while not released.wait(self._lease_seconds / 4):
            # A renewal that fails is tried again; only if all fail does the claim run out.
            with suppress(Exception):
                if self._holder(name) != owner["id"]:  # we were too slow; it is another's now
                    return
                self._place.write(name, _claim_bytes(owner))


def _claim_bytes(owner: Mapping[str, Any]) -> bytes:
    return json.dumps({**owner, "renewed": time.time()}).encode()
