"""Sampling: from a student, its noise and rows with masked positions to finished rows.

A sampler is a frozen dataclass of settings that says in which order positions are predicted and by
which rule tokens are chosen; ``fill`` holds the loop they share. ``noise`` names all randomness,
``registry`` lists the samplers, ``command`` is what ``gdistill-sample`` adds.
"""
