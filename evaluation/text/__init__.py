"""Scores of text: likelihood under a judge, variety, and distance to real text.

In: decoded samples (or token ids, for entropy) and a judge, any causal language model. Out: a
``Score`` each, with the windows, aggregates and counts that decide its number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.text.diversity import distinct_ngram_share, entropy_score, unigram_entropy_nats
    from evaluation.text.infilling import exact_match, filled_perplexity, filled_spans
    from evaluation.text.judge import JudgeModel, load_judge
    from evaluation.text.mauve_divergence import check_counts, mauve_score
    from evaluation.text.mauve_features import text_features
    from evaluation.text.memory import JudgedText, JudgeMemory, readings_folder
    from evaluation.text.perplexity import generative_perplexity
    from evaluation.text.pieces import Piece, surprise_pieces
    from evaluation.text.reading import ReadingLimits, read_texts, reading_limits

__getattr__, __dir__ = open_door(__name__, __file__)
