"""What a recipe will do, without running it: parameters, tokens, routes, memory. No weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import TypedDict

import torch

from opd.common.files import json_text, write_atomic
from opd.common.text import bytes_in_words, plain
from opd.data.prompts import DOMAIN
from opd.data.sources import PromptSource
from opd.engines.layers import writes_out
from opd.loop.producer import scores_ahead
from opd.loop.ranks import Ranks
from opd.models import load_config, lora_parameter_count, parameter_count
from opd.models.files import read_json
from opd.models.fused_layers import fuse_layers, kernels_on, why_stock
from opd.models.load import empty_model
from opd.plugins import plugin_errors
from opd.recipe import STAGE_PREFIX, Recipe, Stage
from opd.recipe.stage import MICRO_TOKENS, WEIGHTS
from opd.registry import Dtype
from opd.runner.checks import Checked, check_stage
from opd.runner.cost import ModelShape, in_short, memory, models_of_modules, paged_sizes, teachers_held
from opd.runner.inputs import PlannedModels
from opd.teachers.kinds import BATCH_TOKENS, ModelRef
from opd.teachers.pool import without_home

SHOWN = 50  # values of a route that are printed


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
    pool: str = ""  # which teachers are paged
    ahead: str = ""  # how far sampling runs ahead of training
    notes: tuple[str, ...] = ()  # what is skipped
    elsewhere: dict[str, int] = field(default_factory=dict)  # other device -> bytes of its teachers
    sizes: str = ""
    fused: str = ""  # fused parts of the student's layers
    unfused: str = ""  # why a GPU has none
    evaluated: tuple[str, ...] = ()  # domains with held-out prompts

    def lines(self) -> list[str]:
        size = sum(self.memory.values())
        parts = ", ".join(f"{name} {bytes_in_words(value)}" for name, value in self.memory.items())
        return [
            f"stage {self.stage} on {self.device}, precision {self.precision}",
            f"  student    {self.student}: {in_short(self.parameters)} parameters, {in_short(self.trained)} trained",
            *([f"  layers     one kernel each: {self.fused}"] if self.fused else []),
            *([f"  layers     not fused: {self.unfused}"] if self.unfused else []),
            *(f"  teacher    {name}: {in_short(count)} parameters" for name, count in self.teachers.items()),
            *([f"  pool       {self.pool}"] if self.pool else []),
            *self._routes(),
            *([f"  sizes      {self.sizes}"] if self.sizes else []),
            f"  a step     {self.rollouts_per_step} rollouts, at most {self.tokens_per_step:,} tokens (prompts of about {self.prompt_tokens:.0f})",
            *([f"  ahead      {self.ahead}"] if self.ahead else []),
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
    plans: list[Plan] = []
    asked, models = dict[str, list[PromptSource]](), PlannedModels()
    with plugin_errors():
        for stage in recipe.stages:
            # if a stage reuses an earlier stage's rollouts, only its prompts are known yet
            prompts = [one for source in stage.prompts for one in asked.get(source.source, [source])]
            asked[STAGE_PREFIX + stage.name] = prompts
            models.add(stage)
            if stage.select is not None:
                earlier = next(plan for plan in plans if plan.stage == stage.select.stage)
                stage.select.require(stage.name, stage.named_domains, earlier.evaluated)
            known = (
                {} if prompts == stage.prompts else {"curriculum": None}
            )  # rollouts come to an end, whatever their prompts do
            plans.append(_plan(stage.model_copy(update={"prompts": prompts, **known}), models.resolve))
    return plans


def _plan(stage: Stage, resolve: Callable[[str], str]) -> Plan:
    checked = check_stage(stage, resolve)
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
    here, precision = held.pop(""), stage.train.precision_on(str(checked.device))
    return Plan(
        stage=stage.name, device=str(checked.device), precision=precision, student=stage.student.model, parameters=student, trained=trained,
        teachers=teachers, routes=checked.routes, route=stage.route, prompt_tokens=inputs.scanned.mean, notes=(*inputs.notes, *stage.sampler.notes()), tokens_per_step=rollouts * longest,
        rollouts_per_step=rollouts, memory=memory(stage, precision, ModelShape.of(config, student), trained, here, longest, modules=models_of_modules(stage, _shapes(resolve))), elsewhere=held,
        pool=stage.pool.describe(list(paged_sizes(stage, _usual(stage, checked.device), _shapes(resolve)).values()), str(checked.device)), ahead=_ahead(stage),
        sizes=sizes_in_words(stage), fused=fuse_layers(empty_model(config)) if kernels_on(checked.device) else "",
        unfused=why_stock(checked.device), evaluated=tuple(inputs.questions),
    )  # fmt: skip


def _ahead(stage: Stage) -> str:
    rollout = stage.rollout
    if not rollout.staleness:
        return ""
    under_way = {
        "recompute": "are prefilled again with the new weights and continue",
        "keep": "continue with new weights over old keys and values",
        "wait": "finish with the weights they began with",
    }
    terms = [term.name for term in stage.objective if term.compares_with_sampler]
    corrected = (
        f"ratios to the log-probs of each token's own version in {', '.join(terms)}" if terms else "no correction"
    )
    alongside = "rewards and teachers" if scores_ahead(stage) else "rewards"
    count = stage.sampler.processes_alongside
    where = (
        "a thread with its own weights"
        if not count
        else f"{count} process{'es' if count > 1 else ''} with their own weights"
    )
    return (
        f"sampling runs up to {rollout.staleness} steps ahead of training, in {where}; {alongside} run alongside "
        f"training; unfinished rollouts {under_way[rollout.in_flight]}; {corrected}; a resumed run continues, but not bit for bit"
    )


def settle_sizes(stage: Stage, run: Path, checked: Checked, resolve: Callable[[str], str], ranks: Ranks) -> Stage:
    """The stage with open sizes filled in: kept by the run, or chosen now."""
    choose = partial(sizes_for, stage, checked, resolve)
    return with_sizes(stage, ranks.share(partial(kept_sizes, run, stage.name, choose)))


def sizes_for(stage: Stage, checked: Checked, resolve: Callable[[str], str]) -> Sizes:
    """Sizes that fit the device, by the plan's own estimate. Where sizes are constants, nothing is estimated."""
    device, config = checked.device, checked.student
    longest, precision = (
        checked.inputs.scanned.longest + stage.rollout.max_new_tokens,
        stage.train.precision_on(str(device)),
    )

    @cache
    def counted() -> tuple[ModelShape, int, int]:
        student = parameter_count(resolve(stage.student.model), stage.student.revision)
        held = _held(stage, device, resolve, student)[""]
        return ModelShape.of(config, student), _trained(stage, resolve, student), held

    modules = cache(lambda: models_of_modules(stage, _shapes(resolve)))

    def estimate(complete: Stage) -> int:
        return sum(memory(complete, precision, *counted(), longest, modules=modules()).values())

    half = (stage.sampler.dtype or WEIGHTS[precision]) == "bfloat16"
    written = half and kernels_on(device) and writes_out(config)
    return choose_sizes(stage, estimate, device, lambda: 2 * counted()[0].width, written)


