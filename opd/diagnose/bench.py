"""What a diagnosis is made on: the models of a stage, open, and a few of its prompts. Nothing is trained or stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opd.config import STAGE_PREFIX, Stage
from opd.config.graph import edges
from opd.data.render import render_prompts, response_text
from opd.data.source import Source
from opd.errors import DataError, UserError
from opd.evaluation.passk import is_right
from opd.models import load_config, load_tokenizer
from opd.models.language_model import LanguageModel
from opd.models.tokenizers import differing_ids
from opd.rewards import Rewarder, check_rewards
from opd.runner.checks import as_named, pick_device
from opd.runner.prompts import open_prompts
from opd.runner.stage_models import StageModels
from opd.runner.stage_samplers import StageSamplers
from opd.sampling.collect import collect
from opd.sampling.draws import request_key
from opd.teachers.crossing import BytesView
from opd.teachers.kinds import ModelRef, Surroundings, TeacherKind
from opd.teachers.pool import open_teachers
from opd.teachers.pool_settings import TeacherPool
from opd.teachers.views import Group
from opd.trainer.world import World
from opd.types import Prompt, Rollout, Sample, SampleRequest, Sampling, TeacherLike, TokenSampler

VISIT = -3  # keys draws that no step, evaluation or start-up table makes
SCORED = {"hidden", "logprobs_at"}  # one of them a teacher has to offer


@dataclass(frozen=True)
class Asking:
    """One prompt that both models answer."""

    prompt: Prompt
    ids: np.ndarray  # as the student reads it
    source: int  # its number in the recipe


@dataclass
class Bench:
    spec: Stage
    student: LanguageModel
    kinds: dict[str, TeacherKind]  # with the view bytes where the tokenizer is another
    teachers: dict[str, TeacherLike]
    differ: dict[str, int]  # teacher -> ids that mean something else to it
    stop_ids: tuple[int, ...]
    samplers: StageSamplers
    rewarder: Rewarder
    asked: dict[str, Asking]  # by prompt id
    notes: list[str] = field(default_factory=list)

    @property
    def domains(self) -> dict[str, list[Asking]]:
        found: dict[str, list[Asking]] = {}
        for asking in self.asked.values():
            found.setdefault(asking.prompt.domain, []).append(asking)
        return found

    @property
    def prompts(self) -> dict[str, Prompt]:
        return {name: asking.prompt for name, asking in self.asked.items()}

    @property
    def limit(self) -> int:
        """Tokens of an answer."""
        return self.spec.rollout.max_new_tokens

    def sampling(self, stop_ids: tuple[int, ...] | None = None) -> Sampling:
        """At temperature 1 from everything: what the models themselves would say."""
        stops = self.stop_ids if stop_ids is None else stop_ids
        return Sampling(self.limit, stop_ids=stops, stop_strings=tuple(self.spec.rollout.stop))

    def kwargs(self, prompt_id: str) -> Mapping[str, Any]:
        return self.spec.prompts[self.asked[prompt_id].source].chat_template_kwargs

    def groups(
        self, rollouts: Sequence[Rollout], teacher: str, rewards: Mapping[str, float | None]
    ) -> dict[str, Group]:
        """Answers to each prompt, as the teacher's view sees them."""
        members: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            members.setdefault(rollout.group, []).append(rollout)
        tokenizer, own = self.student.tokenizer, self.kinds[teacher].view.chat_template == "teacher"
        model = self.teachers[teacher].model
        found = {
            name: Group(group, tokenizer, rewards, self.kwargs(group[0].prompt_id), self.stop_ids)
            for name, group in members.items()
        }
        if not own or model is None:
            return found
        return {name: replace(group, tokenizer=model.tokenizer, student=tokenizer) for name, group in found.items()}

    def right(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """1 right, 0 wrong, NaN where nothing rewards it."""
        marks = np.full(len(texts), np.nan)
        covered = [at for at, name in enumerate(prompt_ids) if self.rewarder.covers(self.asked[name].prompt)]
        samples = [Sample(self.asked[prompt_ids[at]].prompt, texts[at]) for at in covered]
        for at, result in zip(covered, self.rewarder(samples) if samples else [], strict=True):
            marks[at] = is_right(result)
        return marks

    def text(self, rollout: Rollout) -> str:
        return response_text(rollout.response_ids, self.student.tokenizer, self.stop_ids)

    def draw(
        self, sampler: TokenSampler, wanted: Sequence[Draw], stop_ids: tuple[int, ...] | None = None
    ) -> list[Rollout]:
        """One rollout each; they belong to their prompt, whatever was read in its place."""
        sampling = self.sampling(stop_ids)
        requests = [
            SampleRequest(
                f"{draw.asking.prompt.id}/{draw.number}",
                draw.asking.ids if draw.read is None else draw.read,
                request_key(self.spec.seed, draw.asking.prompt.id, VISIT, draw.number),
                sampling,
                draw.prefix,
            )
            for draw in wanted
        ]
        found = collect(sampler, requests) if requests else []
        return [
            replace(
                rollout,
                prompt_id=draw.asking.prompt.id,
                domain=draw.asking.prompt.domain,
                group=draw.asking.prompt.id,
                sample=draw.number,
                visit=VISIT,
            )
            for rollout, draw in zip(found, wanted, strict=True)
        ]

    def close(self) -> None:
        self.rewarder.close()
        self.samplers.close()


@dataclass(frozen=True)
class Draw:
    """One answer to be sampled. `number` keys it; `read`: in place of what the student reads; `prefix`: how it begins."""

    asking: Asking
    number: int
    read: np.ndarray | None = None
    prefix: np.ndarray | None = None


def open_bench(spec: Stage, count: int, scratch: Path, say: Callable[[str], None]) -> Bench:
    """`count`: prompts of each domain. What cannot work is refused before weights are loaded. No teacher waits elsewhere."""
    _require_here(spec)
    for ref in (ModelRef(spec.student.model, spec.student.revision), *_read(spec)):
        load_config(ref.model, ref.revision)  # who is not here is told of before anybody is asked again and again
    rollout = spec.rollout.model_copy(update={"staleness": 0, "in_flight": "recompute"})
    spec = spec.model_copy(update={"pool": TeacherPool(), "rollout": rollout})  # nothing is sampled ahead
    device = pick_device(spec.device)
    differ = {name: _differ(spec, kind) for name, kind in _teachers(spec).items()}
    kinds = {
        name: kind.model_copy(update={"view": BytesView(skip=kind.view.skip)})
        if differ[name] and not kind.view.crosses
        else kind
        for name, kind in _teachers(spec).items()
    }
    sources = open_prompts(spec)
    examples = [prompt for source in sources for prompt in source.examples()]
    rewarder = check_rewards(spec.rewards, examples, say=say)
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    torch.manual_seed(spec.seed)
    world = World()
    models = StageModels(spec, device, _as_it_is, as_named, scratch, world)
    student = models.student(spec, sharded=False)
    teachers, stop_ids = open_teachers(kinds, student, models.teacher, Surroundings(say, directory=scratch))
    if not stop_ids:
        raise UserError(
            f"{spec.student.model!r} and its teachers name no stop id. Set eos_token_id in a generation_config.json."
        )
    context = min([student.context, *(teacher.context for teacher in teachers.values())])
    asked, notes = _asked(spec, sources, student.tokenizer, count, context - spec.rollout.max_new_tokens)
    longest = max(asking.ids.size for asking in asked.values()) + spec.rollout.max_new_tokens
    samplers = StageSamplers(spec, student, teachers, longest, stop_ids, world)
    samplers.load(samplers.weights_of(student, 0))
    return Bench(spec, student, kinds, teachers, differ, stop_ids, samplers, rewarder, asked, notes)


def _as_it_is(name: str) -> str:
    return name


def _require_here(spec: Stage) -> None:
    if missing := [edge for edge in edges(spec) if edge.stage]:
        raise UserError(
            f"stage {spec.name!r} takes {missing[0].key} from {STAGE_PREFIX}{missing[0].stage}, which has not run. Diagnose the "
            "first stage, or name the directory of a trained model there."
        )
    if spec.student.merge is not None:
        raise UserError(f"stage {spec.name!r} merges its student when it starts. Merge first, and name the result.")
    if not _teachers(spec):
        raise UserError(
            "there is no teacher to look at: none of the role `teacher` gives log-probs of any text. Name one: "
            "--teacher MODEL, `teachers` in a recipe, or another stage of it (--stage NAME)."
        )


def _teachers(spec: Stage) -> dict[str, TeacherKind]:
    """Those that can be asked about answers that nobody has seen before."""
    return {
        name: kind
        for name, kind in spec.teachers.items()
        if kind.role == "teacher" and kind.scores_any and SCORED & kind.offers
    }


def _read(spec: Stage) -> list[ModelRef]:
    return [ref for kind in _teachers(spec).values() for ref in kind.reads()]


def _differ(spec: Stage, kind: TeacherKind) -> int:
    student = load_tokenizer(spec.student.model, spec.student.revision)
    return sum(len(differing_ids(student, load_tokenizer(ref.model, ref.revision))) for ref in kind.reads())


def _asked(
    spec: Stage, sources: Sequence[Source], tokenizer: Any, count: int, room: int
) -> tuple[dict[str, Asking], list[str]]:
    """Training prompts, at most `count` of each domain, of those that leave room for an answer."""
    found: dict[str, Asking] = {}
    taken: dict[str, int] = {}
    long, unreadable = 0, list[DataError]()
    for number, source in enumerate(sources):
        kwargs = spec.prompts[number].chat_template_kwargs
        prompts = source.prompts("train", count)
        for prompt, ids in zip(prompts, render_prompts(prompts, tokenizer, kwargs, whole=True), strict=True):
            if isinstance(ids, DataError):
                unreadable.append(ids)
            elif ids.size > room:
                long += 1
            elif taken.get(prompt.domain, 0) < count:
                taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
                found[prompt.id] = Asking(prompt, ids, number)
    if not found and unreadable:
        raise unreadable[0]
    if not found:
        raise DataError(
            f"prompts {', '.join(source.source for source in spec.prompts)}: none leaves room for {spec.rollout.max_new_tokens:,} "
            f"tokens of an answer ({max(room, 0):,} tokens are left for a prompt). Lower --max-new-tokens."
        )
    left = long + len(unreadable)
    return found, [f"{left:,} prompts are too long or cannot be rendered, and were left out"] if left else []
