"""What ``gdistill-sample`` does: one folder of samples, resumed by the command that began it.

In comes a ``Request`` (the command's options); it is settled against the student before the first
forward pass (``request``, ``loading``, ``given_rows``). Out go ``samples.jsonl`` and
``settings.json``, which name everything that decided the samples (``run``, ``identity``, ``file``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.sampling.command.request import Request

__getattr__, __dir__ = open_door(__name__, __file__)
