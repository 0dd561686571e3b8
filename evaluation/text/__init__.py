"""DOOR: evaluation.text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.text.diversity import entropy_score
    from evaluation.text.generative_perplexity import reading_limits
    from evaluation.text.judge import JudgeModel, load_judge
    from evaluation.text.mauve_score import check_counts, last_hidden_features

__getattr__, __dir__ = open_door(__name__, __file__)
