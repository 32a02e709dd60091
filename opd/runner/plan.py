"""What a recipe is going to do, without doing it: parameters, tokens, routes, memory. No weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opd.config import STAGE_PREFIX, Recipe, Stage
from opd.config.stage import WEIGHTS
from opd.models import lora_parameter_count, parameter_count
from opd.runner.checks import check_stage
from opd.text import plain

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Plan:
    """The facts `--dry-run` prints about one stage."""

    stage: str
    device: str
    precision: str
    student: str
    parameters: int
    trained: int
    teachers: dict[str, int]  # name -> parameters
    routes: dict[str, dict[str, str]]
    prompt_tokens: float
    tokens_per_step: int
    rollouts_per_step: int
    memory: dict[str, int]  # part -> bytes
    notes: tuple[str, ...] = ()  # what is skipped

    def lines(self) -> list[str]:
        size = sum(self.memory.values())
        parts = ", ".join(f"{name} {_size(value)}" for name, value in self.memory.items())
        return [
            f"stage {self.stage} on {self.device}, precision {self.precision}",
            f"  student    {self.student}: {_count(self.parameters)} parameters, {_count(self.trained)} trained",
            *(f"  teacher    {name}: {_count(count)} parameters" for name, count in self.teachers.items()),
            *(
                f"  route      {role}: {domain} -> {name}"
                for role, table in self.routes.items()
                for domain, name in table.items()
            ),
            f"  a step     {self.rollouts_per_step} rollouts, at most {self.tokens_per_step:,} tokens (prompts of about {self.prompt_tokens:.0f})",
            f"  memory     about {_size(size)}: {parts}",
            *(f"  note       {plain(note)}" for note in self.notes),
        ]


def make_plan(recipe: Recipe) -> list[Plan]:
    known: dict[str, str] = {}  # stage -> the model it starts from: same shapes as the one it will save

    def resolve(name: str) -> str:
        return known[name.removeprefix(STAGE_PREFIX)] if name.startswith(STAGE_PREFIX) else name

    plans = []
    for stage in recipe.stages:
        plans.append(_plan(stage, resolve))
        known[stage.name] = resolve(stage.student.model)
    return plans


def _plan(stage: Stage, resolve: Callable[[str], str]) -> Plan:
    checked = check_stage(stage, resolve)
    config, inputs = checked.configs[""], checked.inputs
    student = parameter_count(resolve(stage.student.model), stage.student.revision)
    teachers = {
        name: sum(parameter_count(resolve(ref.model), ref.revision) for ref in kind.reads())
        for name, kind in stage.teachers.items()
    }
    trained = (
        student
        if stage.student.lora is None
        else lora_parameter_count(resolve(stage.student.model), stage.student.lora, stage.student.revision)
    )
    rollouts = stage.rollout.prompts * stage.rollout.samples
    longest = inputs.scanned.longest + stage.rollout.max_new_tokens
    return Plan(
        stage=stage.name, device=str(checked.device), precision=stage.train.precision_on(str(checked.device)), student=stage.student.model, parameters=student, trained=trained,
        teachers=teachers, routes=checked.routes, prompt_tokens=inputs.scanned.mean, notes=inputs.notes, tokens_per_step=rollouts * longest,
        rollouts_per_step=rollouts,
        memory=_memory(stage, str(checked.device), config, student, trained, _held(stage, str(checked.device), resolve, student), longest),
    )  # fmt: skip


def _held(stage: Stage, device: str, resolve: Callable[[str], str], student: int) -> int:
    """Bytes of the teachers' weights, at most; a model that several of them name is there once."""
    models = {ref for kind in stage.teachers.values() for ref in kind.reads()}
    usual = WEIGHTS[stage.train.precision_on(device)]
    read = sum(parameter_count(resolve(ref.model), ref.revision) * BYTES[ref.dtype or usual] for ref in models)
    copies = sum(kind.copies_student(stage.student.lora is not None) for kind in stage.teachers.values())
    return read + copies * student * BYTES["float32"]


def _memory(
    stage: Stage, device: str, config: Any, student: int, trained: int, teachers: int, longest: int
) -> dict[str, int]:
    """Rough sizes of what is alive at once. Activations: about 34 widths per layer and token, 2 with checkpointing."""
    width, layers, vocabulary = (
        int(getattr(config, name)) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    precision = stage.train.precision_on(device)
    own = WEIGHTS[precision]
    each, half = BYTES[own], precision != "float32"
    kept = 4 if half and stage.student.lora is None and precision == "mixed" else 0  # a master for every weight
    step = stage.rollout.prompts * stage.rollout.samples * longest
    tokens = max(min(stage.train.micro_tokens, step), longest)
    per_layer = 2 if stage.student.gradient_checkpointing else 34
    queries = int(
        getattr(config, "num_attention_heads", None) or 1
    )  # recurrent models have none, and state of about a width
    heads = int(getattr(config, "num_key_value_heads", None) or queries)
    head = int(getattr(config, "head_dim", None) or width // queries)
    slots = stage.sampler.sequences()
    sampler = BYTES[stage.sampler.dtype or own]
    merged = student * sampler if stage.student.lora is not None or stage.sampler.dtype not in (None, own) else 0
    return {
        "weights": student * each,
        "gradients and AdamW": trained * ((each if precision == "bfloat16" else 4) + kept + 8),
        "teachers": teachers,
        "activations": tokens * width * layers * per_layer * (2 if half else 4)
        + 5 * min(64 << 20, tokens * vocabulary * 4),
        "sampler": slots * longest * 2 * heads * head * layers * sampler + merged,
    }


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number:,}"


def _size(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
