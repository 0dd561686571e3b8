"""Scores of text: likelihood under a judge, variety, and distance to real text.

In: decoded samples (or token ids, for entropy) and a judge, any causal language model. Out: a
``Score`` each, with the windows, aggregates and counts that decide its number.
"""
