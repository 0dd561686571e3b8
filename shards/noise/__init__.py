"""Gumbel noise xi, kept as arrival times F = exp(-xi): what it is, and where it comes from.

In come keys (seed, row, position, draw) and, for the posterior, tokens with the teacher's
probabilities; out comes a ``Noise``: n positions x V entries, read in tiles and never held whole,
which embeds itself: ``noise.softmax_embed(weight)``.

gumbel.py says what the posterior is; philox draws without state; probabilities holds the teacher's
side; kinds puts them together; order_statistics draws the k largest of V without the V; embedding
is softmax(xi) W; murmur3 is vLLM's own noise.
"""
