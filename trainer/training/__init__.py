"""One training loop for all students, on one process or many.

In: a :class:`RunConfig` (composed from recipes, flags and overrides) and a finished store. Out:
``metrics.jsonl``, checkpoints that resume bit for bit, and the model folder. Every draw is keyed
by (seed, epoch, row), so nothing depends on the number of processes or on interruptions.
"""
