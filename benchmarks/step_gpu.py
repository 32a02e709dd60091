"""One on-policy distillation step on a GPU, split by phase, with peak memory: sampling, scoring, update.

    python benchmarks/step_gpu.py                                  # writes benchmarks/results/step-cuda.json
    python benchmarks/step_gpu.py --cases ragged --set sampler.compile=true --profile

Models have the shapes of Qwen3-0.6B (student), Qwen3-4B (teacher) and SmolLM2-135M, with random weights: time does not
depend on what they have learned. A step is what `opd run` does: the built-in sampler, the rollout store, exact reverse
KL over the whole vocabulary, backward, clipping and AdamW. Responses have forced lengths. Cases:

    equal    64 prompts of 128 tokens, 512 new tokens each
    ragged   the same, lengths long-tailed with a mean of a quarter of the longest
    smol     135M, 128 prompts of 60 to 160 tokens, about 6 new ones, eight teachers: many short sequences
    lora     `equal` with adapters of rank 32; `--memory 24` holds it to a smaller card
    long     2 answers of 32,768 tokens from a dataset, gradient checkpointing: scoring and update of long answers

`--trl` measures TRL's `DistillationTrainer` on the same models, prompts and lengths in a process of its own before
(`benchmarks/step_trl.py`), sampling with `generate`, or with `--trl vllm` as its users run it, and computes opd's loss and gradient norm on the very tokens of TRL's first step: `check` has both,
and how far apart they are; more than AGREE ends the script behind its results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runs import rollouts_of

RESULTS = Path(__file__).parent / "results"
PHASES = ("sample", "score", "update")
PROFILED = 24  # new tokens of a recorded sampling phase
AGREE = 0.01  # relative difference of losses and of gradient norms on the same tokens: both compute in bfloat16, each in its own way
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True},
    "4B": {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True},
    "135M": {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True},
    "tiny": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": True},
    "tiny-teacher": {"model_type": "llama", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                     "num_key_value_heads": 2, "vocab_size": 256, "tie_word_embeddings": True},
}  # fmt: skip
SHAPES["135M-teacher"] = SHAPES["135M"]  # with weights of its own


@dataclass(frozen=True)
class Case:
    student: str
    teacher: str
    prompts: int
    prompt_tokens: tuple[int, int]  # shortest, longest
    new_tokens: int
    mean: float | None = None  # of the new tokens, long-tailed; None: all of them
    teachers: int = 1
    settings: dict[str, Any] = field(default_factory=dict)  # of the recipe's student
    data: bool = False  # answers come from the dataset


CASES = {
    "equal": Case("0.6B", "4B", 64, (128, 128), 512),
    "ragged": Case("0.6B", "4B", 64, (128, 128), 512, 128),
    "smol": Case("135M", "135M-teacher", 128, (60, 160), 24, 6, teachers=8),
    "lora": Case("0.6B", "4B", 64, (128, 128), 512, settings={"lora": {"rank": 32, "alpha": 64}}),
    "long": Case("0.6B", "4B", 2, (128, 128), 32_768, settings={"gradient_checkpointing": True}, data=True),
    "tiny": Case("tiny", "tiny-teacher", 4, (3, 9), 8, 3, teachers=2),
    "tiny-long": Case("tiny", "tiny-teacher", 2, (3, 9), 300, settings={"gradient_checkpointing": True}, data=True),
}


def lengths(case: Case) -> list[int]:
    """Quantiles of an exponential law around the mean; the longest reaches the maximum."""
    if case.mean is None:
        return [case.new_tokens] * case.prompts
    quantiles = [-case.mean * math.log(1 - (index + 0.5) / case.prompts) for index in range(case.prompts - 1)]
    found = [min(max(round(length), 2), case.new_tokens) for length in quantiles] + [case.new_tokens]
    random.Random(1).shuffle(found)
    return found


def save_model(shape: str, directory: Path, device: str) -> str:
    """A random model and a tokenizer of one word per id, as a directory."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    where = directory / shape
    if where.is_dir():
        return str(where)
    settings = SHAPES[shape] | {"max_position_embeddings": 40_960, "bos_token_id": None, "eos_token_id": 1}
    torch.manual_seed(len(shape))  # a teacher of the student's shape is not the student
    with torch.device(device):
        config = AutoConfig.for_model(**settings)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(where)
    words = {"<unk>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, settings["vocab_size"])}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(where)
    return str(where)


def prompt_rows(case: Case) -> list[dict[str, str]]:
    dice = random.Random(2)
    vocabulary = SHAPES[case.student]["vocab_size"]

    def words(count: int) -> str:
        return " ".join(f"w{dice.randrange(2, vocabulary)}" for _ in range(count))

    rows = [
        {"prompt": words(dice.randint(*case.prompt_tokens)), "domain": f"teacher{number % case.teachers}"}
        for number in range(case.prompts)
    ]
    return [row | ({"completion": words(case.new_tokens)} if case.data else {}) for row in rows]


class ForcedLengths:
    """The sampler, with each request's own limit and no early stop."""

    def __init__(self, engine: Any, limits: Iterable[int]) -> None:
        self.engine, self.limits = engine, list(limits)

    def load(self, weights: Any) -> None:
        self.engine.load(weights)

    def sample(self, requests: Iterable[Any]) -> Iterator[Any]:
        limited = (
            replace(request, sampling=replace(request.sampling, max_new_tokens=limit, stop_ids=()))
            for request, limit in zip(requests, self.limits, strict=False)
        )
        return self.engine.sample(limited)


class Phases:
    """Seconds and peak bytes of each phase; the device is waited for at every change."""

    def __init__(self, device: str) -> None:
        self.cuda, self.marks = device != "cpu", [("start", 0.0, 0)]
        self.reset()

    def reset(self) -> None:
        self.marks = []
        self("start")

    def __call__(self, phase: str) -> None:
        import torch

        peak = 0
        if self.cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self.marks.append((phase, time.perf_counter(), peak))

    def result(self) -> dict[str, dict[str, float]]:
        self("end")
        seconds, peaks = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        for (phase, begun, _), (_, ended, peak) in zip(self.marks, self.marks[1:], strict=False):
            name = phase if phase in PHASES else "sample"  # rewarding nobody belongs to the batch's making
            seconds[name] += ended - begun
            peaks[name] = max(peaks[name], peak / 2**30)
        total = self.marks[-1][1] - self.marks[0][1]
        return {"seconds": seconds | {"total": total}, "peak_gib": peaks}


def open_stage(case: Case, directory: Path, arguments: argparse.Namespace, phases: Phases) -> Any:
    from opd.common.context import RunContext
    from opd.recipe import load_recipe
    from opd.runner.stage import open_stage as open_parts
    from opd.store import RolloutStore

    source = directory / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in prompt_rows(case)), encoding="utf-8")
    models = Path(arguments.models or directory)
    teacher = {"model": save_model(case.teacher, models, arguments.device), "dtype": "bfloat16"}
    recipe = {
        "student": {"model": save_model(case.student, models, arguments.device)} | case.settings,
        "teachers": {f"teacher{number}": teacher for number in range(case.teachers)},
        "prompts": str(source),
        "rollout": {"prompts": case.prompts, "max_new_tokens": case.new_tokens, "data_share": float(case.data)},
        "sampler": {"compile": False},  # `auto` would compile where slots are few: minutes before the first step
        "objective": {"form": "direct", "divergence": "reverse_kl"},
        "train": {"steps": 100, "lr": 1e-6},
        "eval": {"prompts": 0},
        "device": arguments.device,
    }
    run = open_parts(
        load_recipe(recipe, arguments.set).stages[0], RolloutStore(directory / "rollouts"),
        context=RunContext(say=lambda line: None, on_phase=phases),
    )  # fmt: skip
    forced = ForcedLengths(run.engine, lengths(case))
    run.rollouter.context = replace(run.rollouter.context, student=forced)
    return run


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians of the measured steps; the first ones, in which kernels are compiled and graphs captured, are left out."""
    from opd.loop.step import run_step

    case, phases = CASES[name], Phases(arguments.device)
    peer = peer_results(name, arguments) if arguments.trl else {}
    with tempfile.TemporaryDirectory() as directory:
        run = open_stage(case, Path(directory), arguments, phases)
        if "check" in peer:
            ours = loss_on(run, peer["check"]["tokens"])
            if "lora" in case.settings:  # whose gradient depends on how adapters were drawn
                ours.pop("grad_norm")
            peer["check"] = compared(peer["check"]["trl"], ours)
            print(name, "on TRL's tokens", peer["check"], flush=True)
        samples, facts = [], []
        for step in range(1, arguments.warm + arguments.steps + 1):
            phases.reset()
            facts.append(run_step(run, step).metrics)
            samples.append(phases.result())
            print(name, step, {key: round(value, 3) for key, value in samples[-1]["seconds"].items()}, flush=True)
        if arguments.profile:
            profile(run, name, arguments)
    kept = samples[arguments.warm :]
    return {
        "case": vars(case),
        "sizes": {
            "micro_tokens": run.spec.train.micro_tokens,
            "batch_tokens": run.spec.teachers["teacher0"].batch_tokens,
            "slots": run.engine.settings.slots,
            "compile": run.spec.sampler.compile,
        },
        "trl": peer,
        "tokens": facts[-1]["tokens"],
        "loss": [fact["loss"] for fact in facts],
        "mismatch": facts[-1]["mismatch"],
        "seconds": {
            key: round(statistics.median(s["seconds"][key] for s in kept), 4) for key in kept[0]["seconds"]
        },
        "peak_gib": {key: round(max(s["peak_gib"][key] for s in kept), 2) for key in PHASES},
        "samples": samples,
    }  # fmt: skip


def peer_results(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What TRL takes for the same case, in a process of its own, whose memory is free again when it has ended."""
    with tempfile.TemporaryDirectory() as directory:
        models, out = Path(arguments.models or directory), Path(directory) / "trl.json"
        save_model(CASES[name].student, models, arguments.device)
        save_model(CASES[name].teacher, models, arguments.device)
        script = Path(__file__).with_name("step_trl.py")
        command = [sys.executable, str(script), "--case", name, "--models", str(models), "--out", str(out)]
        command += ["--device", arguments.device, "--steps", str(arguments.steps), "--sampler", arguments.trl]
        command += ["--batch", str(arguments.trl_batch)] if arguments.trl_batch else []
        try:
            subprocess.run(command, check=True, timeout=arguments.trl_limit)
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        except subprocess.TimeoutExpired:
            found = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"samples": []}
            print("TRL", name, f"was stopped after {arguments.trl_limit} s, {len(found['samples'])} steps", flush=True)
            found |= {"stopped_at": arguments.trl_limit, **behind_first(found["samples"])}
    print("TRL", name, found.get("seconds"), found.get("peak_gib"), flush=True)
    return found


