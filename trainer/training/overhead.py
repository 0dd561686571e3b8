"""What Gumbel conditioning adds to a model: one projection of V x H parameters.

Reproduces the paper's overhead table. The parameter counts are the nominal ones that its
percentages imply (117M, 774M, 6.74B, 13B, 7B); its Qwen-7B row implies V = 152,000, while the
published model has 151,936 (622.3M).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Overhead:
    """One model of the table.

    Attributes:
        model: Its name.
        vocab_size: V.
        hidden_size: H.
        num_parameters: Parameters of the model without the projection, as the paper counts them.
    """

    model: str
    vocab_size: int
    hidden_size: int
    num_parameters: float

    @property
    def projection_parameters(self) -> int:
        """V x H."""
        return self.vocab_size * self.hidden_size

    @property
    def share(self) -> float:
        """Projection over model, as a fraction."""
        return self.projection_parameters / self.num_parameters


MODELS = (
    Overhead("GPT-2 Small", 50257, 768, 117e6),
    Overhead("GPT-2 Large", 50257, 1280, 774e6),
    Overhead("LLaMA-7B", 32000, 4096, 6.74e9),
    Overhead("LLaMA-13B", 32000, 5120, 13.0e9),
    Overhead("Qwen-7B", 152_000, 4096, 7.0e9),
)


def overhead_table(models: Sequence[Overhead] = MODELS) -> str:
    """The table as aligned text: model, V, H, projection in millions, share in percent."""
    lines = [f"{'model':<14}{'V':>9}{'H':>7}{'V x H':>10}{'share':>8}"]
    for row in models:
        millions = f"{row.projection_parameters / 1e6:.1f}M"
        share = f"{100 * row.share:.1f}%"
        lines.append(
            f"{row.model:<14}{row.vocab_size:>9,}{row.hidden_size:>7,}{millions:>10}{share:>8}"
        )
    return "\n".join(lines)
