"""Where the CPU time of the step of `step.py` goes, phase by phase, beside what its products and bytes cost at least.

    python benchmarks/step_profile.py        # writes benchmarks/results/step-profile-ARCHITECTURE-cpu.json

One thread, fp32. The floor has products at the rate of large ones and bytes at the speed of a plain sum, both measured in the
same run: prompts are products; a decode step reads every weight once or multiplies by it, whichever takes longer; scoring is the
teacher's layers; the update is the student's, three times, both heads' products and their gradient, and 28 bytes per weight for
AdamW. Keys, values and everything that goes element by element cost nothing there. `operations` are of one more step, which is
recorded and therefore slower: seconds by kind, and what lies outside of all of them, which is Python and dispatching.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from runs import save
from step import PHASES, SMOL_SHAPE, Job, one_thread, open_stage, prepare

KINDS = {  # of operations, by what their names contain; the first that fits
    "attention": ("scaled_dot_product",),
    "packing of weights": ("reorder_linear_weight", "prepack"),
    "products": ("::mm", "::addmm", "::bmm", "::baddbmm", "mkl_linear", "mkldnn", "::linear"),
    "AdamW": ("adamw",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=SMOL_SHAPE["num_hidden_layers"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=3, help="measured; one before is left out, one behind is recorded")
    parser.add_argument("--micro-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    one_thread()
    with tempfile.TemporaryDirectory() as directory:
        job = prepare(arguments, "random", Path(directory), {})
        rate, bandwidth = speed_of_products(), speed_of_memory()
        seconds, operations = measure(job)
    rate, bandwidth = max(rate, speed_of_products()), max(bandwidth, speed_of_memory())
    least = floor(job, arguments.layers, rate, bandwidth)
    found: dict[str, dict[str, Any]] = {
        phase: {"seconds": seconds[phase], "floor": least[phase], "operations": operations[phase]} for phase in PHASES
    }
    for phase, entry in found.items():
        print(f"{phase:7} {entry['seconds']:6.2f} s, floor {entry['floor']:5.2f}")
        for kind, spent in sorted(entry["operations"].items(), key=lambda item: -item[1]):
            print(f"        {spent:6.2f} {kind}")
    speeds = {"products, GFLOP/s": rate / 1e9, "memory, GB/s": bandwidth / 1e9}
    print({name: round(value, 1) for name, value in speeds.items()})
    save(
        f"step-profile-{platform.machine()}-cpu.json", {"settings": vars(arguments), "speeds": speeds, "phases": found}
    )


def floor(job: Job, layers: int, rate: float, bandwidth: float) -> dict[str, float]:
    """Seconds by phase that products and weights alone would take."""
    width, middle, vocabulary = (int(SMOL_SHAPE[key]) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = width * int(SMOL_SHAPE["num_key_value_heads"]) // int(SMOL_SHAPE["num_attention_heads"])
    body = layers * (2 * width * width + 2 * width * keys + 3 * width * middle)
    head = width * vocabulary
    prompts, answers = sum(map(len, job.lengths)), list(job.lengths.values())
    forward = 2 * body * (prompts + sum(answers)) / rate
    sample = 2 * body * prompts / rate
    for position in range(max(answers)):
        rows = sum(length > position for length in answers)
        sample += (body + head) * max(2 * rows / rate, 4 / bandwidth)
    # The teacher's logits and the student's, and the gradients of states and head.
    heads = 4 * 2 * head * sum(answers) / rate
    return {"sample": sample, "score": forward, "update": 3 * forward + heads + 28 * (body + head) / bandwidth}


def speed_of_products() -> float:
    """FLOPs per second of large ones."""
    import torch

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / least_seconds(lambda: torch.mm(a, b))


def speed_of_memory() -> float:
    """Bytes per second of reading what no cache holds."""
    import torch

    values = torch.ones(1 << 27)
    return 4 * values.numel() / least_seconds(values.sum)


def least_seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    call()
    found = []
    for _ in range(repeats):
        begun = time.process_time()
        call()
        found.append(time.process_time() - begun)
    return min(found)


def measure(job: Job) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """CPU seconds by phase, medians of plain steps; and those of one that is recorded, by kind of operation."""
    from torch.profiler import ProfilerActivity, profile

    from opd.loop.step import run_step

    marks: list[tuple[str, float]] = []
    run = open_stage(job, lambda phase: marks.append((phase, time.process_time())))
    plain = []
    for step in range(1, job.steps + 1):
        marks.clear()
        run_step(run, step)
        plain.append(by_phase([*marks, ("end", time.process_time())]))
    recorded: dict[str, dict[str, float]] = {phase: defaultdict(float) for phase in PHASES}
    running: list[Any] = []

    def stop() -> None:
        for phase, begun, recorder in running:
            spent = time.process_time() - begun
            recorder.stop()
            for event in recorder.key_averages():
                recorded[phase][kind_of(event.key)] += event.self_cpu_time_total / 1e6
            recorded[phase]["outside of operations"] += spent - sum(
                event.self_cpu_time_total for event in recorder.key_averages()
            ) / 1e6  # fmt: skip
        running.clear()

    def start(phase: str) -> None:
        stop()
        if phase in PHASES:
            recorder = profile(activities=[ProfilerActivity.CPU])
            recorder.start()
            running.append((phase, time.process_time(), recorder))

    run.on_phase = start
    run_step(run, job.steps + 1)
    stop()
    return {phase: median(one[phase] for one in plain[1:]) for phase in PHASES}, recorded


def by_phase(marks: list[tuple[str, float]]) -> dict[str, float]:
    """A phase lasts until the next begins; what is rewarded belongs to sampling."""
    found = dict.fromkeys(PHASES, 0.0)
    for (phase, begun), (_, ended) in pairwise(marks):
        found[phase if phase in found else "sample"] += ended - begun
    return found


def kind_of(operation: str) -> str:
    return next(
        (kind for kind, names in KINDS.items() if any(name in operation for name in names)), "element by element"
    )


if __name__ == "__main__":
    main()
