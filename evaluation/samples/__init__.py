"""Samples and reference texts on disk, read and checked line by line.

In: folders of ``samples*.jsonl`` with the ``settings.json`` that the sampler left, or files that
somebody else wrote. Out: a :class:`SampleSet` per file, and plain lists of reference texts. A fault
is named with file and line.
"""
