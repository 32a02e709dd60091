"""Estimates of what a step costs: memory of a device, bytes moved, seconds. One cost model for every plan. No torch here.

Weights, masters, moments and caches are counted. Activations are a rule of thumb: about 34 widths per layer and token.
Times are operations and bytes divided by the device's rated speed times the fraction of it that is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opd.models.settings import layers_of_unit
from opd.recipe import Stage
from opd.recipe.stage import WEIGHTS
from opd.registry import Dtype
from opd.teachers.kinds import ModelRef

BYTES = {"float32": 4, "bfloat16": 2}
QUANTISED = {"int8": 1.0, "fp8": 1.0, "int4": 0.53, "mxfp4": 0.53}  # bytes per weight, scales included
CHUNKS = 5 * (64 << 20)  # the most bytes of logits that the loss holds at once


@dataclass(frozen=True)
class ModelShape:
    """The sizes that a model's cost depends on."""

    parameters: int
    width: int
    layers: int
    vocabulary: int
    key_values: int  # numbers cached per layer and token
    active: int  # parameters used per token
    tied: bool = True

    @classmethod
    def of(cls, config: Any, parameters: int, active: int | None = None) -> ModelShape:
        """From a model's transformers config."""
        width, layers, vocabulary = (
            int(getattr(config, name)) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        )
        # recurrent models have no heads, and a state of about one width
        queries = int(getattr(config, "num_attention_heads", None) or 1)
        heads = int(getattr(config, "num_key_value_heads", None) or queries)
        head = int(getattr(config, "head_dim", None) or width // queries)
        tied = bool(config.tie_word_embeddings)
        return cls(parameters, width, layers, vocabulary, 2 * heads * head, active or parameters, tied)

    @property
    def head(self) -> int:
        return self.vocabulary * self.width

    @property
    def outside(self) -> int:
        """Parameters outside the layers: embedding and head."""
        return self.head * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        return max(self.parameters - self.outside, 0) // self.layers

    @property
    def matrix(self) -> int:
        """Parameters of the largest matrix of a layer: about a quarter of those that a token uses."""
        return max(self.active - self.outside, 0) // self.layers // 4

    def stored(self, each: int, quantise: str | None = None) -> int:
        """Bytes of its weights. Quantisation covers the layers, not the head."""
        if quantise is None:
            return self.parameters * each
        return self.outside * each + int((self.parameters - self.outside) * QUANTISED[quantise])


@dataclass(frozen=True)
class Spread:
    """How a step is spread over ranks, and what runs elsewhere."""

    ranks: int = 1
    group: int = 1  # ranks that share one copy of the trained weights
    sharded: bool = False  # by FSDP, which also works with one rank
    samples: bool = True  # whether the ranks themselves sample
    teachers: str = "whole"  # shard: sharded over the ranks


ALONE = Spread()


def teachers_held(
    stage: Stage,
    usual: Dtype,
    models: Iterable[ModelRef],
    shape_of: Callable[[ModelRef], ModelShape],
    student: int,
    shared: bool = True,
) -> dict[str, int]:
    """Upper bound of the bytes of the teachers' weights per device ("": the student's). A model that several teachers name counts once.

    For a teacher on another device, the student's device holds a copy of the head. Of paged teachers, the largest count.
    `shared`: a teacher equal to the student without its adapters shares its tensors. This is not possible on ranks.
    """
    lora = stage.student.lora is not None
    paged = paged_sizes(stage, usual, shape_of)
    own = {ModelRef(stage.student.model, stage.student.revision, dtype) for dtype in (None, usual)}
    own = own if lora and shared else set()
    held = {"": student * sum(kind.bytes_per_weight(BYTES[usual], lora) for kind in stage.teachers.values())}
    held[""] += sum(sorted(paged.values())[-(stage.pool.resident or 0) :])
    for ref in sorted(set(models) - paged.keys() - own, key=str):
        shape, each = shape_of(ref), BYTES[ref.dtype or usual]
        held[ref.device or ""] = held.get(ref.device or "", 0) + shape.stored(each, ref.quantise)
        if ref.device is not None:
            held[""] += shape.head * each
    return held


def paged_sizes(stage: Stage, usual: Dtype, shape_of: Callable[[ModelRef], ModelShape]) -> dict[ModelRef, int]:
    """Bytes of each paged model."""
    return {ref: shape_of(ref).stored(BYTES[ref.dtype or usual]) for ref in stage.pool.paged(stage.teachers)}


def models_of_modules(stage: Stage, shape_of: Callable[[ModelRef], ModelShape]) -> dict[str, ModelShape]:
    """The model that each trainable module starts from, if it has one of its own."""
    start = stage.student.model, stage.student.revision
    return {name: shape_of(ModelRef(*ref)) for name, kind in stage.modules.items() for ref in kind.reads(*start)}


def memory(
    stage: Stage, precision: str, student: ModelShape, trained: int, teachers: int, longest: int, spread: Spread = ALONE,
    *, modules: Mapping[str, ModelShape] | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes of everything alive at once on one device. `longest`: tokens of a sequence. `teachers`: bytes of the teachers.

    `modules`: the models of trainable modules that have one of their own.
    """
    modules = modules or {}
    own = WEIGHTS[precision]
    each, half, lora = BYTES[own], precision != "float32", stage.student.lora is not None
    kept = 4 if half and not lora and precision == "mixed" else 0  # a master for every weight
    gradient = each if precision == "bfloat16" else 4
    step = stage.rollout.prompts * stage.rollout.samples * longest
    tokens = max(min(stage.train.micro_budget, -(-step // spread.ranks)), longest)
    passes = [_kept_per_token(student, stage.student.gradient_checkpointing)]
    passes += [_kept_per_token(shape, False) for shape in modules.values()]
    activations = tokens * max(passes) * (2 if half else 4)
    activations += min(CHUNKS, 5 * tokens * student.vocabulary * 4)
    # The merged weights on their way to the sampler, after the activations are freed: all at once; on ranks, layer by layer.
    merged = student.parameters * each if lora and not spread.sharded else 0
    optimiser, matrices = stage.train.optimiser, hidden_matrices(stage, student, trained)
    moments = optimiser.state_bytes(matrices, trained - matrices)
    found = {
        "weights": student.parameters * each // spread.group,
        f"gradients and {optimiser.title}": (trained * (gradient + kept) + moments) // spread.group,
        "teachers": teachers,
        "activations": max(activations, merged),
        "sampler": _sampler(stage, student, own, longest, spread),
    }
    if stage.modules:  # weights, gradients and moments, complete on every rank
        sizes = ((kind.size(student.width), kind.optimiser) for kind in stage.modules.values())
        found["modules"] = sum(8 * size + optimiser.state_bytes(size, 0) for size, optimiser in sizes)
        for name, shape in modules.items():
            inside = max(shape.parameters - shape.outside, 0)
            every = inside + shape.head  # the output head is not used
            moments = stage.modules[name].optimiser.state_bytes(inside, shape.head)
            held = every * (each + gradient + (4 if half and precision == "mixed" else 0))
            found["modules"] += held + moments + (0 if shape.tied else shape.head * each)
    if spread.sharded:
        # Gathered: the root, the current layers and the next ones, or everything if a group is one rank; plus gradients before they are
        # summed, or a layer that is being merged.
        unit = student.layer * layers_of_unit(student.layers, student.layer)
        passing = student.parameters if spread.group == 1 else student.outside + 2 * unit
        further = student.layer * each if lora else (student.outside + unit) * 4
        largest = student.width * 4 * stage.student.lora.rank if stage.student.lora is not None else student.matrix
        found["gathered"] = max(passing * each + further, optimiser.update_bytes(largest))
    return found


def hidden_matrices(stage: Stage, student: ModelShape, trained: int) -> int:
    """Trained numbers outside embeddings and the head."""
    return trained if stage.student.lora is not None else max(min(student.parameters - student.outside, trained), 0)


def _kept_per_token(model: ModelShape, recomputed: bool) -> int:
    return model.width * model.layers * (2 if recomputed else 34)


def _sampler(stage: Stage, student: ModelShape, own: str, longest: int, spread: Spread) -> int:
    """Slots for keys and values, and a copy of the weights unless the sampler shares the trained ones."""
    if not spread.samples:
        return 0
    each = BYTES[stage.sampler.dtype or own]
    slots = stage.sampler.sequences()
    lora = stage.student.lora is not None
    copied = lora or spread.sharded or stage.sampler.dtype not in (None, own)
    cache, weights = slots * longest * student.key_values * student.layers * each, student.parameters * each
    # Further samplers, each with its own weights. A thread also needs room for weights in transfer; processes pass them through host memory.
    processes = stage.sampler.processes_alongside
    ahead = max(processes, 1) * (cache + weights) + (0 if processes else student.parameters * BYTES[own])
    return cache + (weights if copied else 0) + (ahead if stage.rollout.staleness else 0)


def in_short(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number:,}"


# --- Time ---


@dataclass(frozen=True)
class Device:
    """The rated speeds of a GPU."""

    name: str
    memory: int  # bytes
    flops: float  # dense bf16 operations per second
    bandwidth: float  # bytes per second of its own memory
    link: float = 50e9  # bytes per second to other machines
    reached: float = 0.4  # fraction of `flops` reached in training and scoring

    @property
    def usable(self) -> int:
        """Usable bytes. The rest goes to the driver and to fragmentation."""
        return int(0.9 * self.memory)


DEVICES = {
    "a100": Device("a100", 80 << 30, 312e12, 2.0e12, 25e9),
    "h100": Device("h100", 80 << 30, 989e12, 3.35e12),
    "h200": Device("h200", 141 << 30, 989e12, 4.8e12),
    "b200": Device("b200", 180 << 30, 2250e12, 8.0e12),
}


@dataclass(frozen=True)
class Work:
    """The size of one step."""

    rollouts: int
    prompt: int  # tokens of one prompt
    response: int
    updates: int = 1  # passes over each batch
    recomputes: bool = False

    @classmethod
    def of(cls, stage: Stage, prompt: int) -> Work:
        rollouts = stage.rollout.prompts * stage.rollout.samples
        recomputes = stage.student.gradient_checkpointing
        return cls(rollouts, prompt, stage.rollout.max_new_tokens, stage.train.epochs, recomputes)

    @property
    def tokens(self) -> int:
        return self.rollouts * (self.prompt + self.response)


def sampling_seconds(work: Work, student: ModelShape, each: int, device: Device, gpus: int, replicas: int) -> float:
    """Each token reads all weights it uses once per replica, and the keys and values it attends to. Prompts are read in one pass."""
    own = -(-work.rollouts // replicas)  # rollouts of one replica, in parallel as far as memory allows
    room = max(gpus * device.usable - student.parameters * each, device.usable // 10)
    cache = student.key_values * student.layers * 2 * (work.prompt + work.response)
    width = max(min(own, room // max(cache, 1)), 1)
    rounds = own / width
    read = min(student.active * width, student.parameters) * each + width * cache // 2
    token = max(read / (gpus * device.bandwidth), 2 * student.active * width / (gpus * device.flops * device.reached))
    prefill = 2 * student.active * own * work.prompt / (gpus * device.flops * device.reached)
    return rounds * work.response * token / 0.6 + prefill


def scoring_seconds(tokens: float, teacher: ModelShape, device: Device, gpus: int) -> float:
    return 2 * teacher.active * tokens / (gpus * device.flops * device.reached)


def update_seconds(work: Work, student: ModelShape, device: Device, ranks: int) -> float:
    """Forward, and backward at twice its cost; one more forward with recomputed layers, and one more before several passes."""
    passes = work.updates * (8 if work.recomputes else 6) + (2 if work.updates > 1 else 0)
    return passes * student.active * work.tokens / (ranks * device.flops * device.reached)


def gradient_bytes(stage: Stage, work: Work, student: ModelShape, trained: int, each: int, spread: Spread) -> float:
    """Bytes that one rank receives in a step: weights gathered forward and backward, gradients summed, once per micro-batch; and what
    the optimiser gathers, once per update.
    """
    if spread.ranks == 1:
        return 0.0
    micro = max(stage.train.micro_budget, work.prompt + work.response)
    passes = work.updates * max(-(-work.tokens // (spread.ranks * micro)), 1)
    share = (spread.group - 1) / spread.group
    gathered = 0 if stage.student.lora is not None else 2 * student.parameters * each
    between = 2 * trained * 4 / spread.group * (1 - spread.group / spread.ranks)  # replicas sum their shards
    updates = stage.train.updates * stage.train.optimiser.gathered_bytes(hidden_matrices(stage, student, trained))
    return passes * (share * (gathered + trained * 4) + between) + share * updates


def module_bytes(modules: Mapping[str, ModelShape], spread: Spread) -> float:
    """Bytes that one rank receives in a step for the gradients of modules with a model of their own, which every rank has in full."""
    return 2 * 4 * sum(shape.parameters for shape in modules.values()) * (1 - 1 / spread.ranks)


def module_seconds(tokens: int, modules: Mapping[str, ModelShape], device: Device, ranks: int) -> float:
    """Every answer is scored, and then passed again with gradients."""
    return 8 * sum(shape.active for shape in modules.values()) * tokens / (ranks * device.flops * device.reached)