def behind_first(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Of TRL's steps: medians and the peak of those behind the first, if there are any, and all of them."""
    kept = samples[1:]
    return {
        "seconds": {key: round(statistics.median(s["seconds"][key] for s in kept), 4) for key in kept[0]["seconds"]},
        "peak_gib": round(max(sample["peak_gib"] for sample in kept), 2),
        "samples": samples,
    } if kept else {"samples": samples}  # fmt: skip


def compared(trl: dict[str, float], opd: dict[str, float]) -> dict[str, dict[str, float]]:
    """Both sides' loss and gradient norm, and their relative difference."""
    return {"trl": trl, "opd": opd, "apart": {key: abs(opd[key] - trl[key]) / abs(trl[key]) for key in opd}}


def require_agreement(cases: dict[str, Any]) -> None:
    """A ratio of speeds says nothing where the two compute something else."""
    for name, found in cases.items():
        apart = found["trl"].get("check", {}).get("apart", {})
        if found["trl"] and not apart:
            print(f"{name}: TRL was stopped within its first step; nothing was compared")
        if any(not value < AGREE for value in apart.values()):
            raise SystemExit(f"{name}: on the same tokens opd and TRL differ by {apart}; at most {AGREE} is rounding.")


def loss_on(run: Any, tokens: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """opd's loss and gradient norm on given (prompt, response) ids, without an update."""

    from opd.divergences import divergence
    from opd.loop.oom_retry import micro_batches

    rollouts = rollouts_of(tokens, run.domains[0])
    count, total = sum(len(response) for _, response in tokens), 0.0
    for batch in micro_batches(rollouts, run.spec.train.micro_tokens, run.student.device, {}):
        with torch_no_grad():
            teacher = run.teachers["teacher0"].model.predict(batch)
        found = divergence("reverse_kl", run.student.predict(batch), teacher, merge=(run.stop_ids,))
        (found.loss / count).backward()
        total += float(found.loss.detach()) / count
    norm = run.optimiser.clip()
    run.optimiser.discard()
    return {"loss": total, "grad_norm": norm}


def torch_no_grad() -> Any:
    import torch

    return torch.no_grad()


class PhaseProfiler:
    """Records each phase of a step apart: which kernels took the device's time, and how many launches it took."""

    def __init__(self, cuda: bool, wanted: Iterable[str]) -> None:
        self.cuda, self.wanted, self.tables, self.phase = cuda, tuple(wanted), dict[str, str](), ""
        self.recorder: Any = None

    def __call__(self, phase: str) -> None:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as record

        self.stop()
        if phase in self.wanted:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
            self.phase, self.begun, self.recorder = phase, time.perf_counter(), record(activities=kinds)
            self.recorder.start()

    def stop(self) -> None:
        import torch

        if self.recorder is None:
            return
        if self.cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.begun
        self.recorder.stop()
        self.tables[self.phase] = self.tables.get(self.phase, "") + phase_table(self.recorder, self.phase, seconds)
        self.recorder = None


def phase_table(recorder: Any, phase: str, seconds: float, rows: int = 30) -> str:
    """Kernels by the time they took, then calls of the host by theirs."""
    averages = recorder.key_averages()
    kernels = [event for event in averages if str(event.device_type).endswith("CUDA")]
    calls = [event for event in averages if str(event.device_type).endswith("CPU")]
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    head = f"{phase}: {seconds:.3f} s recorded, device busy {busy:.3f} s in {sum(e.count for e in kernels)} kernels\n"
    lines = [
        f"  {event.self_device_time_total / 1e3:10.2f} ms {event.count:8d} x  {event.key[:150]}"
        for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:rows]
    ] + [
        f"  {event.self_cpu_time_total / 1e3:10.2f} ms {event.count:8d} x  host {event.key[:120]}"
        for event in sorted(calls, key=lambda event: -event.self_cpu_time_total)[:rows]
    ]  # fmt: skip
    return head + "\n".join(lines) + "\n\n"


def profile(run: Any, name: str, arguments: argparse.Namespace) -> None:
    """Where two more steps' time goes, phase by phase; a text file beside the results.

    Sampling is recorded over a few tokens: every one takes the same kernels, and their number is what recording costs.
    """
    from opd.loop.step import run_step

    forced, before = run.rollouter.context.student, run.context
    whole, tables = forced.limits, []
    for number, wanted in enumerate((["sample"], ["score", "update"]), 1):
        forced.limits = [min(limit, PROFILED) for limit in whole] if number == 1 else whole
        profiler = PhaseProfiler(arguments.device != "cpu", wanted)
        run.context = replace(before, on_phase=profiler)
        run_step(run, arguments.warm + arguments.steps + number)
        profiler.stop()
        tables += [profiler.tables[phase] for phase in wanted]
    run.context = before
    path = arguments.out.with_name(f"{arguments.out.stem}-{name}-profile.txt")
    path.write_text("".join(tables), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["equal", "ragged", "smol", "lora"])
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--warm", type=int, default=2, help="steps before them that are left out")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe settings")
    parser.add_argument("--models", type=Path, help="where random models are kept; default: made anew")
    parser.add_argument("--profile", action="store_true", help="record two more steps")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--trl", nargs="?", const="generate", choices=("generate", "vllm"), metavar="SAMPLER",
        help="measure TRL's DistillationTrainer first, on the same cases; it samples with `generate`, or with vLLM",
    )  # fmt: skip
    parser.add_argument("--trl-batch", type=int, metavar="N", help="TRL's sequences per forward pass; default 16")
    parser.add_argument("--trl-limit", type=float, metavar="SECONDS", help="stop TRL then; finished steps count")
    parser.add_argument("--memory", type=float, metavar="GIB", help="take no more of the device than this")
    arguments = parser.parse_args()
    arguments.out = arguments.out or RESULTS / (
        "step-cuda.json" if arguments.device != "cpu" else "step-shapes-cpu.json"
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    import torch

    if arguments.memory:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(arguments.memory * 2**30 / whole)
    report: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/step_gpu.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if arguments.device != "cpu" else platform.processor(),
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", *(("trl",) if arguments.trl else ()))},
        "settings": arguments.set,
        "cases": {},
    }
    for name in arguments.cases:
        found = report["cases"][name] = measure(name, arguments)
        print(json.dumps({name: {key: found[key] for key in ("seconds", "peak_gib", "mismatch")}}), flush=True)
        arguments.out.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"written to {arguments.out}")
    require_agreement(report["cases"])


if __name__ == "__main__":
    main()
