"""``gdistill-eval certify``: are the samples the teacher's own decode of their noise?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evaluation.samples import find_sample_files
from shards.base import GdistillError, require_writable, visible, write_json_atomic


def certify(
    samples: Annotated[Path, typer.Argument(help="Folder or .jsonl file of gdistill-sample.")],
    teacher: Annotated[
        str, typer.Option(help="Causal LM: local folder, or a hub id in its cache.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for certificate.json (the samples' own).")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
) -> None:
    """Find the noise of each sample again and compare each token with argmax(l + tau xi).

    Samples that a teacher has verified must agree everywhere, or the command fails; those of a
    student get the share that does. The teacher computes in the precision that verified them, which
    the certificate names (float32 where none did); ties within its rounding are listed there.
    """
    from evaluation.certificate import certify_file, read_drawn
    from shards.language_model import resolve_device
    from trainer.sampling.verified import load_verifier

    files = [read_drawn(file) for file in find_sample_files(samples)]
    place, found, broken = resolve_device(device), {}, []
    for drawn in files:
        model = load_verifier(teacher, drawn.vocab_size, place, drawn.dtype)
        result = certify_file(drawn, model)
        found[visible(drawn.source.name)] = {
            "sampler": drawn.sampler,
            "tau": drawn.tau,
            **result.to_json(),
        }
        typer.echo(
            f"{visible(str(drawn.source))}: {result.num_agreeing} of {result.num_positions} "
            f"tokens are argmax(l + {drawn.tau:g} xi) ({result.agreement:.2%}); smallest margin "
            f"{result.smallest_margin:.2g} nats; {len(result.ties)} ties within {result.dtype} "
            f"rounding, {result.num_mismatches} mismatches"
        )
        if drawn.is_verified and result.num_mismatches:
            broken.append((drawn.source, result.mismatches[0]))
    folder = out or (samples if samples.is_dir() else samples.parent)
    require_writable(folder)
    write_json_atomic(folder / "certificate.json", found)
    for source, first in broken:
        raise GdistillError(
            "a verified sample is not the teacher's",
            where=f"{source}: sample {first.index}, position {first.position}",
            got=f"token {first.token}",
            expected=f"token {first.winner}, better by {-first.margin:.3g} nats",
            remedy="the file was altered, or the teacher is another one",
        )
