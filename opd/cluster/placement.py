"""Which devices do what: everything on every rank where that fits, else trainer, samplers and teachers on devices of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from opd.config import Stage
from opd.config.stage import WEIGHTS
from opd.errors import UserError
from opd.runner.cost import (
    BYTES,
    Device,
    ModelShape,
    Spread,
    Work,
    gradient_bytes,
    memory,
    sampling_seconds,
    scoring_seconds,
    teachers_held,
    update_seconds,
)
from opd.settings import Dtype
from opd.teachers.kinds import ModelRef
from opd.text import bytes_in_words

MACHINE = 8  # devices of one
PAGES = 50e9  # bytes per second from a host's memory to one device


@dataclass(frozen=True)
class PaperStage:
    """A stage with the shapes of its models."""

    stage: Stage
    precision: str
    student: ModelShape
    trained: int
    teachers: Mapping[str, tuple[ModelRef, ModelShape]]  # those that have a model of their own; mixtures: NAME/0, …
    owners: Mapping[str, str]  # -> the recipe's teacher
    prompt: int  # tokens
    device: Device

    @property
    def work(self) -> Work:
        return Work.of(self.stage, self.prompt)

    @property
    def usual(self) -> Dtype:
        return WEIGHTS[self.precision]

    @property
    def sampled(self) -> int:
        """Bytes of a weight in the sampler."""
        return BYTES[self.stage.sampler.dtype or self.usual]

    def teacher_bytes(self, name: str) -> int:
        ref, shape = self.teachers[name]
        return shape.stored(BYTES[ref.dtype or self.usual], ref.quantise)

    def share(self, name: str) -> float:
        """Of the tokens, as far as the recipe alone says it: teachers of a role have equal parts."""
        role = self.stage.teachers[self.owners[name]].role
        return 1 / sum(self.stage.teachers[other].role == role for other in set(self.owners.values()))


@dataclass(frozen=True)
class Placement:
    """`together`: every rank samples, scores and trains. Else each part has devices of its own."""

    together: bool
    ranks: int
    group: int
    samplers: int = 0  # replicas
    sampler_gpus: int = 0  # of one
    teachers: Mapping[str, tuple[int, int]] | None = None  # name -> replicas, GPUs of one
    turns: int = 0  # GPUs on which teachers take turns; 0: each has its own

    @property
    def gpus(self) -> int:
        own = sum(replicas * gpus for replicas, gpus in (self.teachers or {}).values())
        return self.ranks + self.samplers * self.sampler_gpus + (self.turns or own)

    def spread(self, stage: Stage, sharded: bool | None = None) -> Spread:
        several = self.ranks > 1 if sharded is None else sharded
        return Spread(self.ranks, self.group, several, self.together, stage.cluster.teachers)


def group_of(stage: Stage, ranks: int) -> int:
    return ranks if stage.cluster.shard == "full" else min(stage.cluster.group or MACHINE, ranks)


def even(stage: Stage, ranks: int) -> bool:
    """Whether groups are of one size."""
    return ranks % group_of(stage, ranks) == 0


def rank_memory(task: PaperStage, placed: Placement, sharded: bool | None = None) -> dict[str, int]:
    """Bytes on one rank of the trainer."""
    stage, spread = task.stage, placed.spread(task.stage, sharded)
    longest, held = task.prompt + task.work.response, 0
    hidden = -(-task.work.rollouts * task.work.response // placed.ranks) * 2
    if placed.together:
        shapes = dict(task.teachers.values())
        parameters, shared = task.student.parameters, not spread.sharded
        held = teachers_held(stage, task.usual, shapes, shapes.__getitem__, parameters, shared)[""]
        if spread.teachers == "shard" and placed.ranks > 1:
            layers = {ref: shape.parameters - shape.outside for ref, shape in shapes.items()}
            away = sum(count * BYTES[ref.dtype or task.usual] for ref, count in layers.items())
            held -= away - away // placed.ranks
    else:
        held = sum(shape.head * BYTES[ref.dtype or task.usual] for ref, shape in dict(task.teachers.values()).items())
    found = memory(stage, task.precision, task.student, task.trained, held, longest, spread)
    widest = max((shape.width for _, shape in task.teachers.values()), default=0)
    return found | ({"hidden states": hidden * widest} if widest else {})


def seconds(task: PaperStage, placed: Placement) -> dict[str, float]:
    """Of the phases of a step."""
    work, device, student = task.work, task.device, task.student
    samplers, gpus = (placed.ranks, 1) if placed.together else (placed.samplers, placed.sampler_gpus)
    spread = placed.spread(task.stage)
    moved = gradient_bytes(task.stage, work, student, task.trained, BYTES[task.usual], spread) / device.link
    scored = {
        name: scoring_seconds(work.tokens * task.share(name), shape, device, scoring_gpus(task, placed, name))
        for name, (_, shape) in task.teachers.items()
    }
    paged = sum(map(task.teacher_bytes, task.teachers)) / (PAGES * placed.turns) if placed.turns else 0.0
    alone = placed.together or placed.turns
    return {
        "sample": sampling_seconds(work, student, task.sampled, device, gpus, samplers),
        "score": sum(scored.values()) + paged if alone else max(scored.values(), default=0.0),
        "update": max(update_seconds(work, student, device, placed.ranks), moved),
        "publish": student.parameters * task.sampled / device.link if placed.gpus > 1 else 0.0,
    }


def scoring_gpus(task: PaperStage, placed: Placement, name: str) -> int:
    if placed.together:
        return placed.ranks
    if placed.turns:
        return placed.turns
    assert placed.teachers is not None
    replicas, gpus = placed.teachers[name]
    return replicas * gpus


def place(task: PaperStage, gpus: int) -> Placement:
    """The simplest that fits; what is left over goes where it saves most time."""
    together = Placement(True, gpus, group_of(task.stage, gpus))
    if even(task.stage, gpus) and sum(rank_memory(task, together).values()) <= task.device.usable:
        return together
    sampler = _devices(task, int(1.3 * task.student.parameters * task.sampled))
    own = {name: (1, _devices(task, int(1.1 * task.teacher_bytes(name)))) for name in task.teachers}
    most = max((count for _, count in own.values()), default=0)
    for teachers, turns in ((own, 0), (own, most)):
        fewest = _fewest_ranks(task, sampler, teachers, turns, gpus)
        if fewest is not None and fewest.gpus <= gpus:
            return _grown(task, fewest, gpus)
    least = _fewest_ranks(task, sampler, own, most, 1 << 20)
    needed = "more than can be had" if least is None else str(least.gpus)
    raise UserError(
        f"{gpus} GPUs of {bytes_in_words(task.device.memory)} are too few: one of the trainer's does not fit, or what trains, "
        f"samples and scores needs {needed} at least. Give more --gpus, or set student.gradient_checkpointing, a lower "
        "train.micro_tokens or quantise."
    )


def _devices(task: PaperStage, size: int) -> int:
    """Of one model: a power of two within a machine, then whole machines."""
    count = -(-size // task.device.usable)
    return 1 << (count - 1).bit_length() if count <= MACHINE else MACHINE * -(-count // MACHINE)


def _fewest_ranks(
    task: PaperStage, sampler: int, teachers: Mapping[str, tuple[int, int]], turns: int, limit: int
) -> Placement | None:
    ranks = 1
    while ranks <= limit:
        placed = Placement(False, ranks, group_of(task.stage, ranks), 1, sampler, teachers, turns)
        if even(task.stage, ranks) and sum(rank_memory(task, placed).values()) <= task.device.usable:
            return placed
        ranks = ranks * 2 if ranks < MACHINE else ranks + MACHINE if ranks < 1024 else ranks * 2
    return None


def _grown(task: PaperStage, placed: Placement, gpus: int) -> Placement:
    """One more unit at a time, to the part that becomes faster by most per device."""
    while True:
        now, best, gain = sum(seconds(task, placed).values()), placed, 0.0
        for more in _larger(task, placed, gpus):
            saved = (now - sum(seconds(task, more).values())) / (more.gpus - placed.gpus)
            if saved > gain:
                best, gain = more, saved
        if best is placed:
            return placed
        placed = best


def _larger(task: PaperStage, placed: Placement, gpus: int) -> list[Placement]:
    whole = MACHINE if task.stage.cluster.shard == "full" else max(placed.group, 1)
    ranks = placed.ranks + min(whole, placed.ranks)
    found = [
        replace(placed, ranks=ranks, group=group_of(task.stage, ranks)),
        replace(placed, samplers=placed.samplers + 1),
    ]
    if placed.sampler_gpus < MACHINE:
        found.append(replace(placed, sampler_gpus=2 * placed.sampler_gpus))
    if placed.turns:
        found.append(replace(placed, turns=placed.turns + min(placed.turns, MACHINE)))
    elif placed.teachers:
        found.append(replace(placed, teachers=_faster(task, placed)))
    fitting = [more for more in found if placed.gpus < more.gpus <= gpus and even(task.stage, more.ranks)]
    return [more for more in fitting if more.samplers <= task.work.rollouts]


def _faster(task: PaperStage, placed: Placement) -> dict[str, tuple[int, int]]:
    """As many replicas of each teacher as it takes for all to be done in three quarters of the time."""
    assert placed.teachers is not None

    def scoring(name: str, gpus: int) -> float:
        return scoring_seconds(task.work.tokens * task.share(name), task.teachers[name][1], task.device, gpus)

    goal = 0.75 * max(scoring(name, replicas * gpus) for name, (replicas, gpus) in placed.teachers.items())
    return {
        name: (max(replicas, ceil(scoring(name, gpus) / goal)), gpus)
        for name, (replicas, gpus) in placed.teachers.items()
    }
