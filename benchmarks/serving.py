"""Shared noise in a real vLLM on record: exactness, tokens per target pass, speed, cost.

    python -m benchmarks.serving --engine .vllm --teacher ../shared/data/stories3M \
        [--drafter RUN/model] [--out benchmarks/results] [--tokens 100000] [--part exact]

Engines run beside each other, each in a process of the environment ``--engine``, and are asked in
turns: the stock one, the one with the plugin and no drafts, and with drafts of vLLM's n-gram and of
a student. Parts:

- ``speed``: tokens per second at 1, 4, 16 streams, and tokens per target pass;
- ``exact``: requests at temperature 0, 0.7 and 1, with and without nucleus, 1 to 16 streams at a
  time, in another order than the engine without drafts got them, one in ten cancelled: how many of
  their tokens differ;
- ``own``: the student's requests once more by our own sampler under the same noise: its tokens per
  pass, and how many tokens differ;
- ``cost``: the plugin without drafts in one process, its step and the stock one in turns: median
  ratio of processor time, which other processes' load and the luck of a start do not reach;
- ``altered``: 10,000 tokens served with n-gram drafts are certified; then one of them is altered,
  many times over: how often the certificate names that very token.

Writes ``serving.json``; what it holds of a part that is not run stays.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, stdev
from typing import Annotated, Any

import typer

PROMPTS = (
    "Once upon a time",
    "One day, a little girl named Lily",
    "Tom had a big red ball. He",
    "The cat sat on the mat and",
    "There was a small bird who",
    "Ben and Mia went to the park. They saw",
    '"Mom, look!" said',
    "It was raining, so",
)
CUTS = [(t, p) for t in (0.0, 0.7, 1.0) for p in (1.0, 0.9)]
STREAMS = (1, 4, 16)
REPEATS = 5
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
STUDENT = {"method": "custom_class", "model": "trainer.serving.drafters.StudentDrafter"}
MAX_TOKENS = 100
OWN_ROWS = 48
COST_TURNS = {1: 100, 4: 60, 16: 40}
"""By number of streams."""
SERVED = 100
ALTERED = 200
VERSIONS = "import torch, vllm; print(vllm.__version__, torch.__version__)"


@dataclass
class Job:
    """One request.

    Attributes:
        prompt: Its text.
        seed: Of its noise.
        temperature: 0 is greedy.
        top_p: 1 cuts nothing.
        max_tokens: It has no other end.
        cancel_after: Tokens after which the caller leaves; None for never.
    """

    prompt: str
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = MAX_TOKENS
    cancel_after: int | None = None


class Engine:
    """An engine in a process of its own.

    Args:
        place: The environment that vLLM is installed in.
        teacher: The model's folder.
        plugin: Whether it draws from shared noise.
        drafts: vLLM's ``speculative_config``.
        drafter: A student's folder, for our own class of drafter.
        options: More of vLLM's ``LLM``.
    """

    def __init__(
        self,
        place: Path,
        teacher: str,
        plugin: bool,
        drafts: dict[str, Any] | None = None,
        drafter: Path | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [
                str(place / "bin" / "python"),
                *("-m", "benchmarks.serving", "worker", teacher, json.dumps(drafts)),
                str(drafter or ""),
                json.dumps(options or {}),
            ],
            env={**os.environ, **self.settings(plugin)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @staticmethod
    def settings(plugin: bool) -> dict[str, str]:
        """Of the environment: one thread, a small cache, the plugin or none."""
        return {
            "VLLM_PLUGINS": "gdistill" if plugin else "",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # answers go to the other
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",  # vLLM's n-gram sets OpenMP's threads to these
            "HF_HUB_OFFLINE": "1",
        }

    def serve(self, jobs: list[Job], streams: int, is_stock: bool = False) -> dict[str, Any]:
        """Seconds, and each job's tokens and passes.

        Args:
            jobs: In the order in which they begin.
            streams: Jobs at a time, at most.
            is_stock: Draw as vLLM does, though the plugin is there; for engines without drafts.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = {"streams": streams, "is_stock": is_stock}
        line = json.dumps({"jobs": [asdict(job) for job in jobs], **asked})
        print(line, file=self.process.stdin, flush=True)
        for said in self.process.stdout:
            if said.startswith("@"):
                return json.loads(said[1:])
        raise SystemExit("error: the engine ended; run with VLLM_LOGGING_LEVEL=INFO to see why")

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def worker(
    teacher: str, drafts: dict[str, Any] | None, drafter: str, options: dict[str, Any]
) -> None:
    """Serve what comes line by line; runs in the engine's environment."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    preempted, preempt = 0, Scheduler._preempt_request

    def counted(*given: Any, **named: Any) -> None:
        nonlocal preempted
        preempted += 1
        preempt(*given, **named)

    Scheduler._preempt_request = counted
    engine = LLM(
        teacher,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=16,
        gpu_memory_utilization=0.1,
        speculative_config=drafts,
        additional_config={"gdistill_drafter": drafter} if drafter else {},
        **options,
    ).llm_engine
    number, sample = 0, GPUModelRunner._sample
    for line in sys.stdin:
        asked = json.loads(line)
        GPUModelRunner._sample = inspect.unwrap(sample) if asked["is_stock"] else sample
        jobs, begun, cpu = asked["jobs"], time.perf_counter(), time.process_time()
        rows = [{"tokens": [], "passes": 0, "cached": 0} for _ in jobs]
        preempted = 0
        waiting, running = list(range(len(jobs))), {}
        while waiting or running:
            while waiting and len(running) < asked["streams"]:
                index, number = waiting.pop(0), number + 1
                job = jobs[index]
                running[str(number)] = index
                params = SamplingParams(
                    temperature=job["temperature"],
                    top_p=job["top_p"],
                    seed=job["seed"],
                    max_tokens=job["max_tokens"],
                    ignore_eos=True,
                    output_kind=RequestOutputKind.DELTA,
                )
                engine.add_request(str(number), job["prompt"], params)
            for out in engine.step():
                index = running[out.request_id]
                row, leave_at = rows[index], jobs[index]["cancel_after"]
                row["tokens"] += out.outputs[0].token_ids
                row["passes"] += 1
                row["cached"] = out.num_cached_tokens or 0
                if leave_at is not None and len(row["tokens"]) >= leave_at and not out.finished:
                    engine.abort_request([out.request_id])
                    del running[out.request_id]
                elif out.finished:
                    del running[out.request_id]
        seconds = time.perf_counter() - begun
        said = {"seconds": seconds, "cpu_seconds": time.process_time() - cpu, "rows": rows}
        said["preempted"] = preempted
        print("@" + json.dumps(said), flush=True)


def speed(engines: dict[str, Engine]) -> dict[str, Any]:
    """All engines in turns, every number of streams."""
    found: dict[str, Any] = {}
    for streams in STREAMS:
        jobs = [Job(PROMPTS[i % len(PROMPTS)], 1000 + i) for i in range(2 * streams)]
        for engine in engines.values():
            engine.serve(jobs, streams)  # what is compiled and cached at first is nobody's speed
        said: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        for _ in range(REPEATS):
            for name, engine in engines.items():
                said[name].append(engine.serve(jobs, streams))
        for name, turns in said.items():
            times, busy = ([turn[key] for turn in turns] for key in ("seconds", "cpu_seconds"))
            num_tokens = len(jobs) * MAX_TOKENS
            figures = found.setdefault(name, {})[str(streams)] = {
                "tokens_per_pass": tokens_per_pass(turns[-1]["rows"]),
                "tokens_per_second": num_tokens / median(times),
                "all_seconds": times,
                "all_cpu_seconds": busy,
                "cpu_ms_per_token": 1e3 * min(busy) / num_tokens,
            }
            typer.echo(
                f"{name}, {streams} streams: {figures['tokens_per_second']:.0f} tokens/s, "
                f"{figures['cpu_ms_per_token']:.3f} ms of a core per token, "
                f"{figures['tokens_per_pass']:.3f} tokens per target pass"
            )
    return found


def cost(engine: Engine) -> dict[str, Any]:
    """Processor time with shared noise over that without, turn by turn."""
    found: dict[str, Any] = {}
    for streams, turns in COST_TURNS.items():
        jobs = [Job(PROMPTS[i % len(PROMPTS)], 1000 + i, max_tokens=60) for i in range(streams)]
        ratios, busy = [], {True: [], False: []}
        for turn in range(2 + turns):
            for is_stock in (turn % 2 == 0, turn % 2 == 1):
                said = engine.serve(jobs, streams, is_stock)
                if turn > 1:  # what is compiled and cached at first is nobody's cost
                    busy[is_stock].append(said["cpu_seconds"])
            if turn > 1:
                ratios.append(busy[False][-1] / busy[True][-1])
        error = 1.25 * stdev(ratios) / turns**0.5
        found[str(streams)] = {
            "turns": turns,
            "median_cost": median(ratios) - 1,
            "standard_error": error,
            "stock_ms_per_token": 1e3 * median(busy[True]) / (60 * streams),
            "ms_per_token": 1e3 * median(busy[False]) / (60 * streams),
        }
        typer.echo(f"{streams} streams: {median(ratios) - 1:+.1%}, standard error {error:.1%}")
    return found


def tokens_per_pass(rows: list[dict[str, Any]]) -> float:
    """Without the pass that reads the prompt: nothing was drafted for it."""
    tokens = sum(len(row["tokens"]) - 1 for row in rows)
    return tokens / sum(row["passes"] - 1 for row in rows)


def exact(
    reference: Engine, others: dict[str, Engine], num_tokens: int
) -> Iterator[dict[str, Any]]:
    """Tokens that differ from the engine's without drafts; told again after every round."""
    draw = random.Random(0)
    found: dict[str, Any] = {
        name: {"tokens": 0, "differing": 0, "cancelled": 0, "by_cut": {}, "passes": 0}
        for name in others
    }
    number = 0
    while min(figures["tokens"] for figures in found.values()) < num_tokens:
        jobs = []
        for temperature, top_p in CUTS * 8:
            number += 1
            jobs.append(Job(PROMPTS[number % len(PROMPTS)], number, temperature, top_p))
        expected = reference.serve(jobs, 16)["rows"]
        for name, engine in others.items():
            order = draw.sample(range(len(jobs)), len(jobs))
            leaving = {i: draw.randrange(1, MAX_TOKENS) for i in order if draw.random() < 0.1}
            asked = [Job(**{**asdict(jobs[i]), "cancel_after": leaving.get(i)}) for i in order]
            said = engine.serve(asked, draw.randint(1, 16))["rows"]
            figures = found[name]
            figures["cancelled"] += len(leaving)
            for i, row in zip(order, said, strict=True):
                pairs = zip(row["tokens"], expected[i]["tokens"], strict=False)
                differing = sum(one != other for one, other in pairs)
                cut = f"T {jobs[i].temperature:g}, nucleus {jobs[i].top_p:g}"
                figures["by_cut"][cut] = figures["by_cut"].get(cut, 0) + differing
                figures["differing"] += differing
                figures["tokens"] += len(row["tokens"])
                figures["passes"] += row["passes"]
            typer.echo(f"{name}: {figures['differing']} of {figures['tokens']} tokens differ")
        yield found


