"""TRL's `DistillationTrainer` on a case of `step_gpu.py`, by itself: seconds by phase, peak memory, its first tokens.

    pip install --no-deps trl==1.16.0              # never a dependency of opd; it needs accelerate, datasets and psutil
    python benchmarks/step_gpu.py --trl            # calls this one: TRL samples with `generate`
    python benchmarks/step_gpu.py --trl vllm       # TRL samples with vLLM in the same process, as its users run it

The stock trainer, bf16 autocast, the teacher in bf16, fused AdamW, `--batch` sequences at a time. Lengths are forced: for
`generate` by a logits processor, for vLLM by each request's own limit. The decode loops are the stock ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from step_gpu import CASES, PHASES, Case, behind_first, lengths, prompt_rows

BATCH = 16
VLLM_MEMORY = 0.3  # share of the card that vLLM may take: TRL's default


class Clock:
    """Wall seconds of a step by phase, the device waited for. What no phase claims belongs to `update`."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.spent, self.start = cuda, dict.fromkeys(PHASES, 0.0), 0.0

    def begin(self) -> None:
        self.spent, self.start = dict.fromkeys(PHASES, 0.0), self.now()

    def now(self) -> float:
        import torch

        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = self.now()
        yield
        self.spent[phase] += self.now() - begun

    def result(self) -> dict[str, float]:
        total = self.now() - self.start
        claimed = self.spent["sample"] + self.spent["score"]
        return self.spent | {"update": total - claimed, "total": total}


class Forced:
    """A logits processor: no stop token before a row's length is reached, and then nothing else."""

    def __init__(self, limits: list[int], start: int, stop: int, device: Any) -> None:
        import torch

        self.limits, self.start, self.stop = torch.tensor(limits, device=device), start, stop

    def __call__(self, ids: Any, scores: Any) -> Any:
        over = self.limits == ids.shape[1] - self.start + 1
        stops = scores[:, self.stop].clone()
        scores[:, self.stop] = float("-inf")
        scores.masked_fill_(over[:, None], float("-inf"))
        scores[:, self.stop] = stops.new_zeros(()).where(over, scores[:, self.stop])
        return scores


