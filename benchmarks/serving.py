"""Shared noise in a real vLLM on record: exactness, tokens per target pass, speed.

    python -m benchmarks.serving --engine .vllm --teacher ../shared/data/stories3M \
        [--drafter RUN/model] [--out benchmarks/results] [--tokens 100000]

Engines run beside each other, each in a process of the environment ``--engine``, and are asked in
turns: the stock one, the one with the plugin and no drafts, and with drafts of vLLM's n-gram and of
a student:

- ``speed``: tokens per second at 1, 4, 16 streams, and tokens per target pass;
- ``exact``: requests at temperature 0, 0.7 and 1, with and without nucleus, 1 to 16 streams at a
  time, in another order than the engine without drafts got them, one in ten cancelled: how many of
  their tokens differ.

Writes ``serving.json``; what it holds of earlier measurements stays.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
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
NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
NGRAM |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
STUDENT = {"method": "custom_class", "model": "trainer.serving.drafters.StudentDrafter"}
MAX_TOKENS = 100
ASKED = ("temperature", "top_p", "seed", "max_tokens")
VERSIONS = "import torch, vllm; print(vllm.__version__, torch.__version__)"


@dataclass
class Job:
    """One request; its caller leaves after ``cancel_after`` tokens, where that is set."""

    prompt: str | dict[str, list[int]]
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = MAX_TOKENS
    cancel_after: int | None = None


class Engine:
    """An engine in a process of its own, in the environment ``place``.

    With ``plugin`` it draws from shared noise. ``drafts`` is vLLM's ``speculative_config``,
    ``drafter`` a student's folder for our own class of drafter.
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
        command = [str(place / "bin" / "python"), "-m", "benchmarks.serving", "worker", teacher]
        command += [json.dumps(drafts), str(drafter or ""), json.dumps(options or {})]
        settings, pipe = {**os.environ, **self.settings(plugin)}, subprocess.PIPE
        self.process = subprocess.Popen(command, env=settings, stdin=pipe, stdout=pipe, text=True)

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

    def serve(self, jobs: list[Job], streams: int) -> dict[str, Any]:
        """Seconds, and the tokens and passes of each job; ``streams`` jobs at a time, at most."""
        assert self.process.stdin is not None and self.process.stdout is not None
        line = json.dumps({"jobs": [asdict(job) for job in jobs], "streams": streams})
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


def worker(teacher: str, drafts: dict[str, Any] | None, drafter: str, options: dict[str, Any]) -> None:
    """Serve what comes line by line; runs in the engine's environment."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.core.sched.scheduler import Scheduler

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
    number = 0
    for line in sys.stdin:
        asked = json.loads(line)
        jobs, begun, cpu = asked["jobs"], time.perf_counter(), time.process_time()
        rows = [{"tokens": [], "passes": 0, "cached": 0} for _ in jobs]
        preempted = 0
        waiting, running = list(range(len(jobs))), {}
        while waiting or running:
            while waiting and len(running) < asked["streams"]:
                index, number = waiting.pop(0), number + 1
                running[str(number)] = index
                given = {name: jobs[index][name] for name in ASKED}
                given |= {"ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
                params = SamplingParams(**given)
                engine.add_request(str(number), jobs[index]["prompt"], params)
            for out in engine.step():
                index = running[out.request_id]
                row, leave_at = rows[index], jobs[index]["cancel_after"]
                row["tokens"] += out.outputs[0].token_ids
                row["passes"] += 1
                row["cached"] = out.num_cached_tokens or 0
                leaves = leave_at is not None and len(row["tokens"]) >= leave_at
                if leaves and not out.finished:
                    engine.abort_request([out.request_id])
                if leaves or out.finished:
                    del running[out.request_id]
        said = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - cpu}
        print("@" + json.dumps({**said, "rows": rows, "preempted": preempted}), flush=True)


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


def tokens_per_pass(rows: list[dict[str, Any]]) -> float:
    """Without the pass that reads the prompt: nothing was drafted for it."""
    tokens = sum(len(row["tokens"]) - 1 for row in rows)
    return tokens / sum(row["passes"] - 1 for row in rows)


def exact(reference: Engine, others: dict[str, Engine], num_tokens: int) -> Iterator[dict[str, Any]]:
    """Tokens that differ from the engine's without drafts; told again after every round."""
    draw = random.Random(0)
    found: dict[str, Any] = {
        name: {"tokens": 0, "differing": 0, "cancelled": 0, "by_cut": {}, "passes": 0} for name in others
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


def main(
    engine: Annotated[Path, typer.Option(help="Environment with vLLM; make engine makes it.")],
    teacher: Annotated[str, typer.Option(help="The model to serve, a folder.")],
    drafter: Annotated[Path | None, typer.Option(help="A student's folder, RUN/model.")] = None,
    lookahead: Annotated[int, typer.Option(help="Tokens that the student drafts.")] = 4,
    out: Annotated[Path, typer.Option(help="Of serving.json.")] = Path("benchmarks/results"),
    tokens: Annotated[int, typer.Option(help="Tokens compared, of each kind of drafts.")] = 100_000,
) -> None:
    """Measure and write serving.json."""
    import torch  # neither is needed where the engines run

    from benchmarks.measure import machine

    file = out / "serving.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    quiet = {**os.environ, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    asked = [engine / "bin" / "python", "-c", VERSIONS]
    versions = subprocess.check_output(asked, text=True, env=quiet).split()
    about = machine(torch.device("cpu"))
    found |= {"machine": about, "commit": about["commit"], "teacher": Path(teacher).name}
    found |= {"vllm": versions[-2], "torch": versions[-1]}
    plain = Engine(engine, teacher, plugin=True)
    drafting = {"n-gram": Engine(engine, teacher, True, NGRAM)}
    if drafter is not None:
        drafts = {**STUDENT, "num_speculative_tokens": lookahead}
        drafting["student"] = Engine(engine, teacher, True, drafts, drafter)
    stock = Engine(engine, teacher, plugin=False)
    found["speed"] = speed({"stock": stock, "shared noise": plain, **drafting})
    stock.close()
    for said in exact(plain, {"no drafts, again": plain, **drafting}, tokens):
        found["exact"] = said
        file.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    for other in (plain, *drafting.values()):
        other.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        options = json.loads(sys.argv[5]) if sys.argv[5:] else {}
        worker(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], options)
    else:
        typer.run(main)