def own(student: Path, teacher: str, lookahead: int, engine: Engine) -> dict[str, Any]:
    """The engine beside our own coupled sampler: one student, one noise, at temperature 1."""
    import torch
    from transformers import AutoTokenizer

    from shards.noise.kinds import KeyedPrior
    from shards.noise.murmur3 import EngineKeys
    from trainer.loading import load_student
    from trainer.sampling.coupled import CoupledSampler
    from trainer.sampling.own_backbone import MedusaSampler
    from trainer.students.medusa import Medusa

    model, words = load_student(student), AutoTokenizer.from_pretrained(teacher)
    length, mask = model.config.row_length, model.mask_id
    sampler: Any = CoupledSampler(verifier=teacher, max_lookahead=lookahead)
    if isinstance(model, Medusa):
        sampler = MedusaSampler(max_lookahead=lookahead)
    tokens, jobs = torch.full((OWN_ROWS, length), mask), []
    for row in range(OWN_ROWS):
        prompt = words(PROMPTS[row % len(PROMPTS)])["input_ids"]
        tokens[row, : len(prompt)] = torch.tensor(prompt)
        jobs.append(Job(PROMPTS[row % len(PROMPTS)], row, max_tokens=length - len(prompt)))
    rows = torch.arange(OWN_ROWS)
    keys = EngineKeys(rows.repeat_interleave(length), torch.arange(length).repeat(OWN_ROWS))
    noise = KeyedPrior(keys, model.config.vocab_size)
    ours = sampler.sample(model, tokens, rows, noise, 0)
    said = engine.serve(jobs, 16)["rows"]
    filled = (tokens == mask).sum(dim=1)
    pairs = zip(said, ours.tokens, strict=True)
    served = [(torch.tensor(row["tokens"]), mine[-len(row["tokens"]) :]) for row, mine in pairs]
    num_tokens, passes = int(filled.sum()), int(ours.details["verifier_nfe"].sum())
    # Heads propose nothing before the first pass, here and there.
    first = OWN_ROWS if isinstance(model, Medusa) else 0
    found = {
        "tokens": num_tokens,
        "differing": sum(int((one != other).sum()) for one, other in served),
        "tokens_per_pass": tokens_per_pass(said),
        "ours": (num_tokens - first) / (passes - first),
    }
    typer.echo(f"student: {found}")
    return found


