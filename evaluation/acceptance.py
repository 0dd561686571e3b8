"""How many drafted tokens a teacher accepted: per pass, and by distance from what was accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evaluation.bootstrap import PerSample
from evaluation.score import Score


def acceptance_score(
    accepted: Sequence[Sequence[int]],
    reached: Sequence[Sequence[int]],
    passes: Sequence[int],
    indices: Iterable[int],
) -> Score:
    """Tokens per pass of the teacher: those accepted and the one that each pass adds.

    The details hold, by distance (Medusa: by head), the share of proposals that were accepted
    where all before them had been, with 95% bootstrap intervals over samples, and the passes.

    Args:
        accepted: Per sample and distance, proposals that were accepted.
        reached: Proposals that were looked at: all before them were accepted.
        passes: Per sample, forward passes of the teacher.
        indices: Sample indices.
    """
    indices = tuple(indices)
    gained = tuple(float(sum(row) + n) for row, n in zip(accepted, passes, strict=True))
    per_pass = PerSample(indices, gained, tuple(map(float, passes)))
    heads = []
    for column in range(len(reached[0])):
        looked_at = tuple(float(row[column]) for row in reached)
        if not sum(looked_at):
            break
        heads.append(PerSample(indices, tuple(float(row[column]) for row in accepted), looked_at))
    # A set of samples drawn again may miss the few that reached a far distance: no interval there.
    sure = [sum(1 for n in head.denominators if n) >= 10 for head in heads]
    return Score(
        name="tokens_per_teacher_pass",
        value=per_pass.value(),
        num_samples=len(indices),
        interval=per_pass.interval(),
        details={
            "conditional_acceptance": [head.value() for head in heads],
            "conditional_acceptance_95": [
                list(head.interval() or ()) if enough else None
                for head, enough in zip(heads, sure, strict=True)
            ],
            "teacher_passes": int(sum(passes)),
            "accepted_tokens": int(sum(map(sum, accepted))),
        },
        per_sample=per_pass,
    )
