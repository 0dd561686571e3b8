"""``gdistill-extract``: corpus and teacher -> token rows -> shards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.corpus.config import scheme_of
from pipeline.settings import ExtractRequest, PlanOptions, Worker, resolve_request
from shards.console import command_app, run_command
from shards.errors import UsageError
from shards.settings_table import Section, settings_app

CODECS = "Posterior", "Seeded", "Hidden", "TopK", "Quantized", "Full"
SETTINGS = (
    Section("the run", "pipeline.settings:ExtractSettings"),
    Section("--corpus", "pipeline.corpus.config:CorpusConfig", "corpus"),
    *(Section(f"--codec {name.lower()}", f"shards.codec.{name.lower()}:{name}Codec", "codec", True) for name in CODECS),
)
app, references_app, tokens_app = command_app(), command_app(), command_app()
complete_app = command_app()

Out = Annotated[Path, typer.Option(help="Folder of the run; the store goes to OUT/store.")]
Corpus = Annotated[
    str | None,
    typer.Option(
        help="Files (stories.txt, 'stories/*.txt', .jsonl, .csv, .parquet; #field names the"
        " text), text:/jsonl:/csv:/parquet:/hf: sources, maze:k4, a TOML file, or owt, lm1b,"
        " wikitext2, wikitext103, ptb, lambada, ag_news, pubmed, arxiv, tinystories, maze;"
        " eval_ptb and the like for perplexity."
    ),
]
Teacher = Annotated[str | None, typer.Option(help="Folder or hub id of a causal language model.")]
EngineUrl = Annotated[
    str | None,
    typer.Option(
        help="In place of a teacher: address of a running vLLM, http://host:8000; of SGLang with"
        " --set engine.dialect=sglang. With --teacher: that model's hidden states, from vLLM."
    ),
]
Tokenizer = Annotated[str | None, typer.Option(help="If it does not lie beside the teacher.")]
RowLength = Annotated[int | None, typer.Option(help="Tokens of a row [context, at most 1024].")]
Rows = Annotated[int | None, typer.Option(help="Only so many rows of each split.")]
ConfigFile = Annotated[Path | None, typer.Option(help="TOML, as configs/owt-extract.toml.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="key=value; `settings` lists the keys.")]


@app.command()
def extract(
    out: Out,
    corpus: Corpus = None,
    teacher: Teacher = None,
    engine: EngineUrl = None,
    from_logprobs: Annotated[
        str | None,
        typer.Option(
            help="In place of corpus and teacher: rows that an engine scored, 'scores/*.parquet' or"
            " .jsonl; lists token_ids, token_log_probs, top_ids and top_log_probs a row (nats), or"
            " in JSONL answers of vLLM's /v1/completions or SGLang's /generate with"
            " prompt_token_ids."
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    store: Annotated[str | None, typer.Option(help="Folder or URL [OUT/store].")] = None,
    codec: Annotated[
        str | None, typer.Option(help="posterior [default], seeded, hidden, topk, quantized or full.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="parallel [default]; sequential: the teacher writes.")] = None,
    row_length: RowLength = None,
    rows: Rows = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a forward pass [auto].")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 [default] or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto [default], cpu, cuda, cuda:N.")] = None,
    compile: Annotated[bool | None, typer.Option(help="Use torch.compile.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything drawn [0].")] = None,
    teacher_preset: Annotated[
        str | None, typer.Option(help="Teacher of the maze, trained here: demo or full [default].")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    worker: Annotated[int | None, typer.Option(help="This process of a job array, from 0.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of the job array.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a store begun on other hardware or software.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Tokens, bytes, hours, what is done; run nothing.")] = False,
    rate: Annotated[float | None, typer.Option(help="For --plan: tokens/s of a process.")] = None,
    tokens: Annotated[float | None, typer.Option(help="For --plan: tokens of the corpus.")] = None,
    price: Annotated[float | None, typer.Option(help="For --plan: price of an hour.")] = None,
) -> None:
    """Run the teacher once over a corpus and store what students learn from.

    Stage 1 writes token rows to OUT/tokens, stage 2 the store to OUT/store or --store. Both
    resume: run the same command again after any interruption. `gdistill-extract tokens` does
    stage 1 alone, on a machine without a GPU. Start it under `accelerate launch` or `srun`, or as
    `--worker i --workers n`, for many processes. Each ends when the store is complete; one
    that has nothing left waits for shards in work elsewhere, and takes over those of a process
    that dies. --engine has a running server score the rows, --from-logprobs reads what one said;
    both need --tokenizer and write `posterior` stores (`settings engine`: requests in flight, how
    many tokens at a position, server dialect, API key). With --teacher beside --engine a vLLM gives
    hidden states, for every codec (docs/engines.md). On a machine with several GPUs a process
    uses the one of its number there (LOCAL_RANK, SLURM_LOCALID); where nothing says the number,
    give each its --device cuda:N.

    `gdistill-extract settings [WORD]` lists every key of --set with its default and meaning:
    corpus.*, codec.*, teacher.*, store.*, sequential.*. `gdistill-extract references --help` writes
    rows of a corpus as text, to compare samples with.
    """
    figures = PlanOptions(rate, tokens, price)
    if not plan and figures != PlanOptions():
        raise UsageError("an option of --plan without it", where="--rate, --tokens or --price", remedy="add --plan")
    if corpus is not None and from_logprobs is not None:
        what, got = "scored rows are their own corpus", f"--corpus {corpus} too"
        raise UsageError(what, where="--from-logprobs", got=got, remedy="leave --corpus out")
    if plan and (engine or from_logprobs) is not None:
        what, where = "--plan is for a teacher that runs here", "--engine" if engine else "--from-logprobs"
        remedy = "try it with --rows 100: what is done stays, and the report says bytes and rate"
        raise UsageError(what, where=where, remedy=remedy)
    options: dict[str, Any] = {
        "mode": mode,
        "seed": seed,
        "device": device,
        "batch_size": batch_size,
        "strict": strict or None,
        "corpus": {"spec": corpus, "row_length": row_length},
        "engine": {"url": engine},
        "codec": {"name": codec},
        "teacher": {"location": teacher, "tokenizer": tokenizer, "preset": teacher_preset},
        "store": {"rows": rows, "location": store},
    }
    options["teacher"] |= {"dtype": dtype, "compiled": compile}
    if from_logprobs is not None:
        options["corpus"]["spec"] = f"scores:{from_logprobs}"
    request = resolve_request(out, options, overrides or [], config)
    process = Worker.from_environment(worker, workers)
    if plan:
        from pipeline.plan import plan_lines

        _say(plan_lines(request, figures, process))
    else:
        _say(run(request, process))


def run(request: ExtractRequest, worker: Worker, tokens_only: bool = False) -> list[str]:
    """Do whatever of a run is not done yet, wherever its teacher runs; what there is to say at the end.

    ``tokens_only``: stage 1 alone, which reads no weights of a teacher.

    Raises:
        UsageError: If the request cannot be met, or differs from what is there.
        GdistillError: If something fails on the way; finished shards are kept.
    """
    if request.settings.engine.url is not None or scheme_of(request.corpus.source)[0] == "scores":
        from pipeline.engine import run_scored  # late, as below: it waits for torch

        return run_scored(request, worker, tokens_only)
    from pipeline.run import run_extraction, run_tokens

    return run_tokens(request, worker) if tokens_only else run_extraction(request, worker)


def _say(lines: list[str]) -> None:
    if lines:
        typer.echo("\n".join(lines))


@tokens_app.command()
def tokens(
    out: Out,
    corpus: Corpus = None,
    teacher: Teacher = None,
    engine: EngineUrl = None,
    tokenizer: Tokenizer = None,
    row_length: RowLength = None,
    rows: Rows = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Stage 1 alone: tokenize the corpus into OUT/tokens; of a teacher only small files are read.

    Needs no GPU. `gdistill-extract` with the same options finds the rows and goes on from them:
    run this on a node of CPUs first, and no GPU waits for it (runs/slurm/tokens.sbatch).
    """
    options = {
        "corpus": {"spec": corpus, "row_length": row_length},
        "engine": {"url": engine},
        "teacher": {"location": teacher, "tokenizer": tokenizer},
        "store": {"rows": rows},
    }
    request = resolve_request(out, options, overrides or [], config)
    _say(run(request, Worker(), tokens_only=True))


