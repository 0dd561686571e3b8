"""From samples to numbers that can be believed, and to pages that can be looked at.

``samples`` reads what ``gdistill-sample`` wrote; ``text`` scores texts under a judge; ``maze``
walks the paper's maze from corpus to table; ``report`` writes tables and one self-contained page. A
:class:`~evaluation.score.Score` carries what its number depends on. The command is
``gdistill-eval`` (``cli``).
"""
