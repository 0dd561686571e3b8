"""Sampling: from a student, its noise and rows with masked positions to finished rows.

A sampler is a frozen dataclass of settings with one method, ``sample``: ``ancestral``,
``first_hitting``, ``fixed_count`` and ``confidence`` fill whole rows (``whole_row``), ``block``
goes block by block, ``sequential`` token by token, ``apd`` and ``coupled`` as far as a verifier
agrees (``verified``). What they are composed of stands in ``rules``; what ``gdistill-sample`` adds,
in ``command``. In come students and their noise; out go ``SampleResult`` records.
"""