def altered(engine: Engine, teacher: str) -> dict[str, Any]:
    """Whether one altered token of all that were served is found.

    Half of the alterations are any other token, half the most probable other one: the likeliest to
    be taken for right.
    """
    import torch
    from transformers import AutoTokenizer

    from evaluation.served_certificate import Answer, certify_answers
    from shards.language_model.loading import find_pretrained, load_causal_model

    words, files = AutoTokenizer.from_pretrained(teacher), find_pretrained(teacher)
    model, size = load_causal_model(files).network, files.num_logits
    jobs = [Job(PROMPTS[i % len(PROMPTS)], 5000 + i, *CUTS[i % len(CUTS)]) for i in range(SERVED)]
    answers = [
        Answer(
            name=f"answer {job.seed}",
            prompt=words(job.prompt)["input_ids"],
            tokens=row["tokens"],
            temperature=job.temperature,
            top_p=job.top_p,
            seed=job.seed,
            noise="murmur3",
        )
        for job, row in zip(jobs, engine.serve(jobs, 16)["rows"], strict=True)
    ]
    whole, pick = certify_answers(answers, model, size), random.Random(0)
    found: dict[str, Any] = {
        "tokens": sum(verdict.num_tokens for verdict in whole.verdicts),
        "agreeing": sum(verdict.num_agreeing for verdict in whole.verdicts),
        "ties": sum(verdict.num_ties for verdict in whole.verdicts),
        "any other token": {"altered": 0, "found": 0, "missed": 0},
        "the most probable other token": {"altered": 0, "found": 0, "missed": 0},
    }
    for number in range(ALTERED):
        answer = pick.choice(answers)
        place, tokens = pick.randrange(len(answer.tokens)), list(answer.tokens)
        kind = "any other token"
        tokens[place] = (tokens[place] + pick.randrange(1, size)) % size
        if number % 2:
            kind, ids = "the most probable other token", answer.prompt + answer.tokens[:place]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1, :size]
            logits[answer.tokens[place]] = -torch.inf
            tokens[place] = int(logits.argmax())
        # The others are judged by passes of their own, which this one does not change.
        verdict = certify_answers([replace(answer, tokens=tokens)], model, size).verdicts[0]
        is_found = verdict.first is not None and verdict.first[:2] == (place, tokens[place])
        found[kind]["altered"] += 1
        found[kind]["found"] += is_found
        found[kind]["missed"] += not is_found
    typer.echo(f"altered: {found}")
    return found