def trainer_class(clock: Clock, first: dict[str, Any]) -> Any:
    from trl import DistillationTrainer

    class Timed(DistillationTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            with clock("sample"):
                found = super()._generate(prompts)
            if "norm" not in first:
                rows = zip(map(list, found[0]), map(list, found[1]), strict=True)
                first.setdefault("tokens", []).extend(rows)
            return found

        def _get_last_hidden_state(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if model is not self.teacher_model:
                return super()._get_last_hidden_state(model, *args, **kwargs)
            with clock("score"):
                return super()._get_last_hidden_state(model, *args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if "norm" not in first:
                first["loss"] = first.get("loss", 0.0) + float(loss.detach())
            return loss

    return Timed


def watcher(
    clock: Clock, first: dict[str, Any], samples: list[dict[str, Any]], out: Path, setting: dict[str, Any]
) -> Any:
    """After every step `out` has all that were finished, and what the first one computed, for a caller that stops this process."""
    import torch
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if clock.cuda:
                torch.cuda.reset_peak_memory_stats()
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            peak = torch.cuda.max_memory_allocated() / 2**30 if clock.cuda else 0.0
            samples.append({"seconds": clock.result(), "peak_gib": peak})
            print("TRL", len(samples), samples[-1], flush=True)
            write(out, {**setting, "samples": samples, **checked(first)})

        def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
            if logs and "grad_norm" in logs:
                first.setdefault("norm", float(logs["grad_norm"]))
                write(out, {**setting, "samples": samples, **checked(first)})

    return Watch()


def checked(first: dict[str, Any]) -> dict[str, Any]:
    """What the first step saw and computed, once all of it is there: its norm is told behind its end."""
    if "norm" not in first:
        return {}
    return {"check": {"tokens": first["tokens"], "trl": {"loss": first["loss"], "grad_norm": first["norm"]}}}


def write(out: Path, found: dict[str, Any]) -> None:
    """All of it or what was there before."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(found), encoding="utf-8")
    part.replace(out)


def run(arguments: argparse.Namespace, directory: str) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DistillationConfig

    case, cuda = CASES[arguments.case], arguments.device != "cpu"
    prompts = [row["prompt"] for row in prompt_rows(case)]
    student, teacher = (str(arguments.models / shape) for shape in (case.student, case.teacher))
    tokenizer = AutoTokenizer.from_pretrained(student, padding_side="left")
    limits = {tuple(tokenizer(text)["input_ids"]): size for text, size in zip(prompts, lengths(case), strict=True)}
    clock, first, samples = Clock(cuda), dict[str, Any](), list[dict[str, Any]]()
    batch, engine = min(arguments.batch, len(prompts)), vllm_settings(case) if arguments.sampler == "vllm" else {}
    config = DistillationConfig(
        output_dir=directory, max_steps=arguments.steps + 1, learning_rate=1e-6, lr_scheduler_type="constant",
        weight_decay=0.0, adam_beta2=0.95, max_grad_norm=1.0, optim="adamw_torch_fused", per_device_train_batch_size=batch,
        gradient_accumulation_steps=len(prompts) // batch, gradient_checkpointing=False, bf16=cuda, use_cpu=not cuda,
        beta=1.0, temperature=1.0, top_p=1.0, top_k=0, max_completion_length=case.new_tokens, shuffle_dataset=False,
        teacher_model_init_kwargs={"dtype": "bfloat16" if cuda else "float32"},
        model_init_kwargs={"dtype": "float32"}, save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True, **engine,
    )  # fmt: skip
    adapters = {}
    if "lora" in case.settings:
        from peft import LoraConfig

        wanted = case.settings["lora"]
        adapters = {
            "peft_config": LoraConfig(r=wanted["rank"], lora_alpha=wanted["alpha"], target_modules="all-linear")
        }
    setting = {
        "batch": [batch, len(prompts) // batch],
        "sampler": arguments.sampler,
        "versions": {name: version(name) for name in ("torch", "trl", *(("vllm",) if engine else ()))},
    }
    watch = watcher(clock, first, samples, arguments.out, setting)
    trainer = trainer_class(clock, first)(
        model=student, teacher_model=teacher, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}), callbacks=[watch], **adapters,
    )  # fmt: skip
    force_vllm_lengths(trainer, limits) if engine else force_lengths(trainer, limits)
    trainer.train()
    return {**setting, **behind_first(samples), **checked(first)}


def vllm_settings(case: Case) -> dict[str, Any]:
    """vLLM in TRL's own process, its engine as long as the case's sequences."""
    length = case.prompt_tokens[1] + case.new_tokens + 8
    return {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": VLLM_MEMORY, "vllm_max_model_length": length,
        "generation_kwargs": {"ignore_eos": True},
    }  # fmt: skip


def force_lengths(trainer: Any, limits: dict[tuple[int, ...], int]) -> None:
    generate, stop = trainer.model.generate, trainer.eos_token_ids[0]

    def forced(**inputs: Any) -> Any:
        rows = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].bool().tolist(), strict=True)
        sizes = [limits[tuple(index for index, kept in zip(*row, strict=True) if kept)] for row in rows]
        ids = inputs["input_ids"]
        return generate(**inputs, logits_processor=[Forced(sizes, ids.shape[1], stop, ids.device)])

    trainer.model.generate = forced


def force_vllm_lengths(trainer: Any, limits: dict[tuple[int, ...], int]) -> None:
    engine = trainer.vllm_generation.llm
    generate = engine.generate

    def forced(prompts: Any, sampling_params: Any, **rest: Any) -> Any:
        each = [sampling_params.clone() for _ in prompts]
        for prompt, params in zip(prompts, each, strict=True):
            params.max_tokens = limits[tuple(prompt["prompt_token_ids"])]
        return generate(prompts, sampling_params=each, **rest)

    engine.generate = forced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1, help="measured steps; one more is run first and left out")
    parser.add_argument("--sampler", choices=("generate", "vllm"), default="generate")
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences per forward pass (and per `generate`)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write(arguments.out, run(arguments, directory))


if __name__ == "__main__":
    main()
