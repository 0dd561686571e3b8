"""Lossless decoding on record: certificate, tokens per teacher pass, wall clock against plain.

    python -m benchmarks.coupled --model RUN [--out DIR] [--rows 400] [--length 256]

RUN is a trained student with Medusa heads. Its samples under ``coupled`` acceptance are certified
(every token again from a clean teacher pass and the noise found again), and timed in turns with
``plain``, the same sampler proposing nothing: the teacher alone with its key/value cache, on the
same noise, so both must give the same tokens; and with transformers' ``generate``. The second shape
is GPT-2 small's with random weights, where a teacher's pass costs what it costs at that size:
its tokens per pass mean nothing, its seconds per round do. Writes ``coupled.json``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig

from benchmarks.acceptance import SEED, Decoded, decode
from benchmarks.measure import interleaved_seconds, machine, median
from evaluation.certificate import DrawnFile, DrawnRow, certify_file
from shards.atomic import write_json_atomic
from shards.console import run_command, without_library_bars
from trainer.sampling.verified.medusa import MedusaConfig
from trainer.students.backbone import BackboneStudent, load_backbone
from trainer.students.folder import open_model
from trainer.students.registry import Medusa, StudentSettings

PLAIN, COUPLED = MedusaConfig(max_lookahead=0), MedusaConfig()
TIMED_ROWS, TIMED_LENGTH, REPEATS = (1, 16), 128, 3
Kind = TypeVar("Kind", bound=BackboneStudent)
LARGE = GPT2Config()
LARGE_SETTINGS = StudentSettings(
    hidden_size=256, num_layers=1, num_heads=8, num_proposed=5, conditioning="gumbel", dropout=0.0
)


def random_on_backbone(
    kind: type[Kind],
    config: PretrainedConfig,
    settings: StudentSettings,
    folder: Path,
    row_length: int,
    size: int,
) -> Kind:
    """A student at step 0 on a language model of random weights; see :func:`random_medusa`."""
    torch.manual_seed(0)
    with without_library_bars():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    backbone = load_backbone(folder, size, settings.backbone_dtype)
    made = kind.config_class.build(settings, vocab_size=size, row_length=row_length, bos_token_id=0)
    made.frozen = kind.describe(backbone)
    student = kind(made)
    student.attach(backbone)
    return student.eval()


def random_medusa(
    config: PretrainedConfig, settings: StudentSettings, folder: Path, row_length: int, size: int
) -> Medusa:
    """Heads at step 0 on a language model of random weights, written to ``folder``.

    Args:
        config: The language model's.
        settings: The heads'.
        folder: Where the language model goes.
        row_length: L.
        size: V, at most the model's logits.
    """
    return random_on_backbone(Medusa, config, settings, folder, row_length, size)


def open_rows(student: Medusa, num_rows: int, length: int) -> Tensor:
    """Rows of which the first token is given."""
    rows = torch.full((num_rows, length), student.mask_id)
    rows[:, 0] = student.config.first_token_id or 0
    return rows


def certificate(student: Medusa, decoded: Decoded) -> dict[str, Any]:
    """What a clean pass over each row says of its tokens; without the list of ties."""
    tokens = decoded.result.tokens
    rows = [
        DrawnRow(index, row, list(range(1, len(row))), 0)
        for index, row in enumerate(tokens.tolist())
    ]
    drawn = DrawnFile(
        source=Path("samples.jsonl"),
        rows=rows,
        seed=SEED,
        tau=COUPLED.tau,
        vocab_size=student.config.vocab_size,
        codec=None,
        sampler="medusa",
        is_verified=True,
        verifier_sha256=None,
        dtype=student.settings.backbone_dtype,
    )
    found = certify_file(drawn, COUPLED.load(student)).to_json()
    return {**found, "ties": len(found["ties"])}


def plain_generate(student: Medusa, rows: Tensor) -> Callable[[], object]:
    """transformers' own sampling loop with its cache, as many tokens."""
    network, new = student.language_model.network, rows.shape[1] - 1

    @torch.inference_mode()
    def run() -> object:
        return network.generate(
            rows[:, :1],
            attention_mask=torch.ones_like(rows[:, :1]),
            do_sample=True,
            top_k=0,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
        )

    return run


