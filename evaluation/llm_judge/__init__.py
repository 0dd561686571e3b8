"""Samples rated by a language model behind an OpenAI-compatible endpoint that the user names.

In: texts, an endpoint and a model name; the key comes from an environment variable. Out: a score
per dimension, with every fault counted and every answer kept, from which an interrupted run goes
on. Nothing is sent anywhere else, and nothing before its cost was estimated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.llm_judge.endpoint import Endpoint, Faults
    from evaluation.llm_judge.rating import (
        AnswerFile,
        Estimate,
        estimate_cost,
        rate_samples,
        rating_scores,
    )
    from evaluation.llm_judge.rubric import DIMENSIONS, parse_ratings, prompt_for

__getattr__, __dir__ = open_door(__name__, __file__)