@complete_app.command()
def complete(
    out: Out,
    prompts: Annotated[
        str, typer.Option(help='JSON lines: {"messages": [...]} that end with a question, or {"prompt": "text"}.')
    ],
    teacher: Annotated[str, typer.Option(help="Folder or hub id of a causal language model.")],
    tokenizer: Tokenizer = None,
    store: Annotated[str | None, typer.Option(help="Folder or URL [OUT/store].")] = None,
    codec: Annotated[str | None, typer.Option(help="As of gdistill-extract.")] = None,
    row_length: RowLength = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the logits [1].")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the answers [0].")] = None,
    overrides: Overrides = None,
    worker: Annotated[int | None, typer.Option(help="This process of a job array, from 0.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of the job array.")] = None,
) -> None:
    """The teacher answers prompts; its answers and their noise are stored, and students learn them.

    One row is one prompt and its answer, up to a token that ends it or the end of the row. After
    any interruption the same command goes on, and the store is the same, byte for byte.
    """
    options = {
        "mode": "sequential",
        "seed": seed,
        "corpus": {"spec": f"chat:{prompts}", "packing": "prompts", "row_length": row_length},
        "codec": {"name": codec},
        "teacher": {"location": teacher, "tokenizer": tokenizer},
        "sequential": {"temperature": temperature},
        "store": {"location": store},
    }
    request = resolve_request(out, options, overrides or [])
    _say(run(request, Worker.from_environment(worker, workers)))


@references_app.command()
def references(
    source: Annotated[str, typer.Argument(help="A run's folder, its tokens or its store (folder or URL).")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to write.")],
    num: Annotated[int | None, typer.Option(help="Rows, the first ones [all].")] = None,
    split: Annotated[str, typer.Option(help="validation or train.")] = "validation",
) -> None:
    """Write rows of a corpus as text, one {"text": ...} a line: `gdistill-eval --reference FILE`.

    Rows are those that students are trained and judged on, of the same length as samples.
    """
    from pipeline.references import write_references

    count = write_references(source, out, num, split)
    typer.echo(f"wrote {out}: {count:,} rows of {split}", err=True)


def main() -> None:
    """Entry point."""
    others = {"references": references_app, "tokens": tokens_app, "complete": complete_app}
    run_command(app, settings=partial(settings_app, SETTINGS), **others)


if __name__ == "__main__":
    main()