def timed(student: Medusa, num_rows: int, length: int, repeats: int) -> dict[str, Any]:
    """Coupled against plain sampling of the same rows, in turns."""
    rows = open_rows(student, num_rows, length)
    last: dict[str, Decoded] = {}

    def drawing(name: str, sampler: MedusaConfig) -> Callable[[], object]:
        def run() -> object:
            last[name] = decode(student, sampler, rows)
            return last[name]

        return run

    work = {
        "plain": drawing("plain", PLAIN),
        "coupled": drawing("coupled", COUPLED),
        "transformers generate": plain_generate(student, rows),
    }
    seconds = interleaved_seconds(work, student.device, repeats=repeats)
    middle = {name: median(values) for name, values in seconds.items()}
    # All rows go on together, so a batch takes as many rounds as its slowest row.
    rounds = {n: int(one.result.details["verifier_nfe"].max()) for n, one in last.items()}
    per_round = {name: middle[name] / rounds[name] for name in rounds}
    return {
        "rows": num_rows,
        "length": length,
        "seconds": middle,
        "all_seconds": seconds,
        "rounds": rounds,
        "tokens_per_teacher_pass": last["coupled"].score().value,
        "plain_over_coupled": middle["plain"] / middle["coupled"],
        "generate_over_coupled": middle["transformers generate"] / middle["coupled"],
        "round_over_plain_pass": per_round["coupled"] / per_round["plain"],
        "differing_tokens": _differing(last["plain"], last["coupled"]),
    }


def _differing(one: Decoded, other: Decoded) -> int:
    return int((one.result.tokens != other.result.tokens).sum())


def measure(student: Medusa, num_rows: int, length: int, repeats: int) -> dict[str, Any]:
    """Certificate and timings of a trained student."""
    decoded = decode(student, COUPLED, open_rows(student, num_rows, length))
    score = decoded.score()
    return {
        "backbone": student.config.frozen,
        "conditioning": student.settings.conditioning,
        "num_proposed": student.settings.num_proposed,
        "certificate": certificate(student, decoded),
        "tokens_per_teacher_pass": score.value,
        "tokens_per_teacher_pass_95": score.interval,
        **score.details,
        "timed": [timed(student, n, min(length, TIMED_LENGTH), repeats) for n in TIMED_ROWS],
    }


def main(
    model: Annotated[Path, typer.Option(help="A trained student with Medusa heads.")],
    out: Annotated[Path, typer.Option(help="Folder for coupled.json.")] = Path("out/bench"),
    rows: Annotated[int, typer.Option(help="Certified rows.")] = 400,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 256,
    repeats: Annotated[int, typer.Option(help="Timed repetitions.")] = REPEATS,
    large: Annotated[bool, typer.Option(help="Also at GPT-2 small's shape.")] = True,
) -> None:
    """Certify, count and time coupled decoding."""
    student = open_model(model).student
    assert isinstance(student, Medusa), f"{model} has no Medusa heads"
    found: dict[str, Any] = {"trained": measure(student, rows, length, repeats)}
    if large:
        with tempfile.TemporaryDirectory() as folder:
            big = random_medusa(LARGE, LARGE_SETTINGS, Path(folder), 48, LARGE.vocab_size)
            found["random weights, GPT-2 small"] = timed(big, 1, 48, repeats)
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out / "coupled.json", {**found, "machine": machine(student.device)})
    first = found["trained"]["certificate"]
    typer.echo(
        f"{first['num_agreeing']} of {first['num_positions']} tokens certified, "
        f"{first['num_mismatches']} mismatches, {first['ties']} ties; "
        f"{found['trained']['tokens_per_teacher_pass']:.3f} tokens per teacher pass"
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    run_command(app)
