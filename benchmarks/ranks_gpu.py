"""A step in one process beside a step on ranks of FSDP2: seconds and peak memory, and what the plan says about memory.

    python benchmarks/ranks_gpu.py --models DIR
    torchrun --nproc-per-node 1 benchmarks/ranks_gpu.py --models DIR
    torchrun --nproc-per-node 1 benchmarks/ranks_gpu.py --models DIR --both

Models and cases are those of `benchmarks/step_gpu.py`. The first writes `alone`, the second `ranks` into the same file,
benchmarks/results/ranks-cuda.json, and the third both, from one process. What is done, and where every thread stands, goes to
stderr as it happens.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import statistics
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from runs import circumstances
from step_gpu import CASES, RESULTS, ForcedLengths, Phases, lengths, prompt_rows, save_model

from opd.loop.ranks import Ranks
from opd.runner.run import joined


def open_stage(arguments: argparse.Namespace, directory: Path, phases: Phases, world: Any) -> Any:
    from dataclasses import replace

    from opd.common.context import RunContext
    from opd.recipe import load_recipe
    from opd.runner.stage import open_stage as open_parts
    from opd.store import RolloutStore

    case = CASES[arguments.case]
    source = directory / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in prompt_rows(case)), encoding="utf-8")
    recipe = {
        "student": {"model": save_model(case.student, arguments.models, arguments.device)} | case.settings,
        "teachers": {
            f"teacher{number}": {
                "model": save_model(case.teacher, arguments.models, arguments.device),
                "batch_tokens": 16_384,
            }
            for number in range(case.teachers)
        },
        "prompts": str(source),
        "rollout": {"prompts": case.prompts, "max_new_tokens": case.new_tokens},
        "objective": {"form": "direct", "divergence": "reverse_kl"},
        "train": {"steps": 100, "lr": 1e-6, "micro_tokens": 16_384},
        "eval": {"prompts": 0},
        "device": arguments.device,
    }
    run = open_parts(
        load_recipe(recipe, arguments.set).stages[0],
        RolloutStore(directory / "rollouts"),
        context=RunContext(say=lambda line: None, on_phase=phases),
        ranks=world,
    )
    if world.size == 1:  # else each rank has some of the requests, and other lengths would be forced on them
        forced = ForcedLengths(run.engine, lengths(case))
        run.rollouter.context = replace(run.rollouter.context, student=forced)
    return run


def predicted(stage: Any, case: Any, ranks: int, sharded: bool, device: str) -> dict[str, int]:
    """Of the plan, in bytes by part."""
    from opd.cluster.plan import Placement, group_of, rank_memory, task_of
    from opd.runner.cost import DEVICES, Device

    paper = DEVICES["h200"] if device != "cpu" else Device("cpu", 1 << 40, 1e11, 1e10)
    task = task_of(stage, str, {}, paper, max(case.prompt_tokens))
    return rank_memory(task, Placement(True, ranks, group_of(stage, ranks)), sharded)


def say(what: str) -> None:
    print(f"{datetime.now():%H:%M:%S.%f} {what}", file=sys.stderr, flush=True)


def measure(arguments: argparse.Namespace, world: Any, name: str) -> dict[str, Any]:
    """Medians of the measured steps, peak memory, and what the plan says of it."""
    from opd.loop.step import run_step

    phases, samples = Phases(arguments.device), []
    with tempfile.TemporaryDirectory() as directory:
        run = open_stage(arguments, Path(directory), phases, world)
        say(f"{name}: stage is open")
        for step in range(1, arguments.warm + arguments.steps + 1):
            phases.reset()
            run_step(run, step)
            samples.append(phases.result())
            say(f"{name}: step {step}: {json.dumps(samples[-1])}")
        plan = predicted(run.spec, CASES[arguments.case], world.size, world.sharded, arguments.device)
        run.close()
    kept = samples[arguments.warm :]
    return {
        "ranks": world.size,
        "seconds": {key: statistics.median(sample["seconds"][key] for sample in kept) for key in kept[0]["seconds"]},
        "steps": [sample["seconds"] for sample in samples],
        "peak_gib": max(max(sample["peak_gib"].values()) for sample in kept),
        "plan_gib": sum(plan.values()) / 2**30,
        "plan": plan,
    }


def write(out: Path, arguments: argparse.Namespace, name: str, found: dict[str, Any]) -> None:
    before = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    report = circumstances() | {"gpu": gpu} | before | {name: found}
    if report.keys() >= {"alone", "ranks"}:
        report["slower"] = report["ranks"]["seconds"]["total"] / report["alone"]["seconds"]["total"] - 1
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: found["seconds"], "slower": report.get("slower")}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", choices=CASES, default="equal")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe settings")
    parser.add_argument("--models", type=Path, required=True, help="where random models are kept")
    parser.add_argument("--both", action="store_true", help="after the ranks, the leader measures one process, too")
    parser.add_argument("--stacks", type=float, default=20, help="seconds after which every thread says where it is")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.stacks, repeat=True)
    say("torch is imported")
    out = arguments.out or RESULTS / f"ranks-{arguments.device}.json"
    with joined() as world:
        say(f"joined, rank {world.rank} of {world.size}")
        for shape in {CASES[arguments.case].student, CASES[arguments.case].teacher} if world.leads else ():
            save_model(shape, arguments.models, arguments.device)
            say(f"model {shape} is there")
        world.barrier()
        name = "ranks" if world.sharded else "alone"
        found = measure(arguments, world, name)
        if world.leads:
            write(out, arguments, name, found)
    if arguments.both and world.sharded and world.leads:
        gc.collect()
        write(out, arguments, "alone", measure(arguments, Ranks(), "alone"))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
