"""`opd cluster plan`: estimate placement, memory, traffic and time of a step on so many GPUs. No torch and no network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from opd.common.errors import ModelError, UserError
from opd.common.text import bytes_in_words, plain
from opd.models.files import read_json, stored_tensors
from opd.models.load import weights_directory
from opd.recipe import STAGE_PREFIX, Recipe, Stage, parse_yaml
from opd.recipe.stage import WEIGHTS, AnySize, ModelSize
from opd.registry import Dtype, validate_settings
from opd.runner.cost import (
    BYTES,
    DEVICES,
    Device,
    ModelShape,
    Spread,
    Work,
    gradient_bytes,
    in_short,
    memory,
    module_bytes,
    module_seconds,
    sampling_seconds,
    scoring_seconds,
    teachers_held,
    update_seconds,
)
from opd.teachers.kinds import ModelRef

PROMPT = 512  # tokens of a prompt, if the recipe has no limit


@dataclass(frozen=True)
class ClusterPlan:
    """Of one stage."""

    gpus: int  # available
    task: PlannedStage
    placed: Placement
    memory: dict[str, int]  # part -> bytes, of one rank of the trainer
    others: dict[str, int]  # sampler and teachers on devices of their own -> bytes of one device
    moved: dict[str, float]  # kind of traffic -> bytes per step
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
            *([] if placed.together else [f"  time       about {slowest:,.1f} s if sampling runs alongside the rest"]),
        ]

    def _placement(self) -> list[str]:
        placed, shard = self.placed, self.task.stage.cluster.shard
        groups = f", shard {shard}" + (f" in groups of {placed.group}" if placed.group < placed.ranks else "")
        rewards = "  rewards    processes next to the trainer's first rank, on CPUs"
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
    """Plan every stage separately, because a later one may have other teachers."""
    known: dict[str, str] = {}  # stage -> its start model, which has the shapes of its result

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
) -> PlannedStage:
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
    start = stage.student.model, stage.student.revision
    modules = {
        name: student if ref == start else shape_of(resolve(ref[0]), ref[1], sizes, name)
        for name, kind in stage.modules.items()
        for ref in kind.reads(*start)
    }
    return PlannedStage(stage, precision, student, trained, teachers, owners, tokens, device, modules)


def adapters(student: ModelShape, rank: int) -> int:
    """LoRA parameters of all linear layers: about seven per decoder layer, with sides of 24 widths in total."""
    return student.layers * rank * 24 * student.width


def planned(task: PlannedStage, placed: Placement, gpus: int, sharded: bool | None = None) -> ClusterPlan:
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
        if task.modules:
            name = f"gradients of modules ({', '.join(task.modules)}) summed, per trainer GPU"
            moved[name] = module_bytes(task.modules, placed.spread(task.stage))
    if not placed.together:
        moved["hidden states from teachers to the trainer's ranks"] = sum(
            responses * task.share(name) * shape.width * 2 for name, (_, shape) in task.teachers.items()
        )
        others["sampler"] = int(1.3 * task.student.parameters * task.sampled) // placed.sampler_gpus
        for name, (_, each) in (placed.teachers or {}).items():
            others[f"teacher {name}"] = int(1.1 * task.teacher_bytes(name)) // (placed.turns or each)
    return ClusterPlan(gpus, task, placed, rank_memory(task, placed, sharded), others, moved, seconds(task, placed))


# Placement: everything on every rank if it fits, else separate devices for trainer, samplers and teachers


MACHINE = 8  # devices per machine
PAGES = 50e9  # bytes per second from a host's memory to one device


@dataclass(frozen=True)
class PlannedStage:
    """A stage and the shapes of its models."""

    stage: Stage
    precision: str
    student: ModelShape
    trained: int
    teachers: Mapping[str, tuple[ModelRef, ModelShape]]  # teachers with their own model; parts of mixtures: NAME/0, …
    owners: Mapping[str, str]  # -> the teacher in the recipe
    prompt: int  # tokens
    device: Device
    modules: Mapping[str, ModelShape] = field(default_factory=dict)  # trainable modules with a model of their own

    @property
    def work(self) -> Work:
        return Work.of(self.stage, self.prompt)

    @property
    def usual(self) -> Dtype:
        return WEIGHTS[self.precision]

    @property
    def sampled(self) -> int:
        """Bytes per weight in the sampler."""
        return BYTES[self.stage.sampler.dtype or self.usual]

    def teacher_bytes(self, name: str) -> int:
        ref, shape = self.teachers[name]
        return shape.stored(BYTES[ref.dtype or self.usual], ref.quantise)

    def share(self, name: str) -> float:
        """The share of tokens per teacher, as far as the recipe says: equal parts within a role."""
        role = self.stage.teachers[self.owners[name]].role
        return 1 / sum(self.stage.teachers[other].role == role for other in set(self.owners.values()))


@dataclass(frozen=True)
class Placement:
    """`together`: every rank samples, scores and trains. Otherwise each part has its own devices."""

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
    """Whether all groups have the same size."""
    return ranks % group_of(stage, ranks) == 0


def rank_memory(task: PlannedStage, placed: Placement, sharded: bool | None = None) -> dict[str, int]:
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
    found = memory(stage, task.precision, task.student, task.trained, held, longest, spread, modules=task.modules)
    widest = max((shape.width for _, shape in task.teachers.values()), default=0)
    return found | ({"hidden states": hidden * widest} if widest else {})


def seconds(task: PlannedStage, placed: Placement) -> dict[str, float]:
    """Seconds of the phases of a step."""
    work, device, student = task.work, task.device, task.student
    samplers, gpus = (placed.ranks, 1) if placed.together else (placed.samplers, placed.sampler_gpus)
    spread = placed.spread(task.stage)
    moved = gradient_bytes(task.stage, work, student, task.trained, BYTES[task.usual], spread)
    moved = (moved + module_bytes(task.modules, spread)) / device.link
    passes = update_seconds(work, student, device, placed.ranks)
    passes += module_seconds(work.tokens, task.modules, device, placed.ranks)
    scored = {
        name: scoring_seconds(work.tokens * task.share(name), shape, device, scoring_gpus(task, placed, name))
        for name, (_, shape) in task.teachers.items()
    }
    paged = sum(map(task.teacher_bytes, task.teachers)) / (PAGES * placed.turns) if placed.turns else 0.0
    alone = placed.together or placed.turns
    return {
        "sample": sampling_seconds(work, student, task.sampled, device, gpus, samplers),
        "score": sum(scored.values()) + paged if alone else max(scored.values(), default=0.0),
        "update": max(passes, moved),
        "publish": student.parameters * task.sampled / device.link if placed.gpus > 1 else 0.0,
    }


def scoring_gpus(task: PlannedStage, placed: Placement, name: str) -> int:
    if placed.together:
        return placed.ranks
    if placed.turns:
        return placed.turns
    assert placed.teachers is not None
    replicas, gpus = placed.teachers[name]
    return replicas * gpus


def place(task: PlannedStage, gpus: int) -> Placement:
    """The simplest placement that fits. Remaining GPUs go where they save most time."""
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
    needed = "more than is available" if least is None else str(least.gpus)
    raise UserError(
        f"{gpus} GPUs of {bytes_in_words(task.device.memory)} are too few: a rank of the trainer does not fit into one, or training, "
        f"sampling and scoring need at least {needed}. Give more --gpus, or set student.gradient_checkpointing, a lower "
        "train.micro_tokens or quantise."
    )


def _devices(task: PlannedStage, size: int) -> int:
    """GPUs per model: a power of two within a machine, then whole machines."""
    count = -(-size // task.device.usable)
    return 1 << (count - 1).bit_length() if count <= MACHINE else MACHINE * -(-count // MACHINE)


def _fewest_ranks(
    task: PlannedStage, sampler: int, teachers: Mapping[str, tuple[int, int]], turns: int, limit: int
) -> Placement | None:
    ranks = 1
    while ranks <= limit:
        placed = Placement(False, ranks, group_of(task.stage, ranks), 1, sampler, teachers, turns)
        if even(task.stage, ranks) and sum(rank_memory(task, placed).values()) <= task.device.usable:
            return placed
        ranks = ranks * 2 if ranks < MACHINE else ranks + MACHINE if ranks < 1024 else ranks * 2
    return None


def _grown(task: PlannedStage, placed: Placement, gpus: int) -> Placement:
    """Add one unit at a time, to the part with the largest speed-up per device."""
    while True:
        now, best, gain = sum(seconds(task, placed).values()), placed, 0.0
        for more in _larger(task, placed, gpus):
            saved = (now - sum(seconds(task, more).values())) / (more.gpus - placed.gpus)
            if saved > gain:
                best, gain = more, saved
        if best is placed:
            return placed
        placed = best


def _larger(task: PlannedStage, placed: Placement, gpus: int) -> list[Placement]:
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


def _faster(task: PlannedStage, placed: Placement) -> dict[str, tuple[int, int]]:
    """Add replicas of teachers until all need at most three quarters of the time."""
    assert placed.teachers is not None

    def scoring(name: str, gpus: int) -> float:
        return scoring_seconds(task.work.tokens * task.share(name), task.teachers[name][1], task.device, gpus)

    goal = 0.75 * max(scoring(name, replicas * gpus) for name, (replicas, gpus) in placed.teachers.items())
    return {
        name: (max(replicas, ceil(scoring(name, gpus) / goal)), gpus)
        for name, (replicas, gpus) in placed.teachers.items()
    }


# Shapes of models: from this machine, from the hub's cache, or as given


VOCABULARY = 151_936  # for a model that does not say
TIED = 4e9  # smaller models usually have tied embeddings
KEY_VALUES = 2048  # eight heads of 128, keys and values


def given_sizes(options: list[str]) -> dict[str, ModelSize]:
    """`NAME=32B`, or `NAME={parameters: 671B, active: 37B, width: 7168}`."""
    found = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not name or not equals or not value:
            raise UserError(f"--size {option!r}: expected NAME=PARAMETERS, for example student=32B.")
        size = parse_yaml(value, f"--size {name}") if value.startswith("{") else value
        found[name] = validate_settings(f"--size {name}", AnySize, size)
    return found


def guessed(size: ModelSize) -> ModelShape:
    """The usual shape of a model of this size, for values that were not given."""
    active = size.active or size.parameters
    width = size.width or max(64, 128 * round((active * 80 / 12) ** (1 / 3) / 128))
    vocabulary = size.vocabulary or VOCABULARY
    tied = size.tied if size.tied is not None else size.parameters < TIED
    inside = max(active - vocabulary * width * (1 if tied else 2), active // 10)
    layers = size.layers or max(1, round(inside / (12 * width**2)))
    kept = size.key_values or min(KEY_VALUES, 2 * width)
    return ModelShape(size.parameters, width, layers, vocabulary, kept, active, tied)


def shape_of(model: str, revision: str | None, sizes: Mapping[str, ModelSize], called: str) -> ModelShape:
    """`called`: the role of the model, which --size may name as well."""
    size = sizes.get(called) or sizes.get(model)
    if size is not None:
        return guessed(size)
    try:
        directory = weights_directory(model, revision)
    except ModelError as error:
        raise ModelError(f"{error} To plan without it, give its size: --size {called}=32B.") from None
    if directory is None or not (directory / "config.json").is_file():
        raise ModelError(
            f"model {model!r} ({called}) is not on this machine, so its size is not known. Give it: --size {called}=32B, or "
            f"in the recipe, cluster: {{sizes: {{{model}: 32B}}}}."
        )
    return of_directory(directory)


def of_directory(directory: Path) -> ModelShape:
    """The shape from the config, and from the headers of weight files if they are on this machine."""
    raw = read_json(directory / "config.json")
    raw = raw.get("text_config", raw)
    names = {"hidden_size": ("n_embd", "d_model"), "num_hidden_layers": ("n_layer", "num_layers"), "vocab_size": ()}
    for name, others in names.items():
        found = next((raw[key] for key in (name, *others) if isinstance(raw.get(key), int)), None)
        if found is None:
            raise ModelError(f"{directory / 'config.json'} says nothing about {name}. Give the size: --size NAME=32B.")
        raw[name] = found
    config = SimpleNamespace(**{"tie_word_embeddings": True, **raw})
    everything, active = _counted(config)
    if any(directory.glob("*.safetensors")):
        stored = sum(stored_tensors(directory).values())
        active, everything = math.ceil(stored * active / everything), stored
    return ModelShape.of(config, everything, active)


def _counted(config: Any) -> tuple[int, int]:
    """All parameters and the parameters per token of a decoder with gated layers."""

    def number(*names: str) -> int:
        return next((int(value) for name in names if isinstance(value := vars(config).get(name), int) and value), 0)

    width, layers = config.hidden_size, config.num_hidden_layers
    queries = number("num_attention_heads", "n_head") or 1
    head = number("head_dim") or width // queries
    attention = 2 * width * head * (queries + (number("num_key_value_heads") or queries))
    inner = number("intermediate_size") or 4 * width
    experts, chosen = number("num_experts", "n_routed_experts", "num_local_experts"), number("num_experts_per_tok") or 1
    each = 3 * width * (number("moe_intermediate_size") or inner)
    shared = each * number("n_shared_experts")
    outside = config.vocab_size * width * (1 if config.tie_word_embeddings else 2)
    dense = min(number("first_k_dense_replace"), layers) if experts else layers
    everything = outside + layers * attention + dense * 3 * width * inner + (layers - dense) * (shared + experts * each)
    active = outside + layers * attention + dense * 3 * width * inner + (layers - dense) * (shared + chosen * each)
    return everything, active