def _trained(stage: Stage, resolve: Callable[[str], str], student: int) -> int:
    if stage.student.lora is None:
        return student
    return lora_parameter_count(resolve(stage.student.model), stage.student.lora, stage.student.revision)


def _held(stage: Stage, device: torch.device, resolve: Callable[[str], str], student: int) -> dict[str, int]:
    models = {without_home(ref, device) for kind in stage.teachers.values() for ref in kind.reads()}
    return teachers_held(stage, _usual(stage, device), models, _shapes(resolve), student)


def _usual(stage: Stage, device: torch.device) -> Dtype:
    return WEIGHTS[stage.train.precision_on(str(device))]


def _shapes(resolve: Callable[[str], str]) -> Callable[[ModelRef], ModelShape]:
    def shape(ref: ModelRef) -> ModelShape:
        name = resolve(ref.model)
        return ModelShape.of(load_config(name, ref.revision), parameter_count(name, ref.revision))

    return shape


# --- Sizes that a recipe leaves open: micro-batch and teacher-pass tokens, sampler slots, and compilation ---
#
# On a CPU they are constants. On a GPU they are the largest that fit its memory by the plan's own estimate. A run keeps its choice
# in `sizes.json`, so it uses the same sizes after a restart, also on another device.


NAME = "sizes.json"
FULL = 0.85  # usable fraction of a device's memory; the rest covers what the estimate misses
MOST_SLOTS = 256
LEAST_SLOTS = 8
MOST_TOKENS = 32_768  # of a micro-batch: more is not faster
LEAST_TOKENS = 1024
PASS = 100  # the least cost of a micro-batch, in decode steps: both are limited by kernel launches
MOST_SCORED = 16_384
SCORED_WIDTHS = 24  # bytes of a teacher's pass, per token and width
COMPILED_STEPS = 100_000  # decode steps that justify compiling: it takes about a minute and saves 1-2 ms each


class Sizes(TypedDict):
    micro_tokens: int
    batch_tokens: int
    slots: int | None  # None: the sampler chooses
    compile: bool


