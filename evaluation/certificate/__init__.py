"""Is a sample what a teacher would have drawn from the same noise?

In: files of ``gdistill-sample`` and a causal language model. The noise of each sample is found
again from its seed and index (``drawn``), the teacher reads each row once, and at every filled
position argmax(l + tau xi) is compared with the token (``margins``). Out: how many agree, the
smallest margin, and the positions where rounding decides, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.certificate.drawn import DrawnFile, DrawnRow, read_drawn
    from evaluation.certificate.margins import Certificate, certify_file

__getattr__, __dir__ = open_door(__name__, __file__)
