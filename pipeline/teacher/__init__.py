"""The teacher: token rows [B, L] -> log-probabilities [B, L-1, V], float32, nats.

In comes any causal language model of transformers; out come its distributions, checked, aligned
with the tokens they are about, in batches that fit the memory. It can also write rows of its own,
by Gumbel-max. The only home of the shift by one between logits and tokens.
"""
