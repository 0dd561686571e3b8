"""The students: MDLM, BD3-LM and the autoregressive baseline on one diffusion transformer.

In: a :class:`Batch` (for the loss), or rows with open positions and noise embeddings (for
log-probabilities). Out: :class:`LossOutput`, log-probabilities over V + 1 tokens, and model
folders: written whole or not at all, read back with all of their weights or an error. Loading
any name of :mod:`trainer.students.registry` registers the students with transformers.
"""