def main(
    engine: Annotated[Path, typer.Option(help="Environment with vLLM; make engine makes it.")],
    teacher: Annotated[str, typer.Option(help="The model to serve, a folder.")],
    drafter: Annotated[Path | None, typer.Option(help="A student's folder, RUN/model.")] = None,
    lookahead: Annotated[int, typer.Option(help="Tokens that the student drafts.")] = 4,
    out: Annotated[Path, typer.Option(help="Folder for serving.json.")] = Path(
        "benchmarks/results"
    ),
    tokens: Annotated[int, typer.Option(help="Tokens compared, of each kind of drafts.")] = 100_000,
    part: Annotated[str, typer.Option(help="speed, cost, exact, own, altered or all.")] = "all",
) -> None:
    """Measure and write serving.json."""
    import torch  # neither is needed where the engines run

    from benchmarks.measure import machine

    file = out / "serving.json"
    found = json.loads(file.read_text()) if file.exists() else {}

    def write() -> None:
        file.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")

    versions = subprocess.run(
        [engine / "bin" / "python", "-c", VERSIONS],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"},
    ).stdout.split()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    found |= {
        "machine": machine(torch.device("cpu")),
        "commit": commit.strip(),
        "vllm": versions[-2],
        "torch": versions[-1],
        "teacher": Path(teacher).name,
    }
    if part in ("altered", "all"):
        serving = Engine(engine, teacher, True, NGRAM)
        found["altered"] = altered(serving, teacher)
        serving.close()
        write()
    if part == "altered":
        return
    plain = Engine(engine, teacher, plugin=True)
    if part in ("cost", "all"):
        found["cost"] = {**cost(plain), "commit": commit.strip()}
        write()
    if part == "cost":
        plain.close()
        return
    drafting = {"n-gram": Engine(engine, teacher, True, NGRAM)}
    if drafter is not None:
        drafts = {**STUDENT, "num_speculative_tokens": lookahead}
        drafting["student"] = Engine(engine, teacher, True, drafts, drafter)
    if part in ("speed", "all"):
        stock = Engine(engine, teacher, plugin=False)
        found["speed"] = speed({"stock": stock, "shared noise": plain, **drafting})
        stock.close()
    if part in ("exact", "all"):
        for said in exact(plain, {"no drafts, again": plain, **drafting}, tokens):
            found["exact"] = found.get("exact", {}) | said
            write()
    if part in ("own", "all") and drafter is not None:
        found["own"] = own(drafter, teacher, lookahead, drafting["student"])
    for other in (plain, *drafting.values()):
        other.close()
    write()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(
            sys.argv[2],
            json.loads(sys.argv[3]),
            sys.argv[4],
            json.loads(sys.argv[5] if sys.argv[5:] else "{}"),
        )
    else:
        typer.run(main)
