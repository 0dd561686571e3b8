"""A corpus: numbered documents of clean text for each split, the same ones every time."""
