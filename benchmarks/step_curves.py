"""Tokens per second of a step against slots, response length, teachers and model size; and its products alone.

    python benchmarks/step_curves.py                 # on a GPU, about 180 s: benchmarks/results/step-curves.json
    python benchmarks/step_curves.py --plot          # docs/figures/step-curves.svg and step.svg, from results

Models have the shapes of `step_gpu.py`, with random weights. Student and teacher are of one shape, 135M where the size is
not what is varied. "products" replays the matrix products of the case `equal` and nothing else, so that a phase can be held
against what the device does at its best.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from runs import FIGURES, RESULTS, save
from step_gpu import CASES, SHAPES, Case, Phases, open_stage

SHAPES["1.7B"] = SHAPES["0.6B"] | {"hidden_size": 2048, "intermediate_size": 6144}
BASE = Case("135M", "135M", 64, (128, 128), 64)
CURVES: dict[str, list[tuple[float, Case, list[str]]]] = {
    "slots": [(slots, replace(BASE, prompts=256), [f"sampler.slots={slots}"]) for slots in (8, 32, 64, 128, 256)],
    "new tokens of an answer": [(count, replace(BASE, new_tokens=count), []) for count in (32, 128, 512, 1024)],
    "teachers": [(count, replace(BASE, new_tokens=16, teachers=count), []) for count in (1, 2, 4, 8)],
    "parameters, millions": [
        (millions, replace(BASE, student=shape, teacher=shape), [])
        for millions, shape in ((135, "135M"), (600, "0.6B"), (1700, "1.7B"), (4000, "4B"))
    ],
}
SMALLEST: dict[str, list[tuple[float, Case, list[str]]]] = {"teachers": [(2, CASES["tiny"], [])]}
PLOTTED = {"slots": ("sample",), "new tokens of an answer": ("sample", "update"), "teachers": ("score", "total"),
           "parameters, millions": ("sample", "score", "update", "total")}  # fmt: skip


def measure(case: Case, settings: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from opd.loop.step import run_step

    phases = Phases(arguments.device)
    given = argparse.Namespace(models=arguments.models, device=arguments.device, set=settings)
    with tempfile.TemporaryDirectory() as directory:
        run = open_stage(case, Path(directory), given, phases)
        samples, tokens = [], 0
        for step in range(1, arguments.warm + 2):
            phases.reset()
            tokens = run_step(run, step).metrics["tokens"]
            samples.append(phases.result())
    del run
    gc.collect()
    if arguments.device != "cpu":
        torch.cuda.empty_cache()
    return {"tokens": tokens, "rollouts": case.prompts, **samples[-1]}


def products(case: Case, tokens: int) -> dict[str, float]:
    """Seconds of the matrix products of each phase, replayed one after the other: a graph per shape, the fastest of three."""
    student, teacher = SHAPES[case.student], SHAPES[case.teacher]
    length = tokens // case.prompts  # prompt and response
    new = case.new_tokens * case.prompts
    decode = case.new_tokens * (_passes(student, case.prompts) + _head(student, case.prompts))
    forward = _passes(student, tokens) + _head(student, new)
    return {
        "sample": decode + _passes(student, case.prompts * (length - case.new_tokens)),
        "score": _passes(teacher, tokens),
        "update": 3 * forward + _head(teacher, new),
    }


def _passes(shape: dict[str, Any], rows: int) -> float:
    width, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    each = shape.get("head_dim", width // heads)
    one = sum(
        _time(rows, k, n)
        for k, n in (
            (width, (heads + 2 * shape["num_key_value_heads"]) * each),
            (heads * each, width),
            (width, 2 * inner),
            (inner, width),
        )
    )
    return shape["num_hidden_layers"] * one


def _head(shape: dict[str, Any], rows: int) -> float:
    return _time(rows, shape["hidden_size"], shape["vocab_size"], most=1024)


def _time(rows: int, k: int, n: int, most: int = 32_768) -> float:
    """Of (rows, k) @ (k, n) in bf16; many rows are cut into pieces, as a step cuts them."""
    import torch

    piece = min(rows, most)
    left, right = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((piece, k), (k, n)))
    out = torch.empty(piece, n, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        torch.mm(left, right, out=out)
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(10):
            torch.mm(left, right, out=out)
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) / 10)
    return min(times) * rows / piece


def plot(found: dict[str, Any]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "opd"})
    figure, axes = plt.subplots(1, len(found["curves"]), figsize=(3.4 * len(found["curves"]), 3.1), squeeze=False)
    for axis, (name, points) in zip(axes[0], found["curves"].items(), strict=True):
        for phase in PLOTTED.get(name, ("total",)):
            rates = [point["tokens"] / point["seconds"][phase] for point in points]
            axis.plot([point["x"] for point in points], rates, marker="o", label=phase)
        axis.set(xscale="log", yscale="log", xlabel=name)
        axis.set_xticks([point["x"] for point in points], [f"{point['x']:g}" for point in points])
        axis.xaxis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("new tokens per second")
    figure.tight_layout()
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / "step-curves.svg", metadata={"Date": None})


def plot_step(phases: dict[str, dict[str, float]]) -> None:
    """Rows of a step, each split by phase."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.5 + 0.55 * len(phases)))
    for place, seconds in enumerate(phases.values()):
        left = 0.0
        for phase, colour in (("sample", "tab:blue"), ("score", "tab:orange"), ("update", "tab:green")):
            axis.barh(place, seconds[phase], left=left, color=colour, label=None if place else phase)
            left += seconds[phase]
        axis.text(left + 0.05, place, f"{left:.1f} s", va="center", fontsize=9)
    axis.set_yticks(range(len(phases)), phases)
    axis.set(xlabel="seconds per step", xlim=(0, 1.08 * max(sum(one.values()) for one in phases.values())))
    axis.invert_yaxis()
    axis.legend(frameon=False, fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(FIGURES / "step.svg", metadata={"Date": None})


def step_phases() -> dict[str, dict[str, float]]:
    """Measured steps of the 0.6B student and its 4B teacher, and the matrix products of the first."""
    step, lora, curves = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("step-cuda", "step-lora-cuda", "step-curves")
    )
    rows = {
        "512 new tokens each": step["cases"]["equal"]["seconds"],
        "matrix products of that step": curves["products"],
        "long-tailed answers": step["cases"]["ragged"]["seconds"],
        "LoRA within 24 GiB": lora["runs"]["32 slots, micro-batches of 4,096 tokens"]["cases"]["lora"]["seconds"],
    }
    return {name: {phase: found[phase] for phase in ("sample", "score", "update")} for name, found in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--warm", type=int, default=2, help="steps of each point that are left out")
    parser.add_argument("--models", type=Path, help="where random models are kept; default: made anew")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--plot", action="store_true", help="draw what was measured, and measure nothing")
    arguments = parser.parse_args()
    path = RESULTS / "step-curves.json"
    found: dict[str, Any]
    if arguments.plot:
        found = json.loads(path.read_text(encoding="utf-8"))
        plot(found)
        plot_step(step_phases())
        return
    found = {"device": arguments.device, "curves": {}, "products": {}}
    if len(arguments.curves) < len(CURVES) and path.is_file():  # the others stay as they were measured
        found["curves"] = json.loads(path.read_text(encoding="utf-8"))["curves"]
    if arguments.device != "cpu":
        import torch

        found["device"] = torch.cuda.get_device_name()
        case = CASES["equal"]
        repeats = [products(case, case.prompts * (case.prompt_tokens[1] + case.new_tokens)) for _ in range(2)]
        found["products"] = {phase: statistics.median(one[phase] for one in repeats) for phase in repeats[0]}
        print("products of the case equal", found["products"], flush=True)
    for name, points in (SMALLEST if arguments.smallest else {name: CURVES[name] for name in arguments.curves}).items():
        curve = found["curves"][name] = []
        for x, case, settings in points:
            curve.append({"x": x, **measure(case, settings, arguments)})
            print(name, x, curve[-1]["tokens"], curve[-1]["seconds"], flush=True)
            save(path.name, found)


if __name__ == "__main__":
    main()
