"""What an extraction would cost, and what a run would do, before anyone pays for it.

``--plan``: tokens counted or estimated, bytes per token as each codec really writes them, hours and
price from a rate. ``--dry-run``: the resolved settings and which steps are done. Neither runs a
teacher, and neither writes a byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.plan.codec_sizes import one_shard_manifest
    from pipeline.plan.dry_run import what_would_be_done
    from pipeline.plan.plan import make_plan

__getattr__, __dir__ = open_door(__name__, __file__)
