"""Twelve teachers, two of them in memory: peak memory, time per step and losses against all resident and against one teacher.

    python benchmarks/teacher_pool.py                       # writes benchmarks/results/teacher-pool-cpu.json
    python benchmarks/teacher_pool.py --device cuda         # 0.6B student, 4B teachers: results/teacher-pool-cuda.json

Every arm is a run of the same recipe in a process of its own: `one` sends all domains to one teacher, the others have a teacher per
domain. The rate is so small that all arms draw the same tokens. Models have random weights, made at run
time: time and memory do not depend on what they have learned, and with `--checkpoints N` the disk holds N of them: the other teachers are
copies, which a run loads as teachers of their own. `peak` is the process's own (VmHWM), and on CUDA the allocator's as
well; `seconds` is the median step behind the first, `cpu_seconds` the processor time of all threads between two steps, which does
not feel other work on the machine; `losses` are compared bit for bit.

On CUDA the rate of page-ins (bytes that a step brought in, over the time of its copies) stands beside that of plain pinned copies in
the same process, and `page` is the time in which the GPU had nothing to do but wait for weights. `start_seconds` is what came before the
first step; with `--profile`, ARM-start.txt in the directory says on what it was spent.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from runs import save

SHAPES: dict[str, dict[str, int]] = {
    "cpu": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 64},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
}  # fmt: skip
MEMORY, TIME = 1.3, 1.15  # times one teacher's, at most
PHASES = ("sample", "reward", "score", "update")


def make_model(directory: Path, shape: str, seed: int, dtype: str) -> None:
    """A model of this shape with the tiny models' tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from opd.models.load import tiny_models

    if (directory / "model.safetensors").is_file() or (directory / "model.safetensors.index.json").is_file():
        return
    source = tiny_models()["tiny/generalist"]
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    model_type = raw.pop("model_type")
    config = AutoConfig.for_model(
        model_type, **raw | SHAPES[shape] | {"initializer_range": 0.02, "max_position_embeddings": 4096}
    )
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    module.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, directory / name)
    del module


def copy_model(source: Path, directory: Path) -> None:
    """A teacher of its own, for the run, with the same files: they are linked."""
    if not directory.is_dir():
        shutil.copytree(source, directory, copy_function=os.link)


def recipe(args: argparse.Namespace, models: Path, arm: str) -> dict[str, Any]:
    domains = [f"d{number:02}" for number in range(args.teachers)]
    chosen = {"all": {}, "two": {"resident": 2}, "one-resident": {"resident": 1}, "one": {}}[arm]
    teachers = {name: {"model": str(models / name)} for name in domains}
    if arm == "one":
        teachers = {"teacher": {"model": str(models / domains[0])}}
    pool = chosen | ({"keep": args.keep} if chosen and args.keep else {})
    return {
        "student": str(models / "student"),
        "teachers": teachers,
        **({"pool": pool} if pool else {}),
        "prompts": [{"source": "task:addition", "domain": name} for name in domains],
        "rollout": {"prompts": args.prompts, "samples": 1, "max_new_tokens": args.new_tokens},
        "train": {"steps": args.steps, "micro_tokens": args.micro_tokens, "lr": 1e-9},  # all arms draw the same tokens
        "eval": {"prompts": 0},
        "log": {"samples": 0, "start_table": False},
        "device": args.device,
        **({"threads": args.threads} if args.device == "cpu" else {}),
    }


def run_arm(path: Path, out: Path, result: Path, ends_there: bool, profiled: bool) -> None:
    """In the arm's own process: the run, and what it took: written after every step, so that it is kept if the end fails."""
    import torch

    import opd

    moments: list[float] = []
    steps = yaml.safe_load(path.read_text(encoding="utf-8"))["train"]["steps"]
    facts: dict[str, Any] = {"link_gigabytes_per_second": link()} if torch.cuda.is_available() else {}
    start, profile = time.perf_counter(), cProfile.Profile()

    def on_step(run: Any, metrics: dict[str, Any]) -> None:
        if not moments:
            profile.disable()
            spent = sum(metrics.get(f"time/{name}", 0) for name in PHASES)
            facts["start_seconds"] = round(time.perf_counter() - start - spent, 1)
            if profiled:
                result.with_name(f"{out.name}-start.txt").write_text(told(profile), encoding="utf-8")
        moments.append(time.process_time())
        result.write_text(json.dumps(taken(out, moments) | facts), encoding="utf-8")
        if ends_there and metrics["step"] == steps:
            os._exit(0)

    if profiled:
        profile.enable()
    opd.run(path, out=out, on_step=on_step)
    result.write_text(json.dumps(taken(out, moments) | facts | {"ended": True}), encoding="utf-8")


