"""How likely students find given text, and what the noise was when they were asked.

In: a trained student and rows of tokens, or contexts with completions. Out: validation perplexity
(exact or a bound) as a score, the likelihood of completions in one pass, block by block or as a
Monte-Carlo bound, and a student as a model of lm-evaluation-harness. A likelihood given noise that
was inferred from the very text is no likelihood of the text: it carries that caution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.likelihood.completion import CompletionScorer, ScoringNoise
    from evaluation.likelihood.harness import GdistillLM
    from evaluation.likelihood.local_tasks import write_tasks
    from evaluation.likelihood.validation import NoiseSource, validation_perplexity

__getattr__, __dir__ = open_door(__name__, __file__)