def choose_sizes(
    stage: Stage, estimate: Callable[[Stage], int], device: torch.device, width: Callable[[], int], written: bool
) -> Sizes:
    """`estimate`: bytes that a stage with these sizes takes. `width`: approximate width of the teachers' hidden states. `written`: whether
    decode steps use hand-written layers, which are faster than compiled ones.
    """
    if device.type != "cuda":
        return Sizes(micro_tokens=MICRO_TOKENS, batch_tokens=BATCH_TOKENS, slots=None, compile=False)
    share = torch.cuda.get_per_process_memory_fraction(device.index)  # 1, unless this process was limited
    total = int(share * torch.cuda.get_device_properties(device).total_memory)
    return fit_sizes(stage, estimate, total, width(), written)


def fit_sizes(stage: Stage, estimate: Callable[[Stage], int], total: int, width: int, written: bool = False) -> Sizes:
    """Of the slots and micro-batches that fit, choose those with the fewest weighted sampling rounds and training passes."""
    rollouts, longest = stage.rollout.prompts * stage.rollout.samples, stage.rollout.max_new_tokens
    found = Sizes(micro_tokens=LEAST_TOKENS, batch_tokens=MOST_SCORED, slots=LEAST_SLOTS, compile=False)

    def steps(pair: tuple[int, int]) -> int:
        slots, tokens = pair
        return -(-rollouts // slots) * longest + -(-rollouts * longest // tokens) * PASS

    pairs = product(
        _halves(min(-(-rollouts // 8) * 8, MOST_SLOTS), LEAST_SLOTS), _halves(MOST_TOKENS, LEAST_TOKENS)
    )  # largest first: the largest wins a tie
    for slots, tokens in sorted(pairs, key=steps):
        tried = Sizes(micro_tokens=tokens, batch_tokens=MOST_SCORED, slots=slots, compile=False)
        if estimate(with_sizes(stage, tried)) <= FULL * total:
            found = tried
            break
    while found["batch_tokens"] > LEAST_TOKENS and found["batch_tokens"] * width * SCORED_WIDTHS > total / 20:
        found["batch_tokens"] //= 2
    found["compile"] = not written and decode_steps(with_sizes(stage, found)) >= COMPILED_STEPS
    return found


def _halves(most: int, least: int) -> list[int]:
    found = [most]
    while found[-1] > least:
        found.append(max(found[-1] // 2, least))
    return found


def decode_steps(stage: Stage) -> int:
    """Decode steps of a whole stage with answers of the greatest length; 0 if it samples in another process."""
    if not stage.sampler.sequences():
        return 0
    rounds = -(-stage.rollout.prompts * stage.rollout.samples // stage.sampler.sequences())
    return stage.train.steps * rounds * stage.rollout.max_new_tokens


def with_sizes(stage: Stage, sizes: Sizes) -> Stage:
    """The stage with its open sizes filled in."""
    train = stage.train
    if train.micro_tokens is None:
        train = train.model_copy(update={"micro_tokens": sizes["micro_tokens"]})
    teachers = {name: kind.sized(sizes["batch_tokens"]) for name, kind in stage.teachers.items()}
    sampler = stage.sampler.sized(sizes["slots"], sizes["compile"])
    return stage.model_copy(update={"train": train, "sampler": sampler, "teachers": teachers})


def kept_sizes(directory: Path, stage: str, choose: Callable[[], Sizes]) -> Sizes:
    """The sizes that the run has kept, or else chosen and kept now."""
    known = _read(directory)
    if stage not in known:
        known = {**known, stage: choose()}
        write_atomic(directory / NAME, json_text(known, indent=1))
    return known[stage]


def keep_smaller_budget(directory: Path, stage: str, say: Callable[[str], None], tokens: int) -> None:
    """Keep a halved budget after a restart."""
    say(f"{stage}: memory ran out; micro-batches have {tokens:,} tokens from now on")
    known = _read(directory)
    write_atomic(directory / NAME, json_text({**known, stage: {**known[stage], "micro_tokens": tokens}}, indent=1))


def _read(directory: Path) -> Mapping[str, Sizes]:
    path = directory / NAME
    return read_json(path) if path.exists() else {}


def sizes_in_words(stage: Stage) -> str:
    """The chosen sizes of a stage, for the plan."""
    scored = sorted({tokens for kind in stage.teachers.values() if (tokens := kind.scored_at_once()) is not None})
    parts = [f"micro-batches of {stage.train.micro_tokens:,} tokens"]
    parts += [f"teachers read {' or '.join(f'{tokens:,}' for tokens in scored)} at once"] if scored else []
    steps = decode_steps(stage)
    worth = [f"{steps:,} decode steps; compiling pays off from {COMPILED_STEPS:,} on a GPU"] if steps else []
    return "; ".join([*parts, *stage.sampler.in_words(), *worth])