def told(profile: cProfile.Profile) -> str:
    """What took longest, with what it called."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(60)
    return text.getvalue()


def taken(out: Path, moments: list[float]) -> dict[str, Any]:
    import torch

    spent = [later - earlier for earlier, later in pairwise(moments)]
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    later = lines[1:] or lines
    found = {
        "peak_bytes": peak,
        "seconds": round(statistics.median(sum(line.get(f"time/{name}", 0) for name in PHASES) for line in later), 4),
        "cpu_seconds": round(statistics.median(spent), 4) if spent else None,
        "phases": {
            name: round(statistics.median(line.get(f"time/{name}", 0) for line in later), 4)
            for name in (*PHASES, "page")
        },
        "pages": later[-1].get("pages", 0),
        "page_gigabytes_per_second": later[-1].get("page_rate"),
        "tokens": [line["tokens"] for line in lines],
        "losses": [line["loss"].hex() for line in lines],
    }
    if torch.cuda.is_available():
        found["device_peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def measure(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Arm after arm, what is known so far."""
    models = directory / "models"
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    make_model(models / "student", args.student, 0, dtype)
    for number in range(args.teachers):
        if number < args.checkpoints:
            make_model(models / f"d{number:02}", args.teacher, number + 1, dtype)
        else:
            copy_model(models / f"d{number % args.checkpoints:02}", models / f"d{number:02}")
    found: dict[str, dict[str, Any]] = {}
    for arm in args.arms:
        out, path, result = directory / arm, directory / f"{arm}.yaml", directory / f"{arm}.json"
        shutil.rmtree(out, ignore_errors=True)
        result.unlink(missing_ok=True)
        path.write_text(yaml.safe_dump(recipe(args, models, arm)), encoding="utf-8")
        command = [sys.executable, __file__, "--arm", str(path), str(out), str(result)]
        command += [flag for flag, wanted in (("--unsaved", args.unsaved), ("--profile", args.profile)) if wanted]
        environment = os.environ | ({"OMP_NUM_THREADS": str(args.threads)} if args.device == "cpu" else {})
        environment["PYTHONFAULTHANDLER"] = "1"
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(json.dumps({arm: f"ended with {done.returncode}", "why": done.stderr[-2000:]}), flush=True)
            whole = result.is_file() and len(json.loads(result.read_text(encoding="utf-8"))["losses"]) == args.steps
            if not whole and "memory" in done.stderr:
                continue  # all resident may not fit: that is the point
            if not whole:
                raise RuntimeError(f"{arm}, {done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        found[arm] = json.loads(result.read_text(encoding="utf-8"))
        print(json.dumps({arm: {key: found[arm][key] for key in ("peak_bytes", "seconds", "phases")}}), flush=True)
        yield found


def link(size: int = 1 << 30) -> float:
    """What the link carries: plain pinned copies to the device, in GB/s."""
    import torch

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(size / (time.perf_counter() - start))
    return round(max(rates) / 1e9, 2)


def _ratio(one: float | None, other: float | None) -> float | None:
    return round(one / other, 3) if one and other else None


def compared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Against one teacher, and losses against those of teachers that are all resident."""
    record: dict[str, Any] = {}
    for arm, values in found.items():
        if "one" in found and arm != "one":
            peak = "device_peak_bytes" if "device_peak_bytes" in values else "peak_bytes"
            record[arm] = {
                "memory": round(values[peak] / found["one"][peak], 3),
                "time": round(values["seconds"] / found["one"]["seconds"], 3),
                "cpu_time": _ratio(values["cpu_seconds"], found["one"]["cpu_seconds"]),
                "tokens_equal": values["tokens"] == found["one"]["tokens"],
            }
        if values.get("page_gigabytes_per_second") and "link_gigabytes_per_second" in values:
            share = values["page_gigabytes_per_second"] / values["link_gigabytes_per_second"]
            record.setdefault(arm, {})["page_rate_of_link"] = round(share, 3)
        reference = found.get("all") or found.get("one-resident")
        if reference is not None and arm != "one":
            record.setdefault(arm, {})["losses_identical"] = values["losses"] == reference["losses"]
    if "time" in (two := record.get("two", {})):
        losses = two.get("losses_identical")  # None: nobody was there to compare them with
        met = two["memory"] <= MEMORY and two["time"] <= TIME and losses is not False
        record["goals"] = {"memory": MEMORY, "time": TIME, "losses": losses is not None, "met": met}
    return record


def main() -> None:
    if len(sys.argv) > 4 and sys.argv[1] == "--arm":
        path, out, result = map(Path, sys.argv[2:5])
        run_arm(path, out, result, "--unsaved" in sys.argv, "--profile" in sys.argv)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--teachers", type=int, default=12)
    parser.add_argument(
        "--checkpoints", type=int, help="different ones; the other teachers are copies (default: all different)"
    )
    parser.add_argument("--student", choices=list(SHAPES))
    parser.add_argument("--teacher", choices=list(SHAPES))
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--micro-tokens", type=int)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", choices=["memory", "disk"])
    parser.add_argument("--arms", nargs="+", default=["one", "two", "one-resident", "all"])
    parser.add_argument(
        "--unsaved", action="store_true", help="end every arm with its last step, before the student is saved"
    )
    parser.add_argument("--profile", action="store_true", help="write down what the start of every arm was spent on")
    parser.add_argument("--name", help="of the result's file; default: teacher-pool-DEVICE.json")
    parser.add_argument("--directory", type=Path, help="where models and runs go; default: a temporary one")
    args = parser.parse_args()
    usual = {"cpu": ("cpu", "cpu", 48, 24, 1024), "cuda": ("0.6B", "4B", 1536, 224, 16_384)}[args.device]
    for key, value in zip(("student", "teacher", "prompts", "new_tokens", "micro_tokens"), usual, strict=True):
        setattr(args, key, getattr(args, key) or value)
    args.checkpoints = args.checkpoints or args.teachers
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        settings = {key: value for key, value in vars(args).items() if key not in ("directory", "arms", "name")}
        name = args.name or f"teacher-pool-{args.device}{f'-{args.keep}' if args.keep else ''}.json"
        values: dict[str, Any] = {}
        for found in measure(args, directory):
            values = {"settings": settings, "compared": compared(found), "arms": found}
            save(name, values)
        print(json.dumps(values["compared"], indent=1), flush=True)


if __name__ == "__main__":
    main()
