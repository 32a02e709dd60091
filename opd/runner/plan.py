"""What a recipe is going to do, without doing it: parameters, tokens, routes, memory. No weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from opd.config import STAGE_PREFIX, Recipe, Stage
from opd.config.stage import WEIGHTS
from opd.data.prompts import DOMAIN
from opd.data.source import PromptSource
from opd.models import load_config, lora_parameter_count, parameter_count
from opd.models.fused import fuse_layers, kernels_on
from opd.models.load import empty_model
from opd.plugins import plugin_errors
from opd.runner.checks import Checked, check_stage
from opd.runner.sizes import Sizes, choose_sizes, in_words, with_sizes
from opd.teachers.kinds import ModelRef
from opd.teachers.pool import settled
from opd.text import bytes_in_words, plain
from opd.trainer.halving import MICRO_TOKENS

SHOWN = 50  # values of a route that are printed
BYTES = {"float32": 4, "bfloat16": 2}
QUANTISED = {"int8": 1.0, "fp8": 1.0, "int4": 0.53}  # bytes per weight, scales included


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
    routes: dict[str, dict[str, str]]  # role -> value of the route's column -> teacher
    route: str
    prompt_tokens: float
    tokens_per_step: int
    rollouts_per_step: int
    memory: dict[str, int]  # part -> bytes
    pool: str = ""  # which teachers come and go
    notes: tuple[str, ...] = ()  # what is skipped
    elsewhere: dict[str, int] = field(default_factory=dict)  # other device -> bytes of teachers on it
    sizes: str = ""
    fused: str = ""  # parts of the student's layers that are one kernel each

    def lines(self) -> list[str]:
        size = sum(self.memory.values())
        parts = ", ".join(f"{name} {bytes_in_words(value)}" for name, value in self.memory.items())
        return [
            f"stage {self.stage} on {self.device}, precision {self.precision}",
            f"  student    {self.student}: {_count(self.parameters)} parameters, {_count(self.trained)} trained",
            *([f"  layers     one kernel each: {self.fused}"] if self.fused else []),
            *(f"  teacher    {name}: {_count(count)} parameters" for name, count in self.teachers.items()),
            *([f"  pool       {self.pool}"] if self.pool else []),
            *self._routes(),
            *([f"  sizes      {self.sizes}"] if self.sizes else []),
            f"  a step     {self.rollouts_per_step} rollouts, at most {self.tokens_per_step:,} tokens (prompts of about {self.prompt_tokens:.0f})",
            f"  memory     about {bytes_in_words(size)}: {parts}",
            *(
                f"  memory     on {device} about {bytes_in_words(held)}: teachers"
                for device, held in self.elsewhere.items()
            ),
            *(f"  note       {plain(note)}" for note in self.notes),
        ]

    def _routes(self) -> Iterator[str]:
        column = "" if self.route == DOMAIN else f"{plain(self.route)} "
        for role, table in self.routes.items():
            for value, name in islice(table.items(), SHOWN):
                yield f"  route      {role}: {column}{plain(value)} -> {name}"
            if len(table) > SHOWN:
                yield f"  route      {role}: … and {len(table) - SHOWN:,} more"


def make_plan(recipe: Recipe) -> list[Plan]:
    known: dict[str, str] = {}  # stage -> the model it starts from: same shapes as the one it will save

    def resolve(name: str) -> str:
        return known[name.removeprefix(STAGE_PREFIX)] if name.startswith(STAGE_PREFIX) else name

    plans, asked = [], dict[str, list[PromptSource]]()
    with plugin_errors():
        for stage in recipe.stages:
            # of a stage whose rollouts are taken up again, what it asks is all that is known yet
            prompts = [one for source in stage.prompts for one in asked.get(source.source, [source])]
            asked[STAGE_PREFIX + stage.name] = prompts
            plans.append(_plan(stage.model_copy(update={"prompts": prompts}), resolve))
            known[stage.name] = resolve(stage.student.model)
    return plans


def _plan(stage: Stage, resolve: Callable[[str], str]) -> Plan:
    checked = check_stage(stage, resolve, planning=True)
    stage = with_sizes(stage, sizes_for(stage, checked, resolve))
    config, inputs = checked.student, checked.inputs
    student = parameter_count(resolve(stage.student.model), stage.student.revision)
    teachers = {
        name: sum(parameter_count(resolve(ref.model), ref.revision) for ref in kind.reads())
        for name, kind in stage.teachers.items()
    }
    trained = _trained(stage, resolve, student)
    rollouts = stage.rollout.prompts * stage.rollout.samples
    longest = inputs.scanned.longest + stage.rollout.max_new_tokens
    held = _held(stage, checked.device, resolve, student)
    here = held.pop("")
    return Plan(
        stage=stage.name, device=str(checked.device), precision=stage.train.precision_on(str(checked.device)), student=stage.student.model, parameters=student, trained=trained,
        teachers=teachers, routes=checked.routes, route=stage.route, prompt_tokens=inputs.scanned.mean, notes=inputs.notes, tokens_per_step=rollouts * longest,
        rollouts_per_step=rollouts, memory=_memory(stage, str(checked.device), config, student, trained, here, longest), elsewhere=held,
        pool=stage.pool.describe(list(_sizes(stage, checked.device, resolve).values()), str(checked.device)),
        sizes=in_words(stage), fused=fuse_layers(empty_model(config)) if kernels_on(checked.device) else "",
    )  # fmt: skip


def sizes_for(stage: Stage, checked: Checked, resolve: Callable[[str], str]) -> Sizes:
    """What fits the device, by the estimate that the plan prints."""
    device, config = checked.device, checked.student

    def estimate(settled: Stage) -> int:
        student = parameter_count(resolve(stage.student.model), stage.student.revision)
        longest = checked.inputs.scanned.longest + stage.rollout.max_new_tokens
        held = _held(settled, device, resolve, student)[""]
        return sum(
            _memory(settled, str(device), config, student, _trained(stage, resolve, student), held, longest).values()
        )

    return choose_sizes(stage, estimate, device, int(config.hidden_size) * 2)


def _trained(stage: Stage, resolve: Callable[[str], str], student: int) -> int:
    if stage.student.lora is None:
        return student
    return lora_parameter_count(resolve(stage.student.model), stage.student.lora, stage.student.revision)


def _held(stage: Stage, device: torch.device, resolve: Callable[[str], str], student: int) -> dict[str, int]:
    """Bytes of the teachers' weights by device ("": the student's), at most; a model that several of them name is there once.

    Of a teacher on another device, the student's holds a copy of the head. Of those that come and go, the largest count.
    """
    models = {settled(ref, device) for kind in stage.teachers.values() for ref in kind.reads()}
    usual = WEIGHTS[stage.train.precision_on(str(device))]
    lora = stage.student.lora is not None
    paged = _sizes(stage, device, resolve)
    own = {ModelRef(stage.student.model, stage.student.revision, dtype) for dtype in (None, usual)} if lora else set()
    held = {"": student * sum(kind.bytes_per_weight(BYTES[usual], lora) for kind in stage.teachers.values())}
    held[""] += sum(sorted(paged.values())[-(stage.pool.resident or 0) :])
    for ref in sorted(models - paged.keys() - own, key=str):
        name, each = resolve(ref.model), BYTES[ref.dtype or usual]
        config = load_config(name, ref.revision)
        head, count = int(config.vocab_size) * int(config.hidden_size), parameter_count(name, ref.revision)
        whole = count if ref.quantise is None else head * (1 if config.tie_word_embeddings else 2)
        layers = 0.0 if ref.quantise is None else (count - whole) * QUANTISED[ref.quantise]
        held[ref.device or ""] = held.get(ref.device or "", 0) + whole * each + int(layers)
        if ref.device is not None:
            held[""] += head * each
    return held


def _sizes(stage: Stage, device: torch.device, resolve: Callable[[str], str]) -> dict[ModelRef, int]:
    """Bytes of each model that comes and goes."""
    usual = WEIGHTS[stage.train.precision_on(str(device))]
    return {
        ref: parameter_count(resolve(ref.model), ref.revision) * BYTES[ref.dtype or usual]
        for ref in stage.pool.paged(stage.teachers)
    }


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
    tokens = max(min(stage.train.micro_tokens or MICRO_TOKENS, step), longest)
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
