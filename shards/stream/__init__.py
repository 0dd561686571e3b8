"""The rows of a store in training order: shuffled, resumable, the same for every world size.

In comes a split of a store (anything that reads chunks); out come ``RowBatch`` records, one per
global batch and rank. order.py decides which row stands where; stream.py reads ahead on threads and
counts what was handed out, which is all the state there is; dataset.py is for loops of one's own.
"""
