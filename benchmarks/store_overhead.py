"""What the store costs the sampler: CPU time of sampling SmolLM2 with and without writing every token to the log.

    OMP_NUM_THREADS=1 python benchmarks/store_overhead.py          needs `make smol`

Ten alternating pairs of the same requests: temperature 1, group commit of 50 ms and the sync thread on, as in the quickstart; the
run with the store also reads its rollouts back, as a step does. Two numbers. `paired`: process CPU with the store over without.
`direct`: CPU inside the store's calls plus that of its thread, over the rest; it does not feel the noise of the machine.
Writes benchmarks/results/store-overhead-cpu.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from opd.data.prompts import render_prompt
from opd.data.sources import open_source, prompt_source
from opd.engines.builtin import Engine
from opd.engines.kinds import BuiltInSampler
from opd.engines.requests import request_key
from opd.models import load_model
from opd.recipe import Store
from opd.records import SampledToken, SampleRequest, Sampling
from opd.store import RolloutStore

RESULTS = Path(__file__).parent / "results"
LIMIT = 0.03


def make_requests(tokenizer: Any, count: int, new: int) -> list[SampleRequest]:
    source, sampling = open_source(prompt_source("task:sort")), Sampling(new)
    prompts = [source.train(index) for index in range(count)]
    return [
        SampleRequest(prompt.id, render_prompt(prompt, tokenizer), request_key(0, prompt.id, 0, 0), sampling)
        for prompt in prompts
    ]


def without_store(engine: Engine, requests: list[SampleRequest]) -> int:
    return sum(isinstance(event, SampledToken) for event in engine.sample(requests))


class Clock:
    """CPU of this thread spent inside the store."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        result = call(*args, **kwargs)
        self.seconds += time.thread_time() - start
        return result


def with_store(engine: Engine, requests: list[SampleRequest], directory: Path) -> tuple[int, float, int]:
    """(tokens, CPU seconds of the store, bytes in its log)."""
    settings, clock, count = Store(), Clock(), 0
    store = clock(RolloutStore, directory, commit_ms=settings.commit_ms, fsync=settings.fsync, hidden=settings.hidden)
    for request in requests:
        clock(store.begin, id=request.id, prompt_id=request.id, visit=0, sample=0, domain="sorting", source="student", group=request.id,
              prompt_ids=request.prompt_ids)  # fmt: skip
    for event in engine.sample(requests):
        if isinstance(event, SampledToken):
            clock(store.append, event)
            count += 1
        else:
            clock(store.finish, event.request_id, event.stop)
    clock(store.commit, sync=True)
    rollouts = clock(store.load, [request.id for request in requests])
    assert sum(rollout.response_ids.size for rollout in rollouts) == count
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "opd-store"]
    assert thread.ident is not None
    in_thread = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    clock(store.close)
    size = sum(path.stat().st_size for path in directory.glob("segment-*.log"))
    return count, clock.seconds + in_thread, size


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = load_model(args.model)
    requests = make_requests(model.tokenizer, args.requests, args.new_tokens)
    longest = max(request.prompt_ids.size for request in requests)
    engine = Engine(model, BuiltInSampler(), longest + args.new_tokens, merge_stop=model.stop_ids)
    without_store(engine, requests[:2])
    pairs = []
    for pair in range(args.pairs):
        seconds: dict[str, float] = {}
        for which in ("without", "with") if pair % 2 else ("with", "without"):
            start = time.process_time()
            if which == "without":
                without_store(engine, requests)
            else:
                with tempfile.TemporaryDirectory() as name:
                    tokens, own, size = with_store(engine, requests, Path(name) / "log")
            seconds[which] = time.process_time() - start
        pairs.append({
            "with_s": round(seconds["with"], 3), "without_s": round(seconds["without"], 3), "store_s": round(own, 4),
            "paired": round(seconds["with"] / seconds["without"] - 1, 5), "direct": round(own / (seconds["with"] - own), 5),
        })  # fmt: skip
        print(json.dumps(pairs[-1]), flush=True)
    paired, direct = ([pair[name] for pair in pairs] for name in ("paired", "direct"))
    return {
        "model": f"{args.model}, fp32, one thread", "requests": args.requests, "tokens": tokens, "log_bytes": size,
        "settings": vars(engine.settings), "store": Store().model_dump(), "pairs": pairs,
        "paired_median": round(statistics.median(paired), 5), "paired_mean": round(statistics.mean(paired), 5),
        "paired_stderr": round(statistics.stdev(paired) / len(paired) ** 0.5, 5),
        "direct_median": round(statistics.median(direct), 5), "direct_worst": max(direct),
        "store_us_per_token": round(1e6 * statistics.median(pair["store_s"] for pair in pairs) / tokens, 1), "limit": LIMIT,
        "within_limit": statistics.median(paired) < LIMIT and max(direct) < LIMIT,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smol")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    numbers = measure(parser.parse_args())
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    machine = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("Model name")), platform.machine()
    )
    record = {
        "machine": machine, "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "command": f"python {' '.join(sys.argv)}", **numbers,
    }  # fmt: skip
    path = RESULTS / "store-overhead-cpu.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
