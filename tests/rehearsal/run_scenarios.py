"""Runs scenarios on a pretended device; one JSON line for each. See :mod:`tests.rehearsal.run`."""

from __future__ import annotations

import json
import sys
import traceback

from tests.rehearsal.pretend_cuda import pretend_cuda
from tests.rehearsal.scenarios import SCENARIOS, store, teacher_output
from tests.rehearsal.walks import stories


def main(names: list[str]) -> None:
    """Each scenario's waits by place, or the error that ended it."""
    for codec in ("posterior", "seeded", "topk", "quantized", "full"):
        store(codec)  # written on the host, outside the pretence
    teacher_output()
    stories()
    for name in names or list(SCENARIOS):
        record: dict[str, object] = {"scenario": name}
        try:
            with pretend_cuda():
                counts = SCENARIOS[name]()
            record["waits"] = sum(counts.values())
            record["places"] = {f"{kind} at {place}": n for (kind, place), n in counts.items()}
        except Exception:
            record["error"] = traceback.format_exc(limit=-6)
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
