"""What a student is asked: rows become batches, batches are corrupted, times weigh the loss.

In: rows of a store (``shards.stream``). Out: :class:`Batch` with its noise, :class:`Corruption`
(times, masks, loss weights) keyed by (seed, epoch, row), noise schedules, and the search for the
clips of t whose loss varies least. Pure functions of what they are given; no module, no state.
"""
