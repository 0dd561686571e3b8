"""A corpus: where documents come from, how they are split, cleaned and repaired.

In comes a name (a preset, a source in one word, a path) with settings, out come numbered documents
of clean text for each split, the same ones every time, and what had to be left out or repaired.
``sources`` reads the formats; ``presets`` holds the published corpora; ``detokenize`` undoes their
word-level tokenization.
"""
