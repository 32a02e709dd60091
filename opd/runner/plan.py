"""What a recipe is going to do, without doing it: parameters, tokens, routes, memory. No weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from pathlib import Path

import torch

from opd.config import STAGE_PREFIX, Recipe, Stage
from opd.config.stage import WEIGHTS
from opd.data.prompts import DOMAIN
from opd.data.source import PromptSource
from opd.models import load_config, lora_parameter_count, parameter_count
from opd.models.fused import fuse_layers, kernels_on, why_stock
from opd.models.load import empty_model
from opd.plugins import plugin_errors
from opd.runner.checks import Checked, check_stage
from opd.runner.cost import ModelShape, in_short, memory, paged_sizes, teachers_held
from opd.runner.merges import PlannedModels
from opd.runner.sizes import Sizes, choose_sizes, kept_sizes, sizes_in_words, with_sizes
from opd.sampling.decode_layers import writes_out
from opd.settings import Dtype
from opd.teachers.kinds import ModelRef
from opd.teachers.pool import settled
from opd.text import bytes_in_words, plain
from opd.trainer.ahead import scores_ahead
from opd.trainer.world import World

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
    pool: str = ""  # which teachers come and go
    ahead: str = ""  # how sampling runs ahead of training
    notes: tuple[str, ...] = ()  # what is skipped
    elsewhere: dict[str, int] = field(default_factory=dict)  # other device -> bytes of teachers on it
    sizes: str = ""
    fused: str = ""  # parts of the student's layers that are one kernel each
    unfused: str = ""  # why a GPU has none
    evaluated: tuple[str, ...] = ()  # domains with held-out prompts

    def lines(self) -> list[str]:
        size = sum(self.memory.values())
        parts = ", ".join(f"{name} {bytes_in_words(value)}" for name, value in self.memory.items())
        return [
            f"stage {self.stage} on {self.device}, precision {self.precision}",
            f"  student    {self.student}: {in_short(self.parameters)} parameters, {in_short(self.trained)} trained",
            *([f"  layers     one kernel each: {self.fused}"] if self.fused else []),
            *([f"  layers     as their classes are written: {self.unfused}"] if self.unfused else []),
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
            # of a stage whose rollouts are taken up again, what it asks is all that is known yet
            prompts = [one for source in stage.prompts for one in asked.get(source.source, [source])]
            asked[STAGE_PREFIX + stage.name] = prompts
            models.add(stage)
            if stage.select is not None:
                earlier = next(plan for plan in plans if plan.stage == stage.select.stage)
                stage.select.require(stage.name, stage.named_domains, earlier.evaluated)
            plans.append(_plan(stage.model_copy(update={"prompts": prompts}), models.resolve))
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
        rollouts_per_step=rollouts, memory=memory(stage, precision, ModelShape.of(config, student), trained, here, longest), elsewhere=held,
        pool=stage.pool.describe(list(paged_sizes(stage, _usual(stage, checked.device), _shapes(resolve)).values()), str(checked.device)), ahead=_ahead(stage),
        sizes=sizes_in_words(stage), fused=fuse_layers(empty_model(config)) if kernels_on(checked.device) else "",
        unfused=why_stock(checked.device), evaluated=tuple(inputs.questions),
    )  # fmt: skip


def _ahead(stage: Stage) -> str:
    rollout = stage.rollout
    if not rollout.staleness:
        return ""
    under_way = {
        "recompute": "are read again by new weights and go on with them",
        "keep": "go on with new weights over old keys and values",
        "wait": "are finished with the weights they began with",
    }
    terms = [term.name for term in stage.objective if term.compares_with_sampler]
    corrected = (
        f"ratios to the log-probs of each token's own version in {', '.join(terms)}" if terms else "no correction"
    )
    beside = "rewards and teachers" if scores_ahead(stage) else "rewards"
    count = stage.sampler.beside_trainer
    where = (
        "a thread with weights of its own"
        if not count
        else f"{count} process{'es' if count > 1 else ''} with weights of their own"
    )
    return (
        f"sampling runs up to {rollout.staleness} steps ahead of training, in {where}; {beside} are asked beside "
        f"training; rollouts under way {under_way[rollout.in_flight]}; {corrected}; a resumed run goes on, but not bit for bit"
    )


def settle_sizes(stage: Stage, run: Path, checked: Checked, resolve: Callable[[str], str], world: World) -> Stage:
    """With what it leaves open, as the run has kept it or chooses it now."""
    choose = partial(sizes_for, stage, checked, resolve)
    return with_sizes(stage, world.share(partial(kept_sizes, run, stage.name, choose)))


def sizes_for(stage: Stage, checked: Checked, resolve: Callable[[str], str]) -> Sizes:
    """What fits the device, by the estimate that the plan prints; where sizes are constants, nothing is counted."""
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

    def estimate(settled: Stage) -> int:
        return sum(memory(settled, precision, *counted(), longest).values())

    half = (stage.sampler.dtype or WEIGHTS[precision]) == "bfloat16"
    written = half and kernels_on(device) and writes_out(config)
    return choose_sizes(stage, estimate, device, lambda: 2 * counted()[0].width, written)


def _trained(stage: Stage, resolve: Callable[[str], str], student: int) -> int:
    if stage.student.lora is None:
        return student
    return lora_parameter_count(resolve(stage.student.model), stage.student.lora, stage.student.revision)


def _held(stage: Stage, device: torch.device, resolve: Callable[[str], str], student: int) -> dict[str, int]:
    models = {settled(ref, device) for kind in stage.teachers.values() for ref in kind.reads()}
    return teachers_held(stage, _usual(stage, device), models, _shapes(resolve), student)


def _usual(stage: Stage, device: torch.device) -> Dtype:
    return WEIGHTS[stage.train.precision_on(str(device))]


def _shapes(resolve: Callable[[str], str]) -> Callable[[ModelRef], ModelShape]:
    def shape(ref: ModelRef) -> ModelShape:
        name = resolve(ref.model)
        return ModelShape.of(load_config(name, ref.revision), parameter_count(name, ref.revision))

    return shape
