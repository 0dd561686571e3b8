"""Which process wrote a note, and whether it has ended: told only where that is certain.

A host name and a process id do not name a process. Containers share host names or have process ids
of their own, and an id is given anew. So a note also has the boot of its kernel, the process-id
namespace and the time at which the process started; where the system tells none of these, nothing
is concluded from a note.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
STATE_FIELD, START_FIELD = 0, 19
"""Of ``/proc/PID/stat`` after the command's name."""


def this_process() -> dict[str, Any]:
    """What names this process; JSON values, None for what the system does not tell."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_space": _pid_space(),
        "started": _start_time(os.getpid()),
    }


def has_ended(process: Mapping[str, Any]) -> bool:
    """Whether a process, as :func:`this_process` named it, has ended here; False if in doubt."""
    space, started = process.get("pid_space"), process.get("started")
    if space is None or started is None or space != _pid_space():
        return False  # of another machine or container: its ids mean nothing here
    pid = process.get("pid")
    if not isinstance(pid, int) or pid < 1:
        return False
    with suppress(PermissionError, OverflowError):  # another user's; no process id at all
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
    now = _start_time(pid)
    return now is not None and now != started


def _pid_space() -> str | None:
    """Within what a process id names one process at a time."""
    with suppress(OSError):
        return f"{BOOT_ID.read_text().strip()} {os.readlink(PID_NAMESPACE)}"
    return None


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of a process, "ended" if it only waits to be reaped."""
    with suppress(OSError, IndexError):
        # The command's name, in parentheses, may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return "ended" if fields[STATE_FIELD] in "ZX" else fields[START_FIELD]
    return None
