"""`opd cluster plan`: placement, memory, bytes and seconds of a step on so many GPUs, on paper. No torch, and no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from opd.cluster.placement import PaperStage, Placement, place, rank_memory, seconds
from opd.cluster.shapes import shape_of
from opd.config import STAGE_PREFIX, Recipe, Stage
from opd.config.cluster import ModelSize
from opd.errors import UserError
from opd.runner.cost import BYTES, DEVICES, Device, ModelShape, gradient_bytes, in_short
from opd.text import bytes_in_words, plain

PROMPT = 512  # tokens, where the recipe has no limit


@dataclass(frozen=True)
class ClusterPlan:
    """Of one stage."""

    gpus: int  # that there are
    task: PaperStage
    placed: Placement
    memory: dict[str, int]  # part -> bytes, of one rank of the trainer
    others: dict[str, int]  # sampler and teachers on devices of their own -> bytes of one device
    moved: dict[str, float]  # what -> bytes of a step
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        placed = asdict(self.placed) | {"gpus": self.placed.gpus}
        facts = {"memory": self.memory, "others": self.others, "moved": self.moved, "seconds": self.seconds}
        return {"stage": self.task.stage.name, "device": self.task.device.name, "placement": placed, **facts}

    def lines(self) -> list[str]:
        task, placed, device = self.task, self.placed, self.task.device
        parts = ", ".join(f"{name} {bytes_in_words(size)}" for name, size in self.memory.items() if size)
        total = sum(self.seconds.values())
        slowest = max(self.seconds["sample"], total - self.seconds["sample"])
        return [
            f"stage {task.stage.name}: {placed.gpus} of {self.gpus} × {device.name} ({bytes_in_words(device.memory)}), precision {task.precision}",
            f"  student    {_model(task.stage.student.model, task.student)}, {in_short(task.trained)} trained",
            *(f"  teacher    {name}: {_model(ref.model, shape)}" for name, (ref, shape) in task.teachers.items()),
            f"  a step     {task.work.rollouts:,} rollouts of at most {task.prompt:,} + {task.work.response:,} tokens: {in_short(task.work.tokens)}",
            *self._placement(),
            f"  memory     about {bytes_in_words(sum(self.memory.values()))} of {bytes_in_words(device.usable)} per trainer GPU: {parts}",
            *(f"  memory     about {bytes_in_words(size)} per GPU: {name}" for name, size in self.others.items()),
            *(f"  moved      {bytes_in_words(size)} a step: {what}" for what, size in self.moved.items()),
            f"  time       about {total:,.1f} s a step: {', '.join(f'{name} {value:,.1f}' for name, value in self.seconds.items())}",
            *(
                []
                if placed.together
                else [f"  time       about {slowest:,.1f} s where sampling goes on beside the rest"]
            ),
        ]

    def _placement(self) -> list[str]:
        placed, shard = self.placed, self.task.stage.cluster.shard
        groups = f", shard {shard}" + (f" in groups of {placed.group}" if placed.group < placed.ranks else "")
        rewards = "  rewards    processes beside the trainer's first rank, on CPUs"
        if placed.together:
            return [f"  trainer    {placed.ranks} ranks, which also sample and score{groups}", rewards]
        own = [
            f"  teachers   {name}: {replicas} × {gpus} GPUs"
            for name, (replicas, gpus) in (placed.teachers or {}).items()
        ]
        return [
            f"  trainer    {placed.ranks} ranks{groups}",
            f"  samplers   {placed.samplers} × {placed.sampler_gpus} GPUs",
            *([f"  teachers   take turns on {placed.turns} GPUs"] if placed.turns else own),
            rewards,
        ]


def _model(name: str, shape: ModelShape) -> str:
    active = "" if shape.active == shape.parameters else f" ({in_short(shape.active)} active)"
    return f"{plain(name)}: {in_short(shape.parameters)}{active}, width {shape.width:,}, {shape.layers} layers"


def device_named(name: str, memory: float | None) -> Device:
    if name not in DEVICES:
        raise UserError(f"--gpu {name!r}: known are {', '.join(DEVICES)}. For another size, add --memory GIB.")
    return DEVICES[name] if memory is None else replace(DEVICES[name], memory=int(memory * 2**30))


def cluster_plan(
    recipe: Recipe,
    gpus: int,
    *,
    sizes: Mapping[str, ModelSize] | None = None,
    device: Device = DEVICES["h100"],
    prompt: int | None = None,
) -> list[ClusterPlan]:
    """Every stage by itself: a later one may have other teachers."""
    known: dict[str, str] = {}  # stage -> the model it starts from: same shapes as the one it will save

    def resolve(name: str) -> str:
        return known[name.removeprefix(STAGE_PREFIX)] if name.startswith(STAGE_PREFIX) else name

    plans = []
    for stage in recipe.stages:
        task = task_of(stage, resolve, {**stage.cluster.sizes, **(sizes or {})}, device, prompt)
        plans.append(planned(task, place(task, gpus), gpus))
        known[stage.name] = resolve(stage.student.model)
    return plans


def task_of(
    stage: Stage, resolve: Any, sizes: Mapping[str, ModelSize], device: Device, prompt: int | None
) -> PaperStage:
    precision = stage.train.precision_on(device.name if device.name == "cpu" else "cuda")
    student = shape_of(resolve(stage.student.model), stage.student.revision, sizes, "student")
    teachers, owners = {}, {}
    for name, kind in stage.teachers.items():
        refs = kind.reads()
        for number, ref in enumerate(refs):
            part = name if len(refs) == 1 else f"{name}/{number}"
            teachers[part] = ref, shape_of(resolve(ref.model), ref.revision, sizes, name)
            owners[part] = name
    lora = stage.student.lora
    trained = student.parameters if lora is None else adapters(student, lora.rank)
    tokens = prompt or stage.rollout.max_prompt_tokens or PROMPT
    return PaperStage(stage, precision, student, trained, teachers, owners, tokens, device)


def adapters(student: ModelShape, rank: int) -> int:
    """Of every linear layer: about seven per decoder layer, whose sides add up to 24 widths where the inner one is three."""
    return student.layers * rank * 24 * student.width


def planned(task: PaperStage, placed: Placement, gpus: int, sharded: bool | None = None) -> ClusterPlan:
    work, own = task.work, BYTES[task.usual]
    responses = work.rollouts * work.response
    moved: dict[str, float] = {}
    others: dict[str, int] = {}
    if placed.gpus > 1:
        copies = placed.ranks if placed.together else placed.samplers
        moved[f"weights to {copies} samplers, {bytes_in_words(task.student.parameters * task.sampled)} each"] = (
            copies * task.student.parameters * task.sampled
        )
        moved["weights gathered and gradients summed, per trainer GPU"] = gradient_bytes(
            task.stage, work, task.student, task.trained, own, placed.spread(task.stage)
        )
    if not placed.together:
        moved["hidden states from teachers to the trainer's ranks"] = sum(
            responses * task.share(name) * shape.width * 2 for name, (_, shape) in task.teachers.items()
        )
        others["sampler"] = int(1.3 * task.student.parameters * task.sampled) // placed.sampler_gpus
        for name, (_, each) in (placed.teachers or {}).items():
            others[f"teacher {name}"] = int(1.1 * task.teacher_bytes(name)) // (placed.turns or each)
    return ClusterPlan(gpus, task, placed, rank_memory(task, placed, sharded), others, moved, seconds(task, placed))
