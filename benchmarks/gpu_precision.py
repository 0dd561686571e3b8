"""What TF32 and bfloat16 products would cost a teacher, a judge and a student: emulated on a CPU.

    python -m benchmarks.gpu_precision --teacher DIR --text FILE --student MODEL

Matrix products of float32 tensors get both inputs rounded first, to TF32's 10 bits of mantissa or
to bfloat16's 7, and are summed in float32, as a tensor core does. Attention counts as products of
its rounded inputs. Everything else stays float32, which bfloat16 autocast also keeps or nearly so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.teacher import Teacher
from pipeline.tokens.tokenizer import load_tokenizer
from shards.atomic import write_json_atomic
from shards.codec.protocol import TeacherOutput
from shards.console import run_command
from shards.language_model.loading import find_pretrained
from shards.noise.kinds import DenseProbabilities, KeyedPosterior
from shards.noise.philox import PositionKeys
from trainer.sampling.fill import AncestralSampler
from trainer.sampling.noise import sampling_noise
from trainer.students.folder import open_model
from trainer.students.registry import Student

FACTORS = {
    **dict.fromkeys(("mm", "bmm", "matmul", "linear"), (0, 1)),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm"), (1, 2)),
    "scaled_dot_product_attention": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
}
"""Operation -> which of its arguments are multiplied; a bias is added in float32."""
PRODUCTS = ("TF32", "bfloat16")
ROW_LENGTH, SEED = 256, 5


def to_tf32(tensor: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa, to nearest, ties away from zero; float32 stays its type."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def to_bfloat16(tensor: Tensor) -> Tensor:
    """Rounded to bfloat16; float32 stays its type."""
    return tensor.bfloat16().float()


class RoundedProducts(TorchDispatchMode):
    """Within the context, matrix products of float32 tensors round their inputs."""

    def __init__(self, products: str) -> None:
        super().__init__()
        self.round_to = {"TF32": to_tf32, "bfloat16": to_bfloat16}[products]
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        places = FACTORS.get(name, ())
        self.num_products += bool(places)
        args = [self._rounded(x) if i in places else x for i, x in enumerate(args)]
        return func(*args, **(kwargs or {}))

    def _rounded(self, value: Any) -> Any:
        is_factor = isinstance(value, Tensor) and value.dtype == torch.float32
        return self.round_to(value) if is_factor else value


def rounded(products: str, work: Callable[[], Any]) -> Any:
    """What ``work`` gives with rounded products; an error if it made none."""
    with RoundedProducts(products) as mode:
        result = work()
    assert mode.num_products, "no product went by"
    return result


def teacher_errors(exact: TeacherOutput, other: TeacherOutput) -> dict[str, float]:
    """Of a token's log p, of perplexity, and of tokens that the noise of ``other`` finds again."""
    gap = (other.token_log_probs - exact.token_log_probs).double()
    probs = exact.log_probs.exp()
    divergence = (probs * (exact.log_probs - other.log_probs)).sum(-1).double()
    return {
        "log_p_largest_nats": float(gap.abs().max()),
        "log_p_root_mean_square_nats": float(gap.square().mean().sqrt()),
        "kl_nats": float(divergence.mean()),
        "perplexity_ratio": float((-gap.mean()).exp()),
        "tokens_not_found_again": 1 - coupling(exact, other),
    }


def coupling(exact: TeacherOutput, other: TeacherOutput) -> float:
    """Share of tokens that are argmax(log p + xi), p exact, xi of the posterior under ``other``."""
    found = []
    for row in range(len(exact.tokens)):
        log_probs, tokens = other.log_probs[row], other.tokens[row]
        index = torch.arange(len(tokens))
        keys = PositionKeys(SEED, torch.full_like(index, row), index)
        own = log_probs.gather(1, tokens[:, None])[:, 0]
        xi = KeyedPosterior(keys, tokens, own, DenseProbabilities(log_probs)).gumbels()
        found.append((exact.log_probs[row].double() + xi.double()).argmax(-1) == tokens)
    return float(torch.cat(found).double().mean())


def student_errors(student: Student, num: int, nfe: int) -> dict[str, dict[str, float]]:
    """Share of a student's sampled tokens that come out otherwise, by kind of product."""
    length, ids = student.config.row_length, torch.arange(num)
    rows = torch.full((num, length), student.mask_id)
    rows[:, 0] = student.config.first_token_id or 0
    noise = None
    if student.is_conditioned:
        size = student.config.vocab_size
        noise = sampling_noise(SEED, ids, length, size, codec=student.codec)

    def drawn() -> Tensor:
        with torch.no_grad():
            return AncestralSampler(nfe=nfe).sample(student, rows, ids, noise, SEED).tokens

    exact = drawn()
    found = {}
    for products in PRODUCTS:
        other = rounded(products, drawn)
        found[products] = {
            "tokens_drawn_otherwise": float((other != exact)[:, 1:].double().mean()),
            "rows_drawn_otherwise": float((other != exact).any(dim=1).double().mean()),
        }
    return found


def main(
    teacher: Annotated[Path, typer.Option(help="A causal language model.")],
    text: Annotated[Path, typer.Option(help="Text that it scores.")],
    student: Annotated[Path, typer.Option(help="A trained diffusion student.")],
    num_rows: Annotated[int, typer.Option(help="Rows of 256 tokens.")] = 64,
    nfe: Annotated[int, typer.Option(help="Passes of the student.")] = 16,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path(
        "benchmarks/results/gpu_precision.json"
    ),
) -> None:
    """Measure, print, write the JSON."""
    drawing = open_model(student, torch.device("cpu")).student.eval()
    files = find_pretrained(teacher)
    tokenizer = load_tokenizer(files.folder)
    loaded = Teacher.load(files)
    ids = tokenizer.encode(text.read_text(encoding="utf-8")[: 8 * num_rows * ROW_LENGTH])
    rows = torch.tensor(ids[: len(ids) // ROW_LENGTH * ROW_LENGTH]).view(-1, ROW_LENGTH)[:num_rows]
    index = torch.arange(len(rows))
    exact = loaded.output(rows, index)
    found: dict[str, Any] = {
        "teacher": files.name,
        "row_length": ROW_LENGTH,
        "num_tokens": exact.tokens.numel(),
        "log_p_lowest_nats": float(exact.token_log_probs.min()),
        "float32 itself": {"tokens_not_found_again": 1 - coupling(exact, exact)},
        "student": {
            "kind": drawing.config.model_type,
            "passes": nfe,
            "row_length": drawing.config.row_length,
            "num_rows": num_rows,
        },
    }
    for products in PRODUCTS:
        other = rounded(products, lambda: loaded.output(rows, index))
        found[products] = teacher_errors(exact, other)
    for products, errors in student_errors(drawing, num_rows, nfe).items():
        found[products] |= errors
    for name in PRODUCTS:
        print(name, ", ".join(f"{key} {value:.3g}" for key, value in found[name].items()))
    write_json_atomic(out, found)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
